"""NVIDIA ModelOpt's form: `hf_quant_config.json`, and k and v scales below the projections. TensorRT-LLM and SGLang read it, vLLM too.

ModelOpt writes `quant_algo: null` for a quantized cache alone, which TensorRT-LLM takes from `hf_quant_config.json` and vLLM and SGLang refuse.
Those two look at config.json first, where `quant_algo: FP8` with every module ignored says the same: so one folder serves all.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import calibrate
from calibrate.checkpoint.card import Use
from calibrate.checkpoint.exports.base import Exported, ExportOptions, Given, check_scalar_e4m3, latent_layers
from calibrate.checkpoint.names import tensor_prefixes
from calibrate.checkpoint.place import check_target
from calibrate.checkpoint.write import Form, write_form
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.model.weights import EARLIER_SCALES
from calibrate.scales import Scales

_NAME = "modelopt"
# What vLLM maps `<module>.k_proj.k_scale` for; under other names it drops the scale with a line in its log, and runs at 1.0.
_MAPPED = re.compile(r"\.(self_attn|mixer)$")
_LATENT = (
    "multi-head latent attention: serve it with --model-impl transformers; vLLM's own model code drops these scales in silence and runs at 1.0 "
    "(docs/architectures.md); TensorRT-LLM and SGLang were not tried"
)
_PRODUCER = {"name": "kv-calibrate", "version": calibrate.__version__}
_USE = Use(
    "k and v",
    "It is in ModelOpt's form:\nTensorRT-LLM, SGLang and vLLM read it (vLLM in the model's 16-bit type, with an FP8 cache only).",
)


class Modelopt:
    """Writes a checkpoint, weights linked, with the scales under ModelOpt's names."""

    folder = True

    def export(self, given: Given, output: Path, options: ExportOptions, *, force: bool) -> Exported:
        check_scalar_e4m3(given, _NAME)
        check_target(given.source.path, output, force=force)
        _check_unquantized(given.source)
        tensors = modelopt_tensors(given.source, given.scales)
        latent = bool(latent_layers(given))
        refused = sorted(name for name in tensors if not latent and not _MAPPED.search(name.rsplit(".", 2)[0]))
        if refused:
            module = refused[0].rsplit(".", 2)[0]
            raise UsageError(
                f"readers of {_NAME} know attention modules called self_attn or mixer, not {module}: use what `kv-calibrate write` makes"
            )
        serve = dict(options.serve) | ({"model_impl": "transformers"} if latent else {})
        form = Form(tensors, vllm_config(), {"hf_quant_config.json": hf_quant_config()}, _USE, serve)
        written = write_form(given.source, given.scales, form, output, statistics=given.statistics)
        return Exported(_NAME, output, len(given.scales.layers), how=written.how, notes=_notes(tensors, options, latent))


def modelopt_tensors(source: SourceCheckpoint, scales: Scales) -> dict[str, np.ndarray]:
    """`<attention module>.k_proj.k_scale` and `.v_proj.v_scale`, float32 of shape (); the form has no place for q.

    Latent attention has no such projections: `<attention module>.k_scale` is what vLLM's Transformers backend finds in every family that was
    tried (benchmarks/mla_names.py).
    """
    weights = [name for name in source.weight_map if not EARLIER_SCALES.search(name)]
    prefixes = tensor_prefixes([layer.module for layer in scales.layers], weights)
    latent = {layer["index"] for layer in scales.layout["layers"] if layer["latent"]}
    below = {layer.module: "" if layer.index in latent else "{}_proj." for layer in scales.layers}
    pairs = [(layer.module, kind, scale) for layer in scales.layers for kind, scale in layer.items() if kind != "q"]
    return {
        f"{prefixes[module]}.{below[module].format(kind)}{kind}_scale": scale.reshape(()) if scale.size == 1 else scale
        for module, kind, scale in pairs
    }


def hf_quant_config() -> dict[str, Any]:
    """ModelOpt's file for a quantized cache alone, as TensorRT-LLM reads it."""
    return {"producer": _PRODUCER, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}


def vllm_config() -> dict[str, Any]:
    """The same in config.json, as vLLM and SGLang accept it: FP8 with every module ignored."""
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": scheme, "ignore": ["*"], "producer": _PRODUCER}


def _check_unquantized(source: SourceCheckpoint) -> None:
    """Raise UsageError where the weights are quantized: ModelOpt's form has its own ways for them, and no reader mixes two."""
    found = source.quantization
    ours = found.get("quant_method") == "modelopt" and found.get("ignore") == ["*"]
    if found and not ours and (found.get("quant_method") != "compressed-tensors" or found.get("config_groups")):
        raise UsageError(
            f"the weights of {source.path} are quantized with {found.get('quant_method')}, which {_NAME} cannot carry: export the unquantized model"
        )


def _notes(tensors: dict[str, np.ndarray], options: ExportOptions, latent: bool) -> tuple[str, ...]:
    values = torch.tensor([float(value) for value in tensors.values()], dtype=torch.float32)
    moved = ((values.to(getattr(torch, options.model_dtype)).float() - values) / values).abs()
    changed = int((moved > 0).sum())
    how = f"{changed} of {len(values)} move, by at most {float(moved.max()):.2%}" if changed else "which holds each of them exactly"
    notes = [_LATENT] if latent else []
    if options.sixteen_bit:
        notes.append(f"layers {options.sixteen_bit} keep 16 bits in vLLM, if it is told so (kv_calibration/serve.json), else FP8")
    return (*notes, "the form has no q scales: vLLM uses 1.0 for q", f"vLLM keeps k and v scales in the model's {options.model_dtype}: {how}")
