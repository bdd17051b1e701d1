"""The vLLM engine: real FP8 kernels, one child process a session, the scales proven loaded before anything is measured."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.compare import compare_scales
from calibrate.engines.conversation import Conversation, conversation
from calibrate.engines.host import check_heads, check_parallel, check_runs_fp8, read_config, sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.serving import Serving, cache_name, serving
from calibrate.engines.session import EngineInfo, TokenScores, Variant
from calibrate.engines.source import file_scales, kv_strategy
from calibrate.engines.verify import backends, engine_env
from calibrate.errors import CheckFailed, UsageError
from calibrate.model import SourceCheckpoint
from calibrate.progress import note

_CHILD = "calibrate.engines.vllm_session_child"
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class CacheCapacity:
    """What vLLM's KV cache holds, in its own numbers.

    Attributes:
        blocks, block_size: blocks of so many tokens in each cache group. bytes: of all cache tensors on one rank.
        tokens: capacity counting sliding windows and groups; max_concurrency: requests of the longest context at once. None before vLLM 0.26.
    """

    blocks: int
    block_size: int
    bytes: int
    tokens: int | None
    max_concurrency: float | None


class VllmSession:
    """One vLLM with one variant's cache; implements `session.Session`."""

    def __init__(self, child: Conversation, info: EngineInfo, longest: int) -> None:
        self._child, self._info, self._longest = child, info, longest

    def info(self) -> EngineInfo:
        return self._info

    def capacity(self) -> CacheCapacity:
        """The KV cache that vLLM allocated."""
        return CacheCapacity(bytes=max(self._child.hello["cache_bytes"]), **self._child.hello["capacity"])

    def score(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Log probabilities of every row's tokens and the 20 likeliest at each position. Raises UsageError for a row that is empty or too long."""
        if not rows:
            return []
        self._check([len(row) for row in rows], 0)
        given, found = self._child.folder / "rows.npz", self._child.folder / "scores.npz"
        np.savez(given, tokens=np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]), lengths=[len(row) for row in rows])
        self._child.ask({"do": "score", "input": str(given), "output": str(found)})
        with np.load(found) as file:
            ends = np.cumsum([len(row) - 1 for row in rows])[:-1]
            parts = zip(*(np.split(file[name], ends) for name in ("logprob", "top_ids", "top_logprobs")), strict=True)
            return [TokenScores(*part) for part in parts]

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        """Greedy continuations, batched by vLLM. Raises UsageError for a prompt that is empty or leaves no room for the answer."""
        if not prompts:
            return []
        self._check([len(prompt) for prompt in prompts], max_new_tokens)
        asked = [[int(token) for token in prompt] for prompt in prompts]
        request = {"do": "generate", "prompts": asked, "max_new_tokens": max_new_tokens, "stop_ids": [int(token) for token in stop_ids]}
        return self._child.ask(request)["tokens"]

    def _check(self, lengths: list[int], more: int) -> None:
        if min(lengths) < 1:
            raise UsageError(f"row {lengths.index(min(lengths))} holds no tokens")
        if max(lengths) + more > self._longest:
            answer = f" and {more} new ones" if more else ""
            raise UsageError(f"a row of {max(lengths)} tokens{answer} is longer than this engine's context of {self._longest}: raise max_model_len")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    folder: Path
    overlay: Callable[[Variant, Path], Path]
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    max_model_len: int = 4096
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.85
    kv_cache_memory_bytes: int | None = None
    timeout: float = 900


