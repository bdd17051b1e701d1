"""One vLLM in this process whose KV scales and weights are changed in place, and which scores rows without its slow `prompt_logprobs`.

A start serves any number of policies. A hook catches the hidden states; `scoring` makes log probabilities of them.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.scoring import OutputMatrix, Reference, Scores, beside, first, groups, rows_of
from calibrate.engines.extension import scales_of
from calibrate.engines.host import sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.names import match_layers
from calibrate.errors import CheckFailed, UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import LayerScales, Scales


class Kernel:
    """vLLM on one checkpoint with an FP8 or a 16-bit cache.

    Args:
        checkpoint: for FP8 one with a KV scheme, whose strategy decides how many scales a layer holds; for 16 bits one without.
        fp8: the cache. backend: vLLM's attention backend, None for its choice. longest: tokens of the longest row.
        step_tokens: tokens of one forward pass; it holds whole rows. Every backend reads K and V back from the cache, a row's own too.
        skip_layers: vLLM's `kv_cache_dtype_skip_layers`.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        fp8: bool,
        backend: str | None,
        longest: int,
        step_tokens: int = 16384,
        cache_bytes: int = 1 << 30,
        skip_layers: Sequence[str] = (),
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is in this process
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        import vllm

        cuda = uses_cuda(vllm_distribution())
        if not cuda:
            _prepare_cpu()
        self.step_tokens, self.longest = max(step_tokens, longest), longest
        dtype = sixteen_bit(SourceCheckpoint.open(checkpoint).config)
        more: dict[str, Any] = {"attention_backend": backend} if backend else {}
        more |= {"gpu_memory_utilization": 0.1} if cuda else {}  # with a cache of given size it only says what must be free
        more |= {"kv_cache_dtype_skip_layers": list(skip_layers)} if skip_layers else {}
        started = time.monotonic()
        self.llm = vllm.LLM(
            model=str(checkpoint.resolve()),
            dtype=dtype,
            kv_cache_dtype="fp8" if fp8 else "auto",
            max_model_len=longest + 1,  # one token is generated
            max_num_batched_tokens=self.step_tokens,
            max_num_seqs=min(256, self.step_tokens),
            kv_cache_memory_bytes=cache_bytes,
            seed=0,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            enable_prefix_caching=False,
            disable_log_stats=True,
            max_logprobs=20,
            **more,
        )
        self.start_seconds = time.monotonic() - started
        found: list[torch.nn.Module] = []
        self.llm.apply_model(found.append)
        self.model = found[0]
        self.layers = {name: module for name, module in self.model.named_modules() if hasattr(module, "_k_scale_float")}
        self._output = OutputMatrix.of(self.model, self.llm.llm_engine.vllm_config.model_config.get_hidden_size())
        self._steps: list[tuple[torch.Tensor, ...]] = []
        self._original: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()
        self._held: tuple[Reference | None, list[torch.Tensor]] = (None, [])
        self.model.register_forward_hook(self._catch, with_kwargs=True)
        caches = {record["module"]: record["kv_cache_dtype"].startswith("fp8") for record in scales_of(self.model) if record["caches"]}
        if not skip_layers and set(caches.values()) != {fp8}:
            raise CheckFailed(
                f"vLLM keeps {'an FP8' if not fp8 else 'a 16-bit'} cache in {next(name for name, is_fp8 in caches.items() if is_fp8 != fp8)}"
            )

    def info(self) -> dict[str, Any]:
        """What computes here."""
        record = scales_of(self.model)[0]
        return {
            "engine": vllm_distribution(),
            "backend": record["backend"],
            "flash": getattr(self.layers[record["module"]].impl, "vllm_flash_attn_version", None),
            "cache": record["kv_cache_dtype"],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "start_seconds": round(self.start_seconds, 1),
        }

    def set_scales(self, scales: Scales) -> None:
        """Put these scales where vLLM's loader puts a checkpoint's, and read them back.

        Raises:
            UsageError: other layers than the model's, or one scale a head where the checkpoint was loaded with one a tensor.
            CheckFailed: what the modules hold afterwards is something else.
        """
        pairs = match_layers([layer.module for layer in scales.layers], list(self.layers))
        absent = set(self.layers) - set(pairs.values())
        if absent or len(pairs) < len(scales.layers):
            raise UsageError(f"the scales are of other layers than the model's: {min(absent, default='it has fewer')}")
        wanted = {pairs[layer.module]: self._put(pairs[layer.module], layer) for layer in scales.layers}
        for record in scales_of(self.model):
            for kind, values in wanted[record["module"]].items():
                if record["scales"][kind] != values or record["floats"][kind] != max(values):
                    raise CheckFailed(f"{record['module']} holds {record['scales'][kind]} for {kind}, not {values}")

    def set_layer(self, layer: LayerScales) -> None:
        """The same for one layer, not read back."""
        self._put(match_layers([layer.module], list(self.layers))[layer.module], layer)

    def _put(self, name: str, layer: LayerScales) -> dict[str, list[float]]:
        module, put = self.layers[name], {}
        with torch.inference_mode():
            for kind, value in layer.items():
                held = getattr(module, f"_{kind}_scale")
                fit = fitted(value, held.numel(), int(module.num_kv_heads))
                held.copy_(torch.from_numpy(fit).reshape(held.shape))
                setattr(module, f"_{kind}_scale_float", float(fit.max()))  # what some backends read instead
                if hasattr(module, f"_{kind}_scale_cpu"):
                    getattr(module, f"_{kind}_scale_cpu").fill_(float(fit.max()))
                put[kind] = fit.tolist()
        return put

    def set_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights in place through vLLM's own loader, which fuses them. Names are the checkpoint's; `restore_weights` undoes it."""
        if not self._original:
            self._original = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        with torch.inference_mode():
            loaded = self.model.load_weights(iter(tensors.items()))
        if not loaded or not set(loaded) <= set(self._original):
            raise CheckFailed("vLLM's loader did not say which parameters it changed, or made new ones")
        self._changed |= set(loaded)

    def restore_weights(self) -> None:
        """Put the checkpoint's own weights back, bit for bit."""
        now = dict(self.model.named_parameters())
        with torch.inference_mode():
            for name in self._changed:
                now[name].copy_(self._original[name])
        self._changed.clear()

    def reference(self, rows: Sequence[np.ndarray]) -> Reference:
        """Score rows as the reference."""
        with torch.inference_mode():
            parts = [first(logits, own) for logits, own, _ in self._output.blocks(self.hidden(rows), rows)]
        return Reference(_lengths(rows), *(np.concatenate(column) for column in zip(*parts, strict=True)))

    def score(self, rows: Sequence[np.ndarray], reference: Reference) -> Scores:
        """Score the rows that the reference scored. Raises UsageError for others."""
        if _lengths(rows).tolist() != reference.lengths.tolist():
            raise UsageError("these are not the rows of the reference")
        hidden = self.hidden(rows)
        if self._held[0] is not reference:
            columns = (reference.top_ids, reference.top_logprobs, reference.rest)
            self._held = (reference, [torch.from_numpy(column).to(hidden.device) for column in columns])
        with torch.inference_mode():
            parts = [beside(logits, own, *(each[place] for each in self._held[1])) for logits, own, place in self._output.blocks(hidden, rows)]
        return Scores(_lengths(rows), *(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))

    def hidden(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        """The final hidden states of all tokens but the last of each row, [n, hidden], rows joined."""
        from vllm import SamplingParams

        if min(len(row) for row in rows) < 2 or max(len(row) for row in rows) > self.longest:
            raise UsageError(f"rows must have 2 to {self.longest} tokens")
        options = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
        parts = []
        for group in groups(rows, self.step_tokens):
            self._steps.clear()
            self.llm.generate([{"prompt_token_ids": row.tolist()} for row in group], options, use_tqdm=False)
            parts += rows_of(self._steps, group)
        self._steps.clear()
        return torch.cat(parts)

    def _catch(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        self._steps.append((ids.clone(), positions.clone(), output.clone()))


def fitted(value: np.ndarray, size: int, kv_heads: int) -> np.ndarray:
    """A scale as the engine's buffer of `size` holds it: repeated where it is one, the largest of each group where q has one a query head."""
    if value.size == size:
        return value.reshape(-1)
    if value.size == 1:
        return np.repeat(value.reshape(-1), size)
    if value.size % kv_heads == 0 and size == kv_heads:
        return value.reshape(kv_heads, -1).max(axis=1)
    raise UsageError(f"{value.size} scales for a buffer of {size}: the checkpoint was loaded per tensor")


def _lengths(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(row) for row in rows], dtype=np.int64)


def _prepare_cpu() -> None:
    """Keep linear weights where they can be changed, and ask for AMX tiles, which vLLM 0.32 uses without asking."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