@dataclass(frozen=True)
class VllmEngine(_Settings):
    """Opens vLLM sessions on one checkpoint; implements `session.Engine`.

    Attributes:
        source: the checkpoint, without or with scales of its own (a variant's replace them).
        folder: where a variant is written while its session lasts, best on the file system of the weights, which are linked.
        overlay: writes a variant in the folder it is given and returns the checkpoint to serve (`evaluate.baselines.overlay` makes one).
        attention_backend: vLLM's name ("FLASH_ATTN", "TRITON_ATTN"); None lets vLLM choose. The same for the 16-bit cache and FP8.
        max_model_len: longest row, or prompt with its answer, in tokens; at most the model's own.
        max_num_batched_tokens: tokens of one prefill step, so that later tokens attend to a cache that was quantized.
        kv_cache_memory_bytes: of the cache on each rank; None: `gpu_memory_utilization` decides on a GPU, 1 GiB on a CPU.
        timeout: seconds that the start, and then each request, may take.
    """

    source: SourceCheckpoint

    @contextmanager
    def session(self, variant: Variant) -> Iterator[VllmSession]:
        """Start vLLM on the variant; the child and all of its group are gone when the context ends.

        Raises:
            UsageError: a low-bit format, which only the transformers engine runs, or ranks among which the heads cannot be shared out.
            HostError: no vLLM, too few devices, or a host that cannot run FP8.
            CheckFailed: vLLM refused the checkpoint, holds other scales than the file, or keeps a cache of another type than asked for.
        """
        if variant.store is not None:
            raise UsageError(f"{variant.store.name} runs in the transformers engine alone: give --engine transformers")
        distribution = vllm_distribution()
        cuda = uses_cuda(distribution)
        check_parallel(self.tensor_parallel_size, cuda)
        check_heads(self.source.config, self.tensor_parallel_size)
        if variant.scales is not None:
            check_runs_fp8(self.source.config, cuda)
        longest = min(self.max_model_len, self.source.context_length or self.max_model_len)
        env = engine_env(self.tensor_parallel_size, cuda) | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="variant-", dir=self.folder) as place:
            checkpoint = self.overlay(variant, Path(place))
            job = {"arguments": self._arguments(checkpoint, variant, longest, cuda)}
            note(f"starting {distribution} with the {variant.name} cache of {self.source.path.name}")
            with conversation(_CHILD, job, self.timeout, env) as child:
                _check_cache(child.hello["ranks"], variant, checkpoint, self._told(variant))
                yield VllmSession(child, self._info(child.hello, distribution, variant), longest)

    def _arguments(self, checkpoint: Path, variant: Variant, longest: int, cuda: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(checkpoint.resolve()),
            "dtype": sixteen_bit(self.source.config),
            "kv_cache_dtype": "auto" if variant.scales is None else "fp8",
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": longest + 1,  # vLLM must generate one token to score a row
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            "max_num_seqs": self.max_num_seqs,
            "seed": 0,
        }
        if self.attention_backend is not None:
            arguments["attention_backend"] = self.attention_backend
        cache_bytes = self.kv_cache_memory_bytes or (None if cuda else _CPU_CACHE_BYTES)
        if cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = cache_bytes
        if cuda:  # with a fixed cache it only says how much must be free at the start
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if any(name in self.source.config for name in ("vision_config", "audio_config")):
            arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0, "audio": 0}
        return arguments | self._told(variant).arguments()

    def _told(self, variant: Variant) -> Serving:
        """What the checkpoint's serve.json asks for; which layers keep 16 bits matters to an FP8 cache alone."""
        told = serving(self.source.path)
        return told if variant.scales is not None else told.model_copy(update={"kv_cache_dtype_skip_layers": ()})

    def _info(self, hello: dict[str, Any], distribution: str, variant: Variant) -> EngineInfo:
        flash = {record["flash"] for records in hello["ranks"] for record in records if record["caches"]} - {None}
        cache = hello["dtype"] if variant.scales is None else cache_name("fp8_e4m3", self._told(variant).kv_cache_dtype_skip_layers)
        return EngineInfo(
            engine="vllm",
            version=distribution,
            attention_backend=backends(hello["ranks"]) + "".join(f" (FA{number})" for number in sorted(flash)),
            kv_cache_dtype=cache,
            compute_dtype=hello["dtype"],
            device=_device_name(hello["device"]),
            tensor_parallel_size=self.tensor_parallel_size,
        )


def _check_cache(ranks: list[list[dict[str, Any]]], variant: Variant, checkpoint: Path, told: Serving) -> None:
    """vLLM loads wrong scales, and falls back to other caches, without a word: neither may pass for the variant."""
    layers = [record for records in ranks for record in records if record["caches"]]
    bound = [record for record in layers if record["cache_dtype"] is not None]
    if not bound:
        raise CheckFailed(f"vLLM bound no KV cache to any attention layer of {checkpoint.name}")
    eight_bit = variant.scales is not None

    def differs(one: dict[str, Any]) -> bool:
        wanted = eight_bit and not told.leaves_out(one["module"])
        held = one["cache_dtype"]
        return one["kv_cache_dtype"].startswith("fp8") != wanted or (held is not None and (held.startswith("float8") or held == "uint8") != wanted)

    wrong = next((one for one in layers if differs(one)), None)
    if wrong is not None:
        kind = "FP8" if eight_bit and not told.leaves_out(wrong["module"]) else "16-bit"
        held = f"{wrong['kv_cache_dtype']} (tensor {wrong['cache_dtype']})"
        raise CheckFailed(f"the {variant.name} variant needs a {kind} cache in {wrong['module']}, but vLLM keeps {held}")
    if eight_bit:
        rows = compare_scales(file_scales(checkpoint), ranks, kv_strategy(read_config(checkpoint), checkpoint))
        failures = [row for row in rows if not row.ok]
        if failures:
            raise CheckFailed(f"vLLM holds other scales than the {variant.name} variant's: {failures[0]} ({len(failures)} of {len(rows)})")


def _device_name(kind: str) -> str:
    if kind != "cuda":
        return kind
    import torch

    return torch.cuda.get_device_name()
