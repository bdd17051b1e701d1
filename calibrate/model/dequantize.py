"""Weights that compressed-tensors loaded, dequantized one module at a time, to exactly the values that an engine computes with."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.compressors import decompress_module
from compressed_tensors.compressors.model_compressors import model_compressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import dequantize
from transformers import PreTrainedModel

from calibrate.model.source import SourceCheckpoint, without_kv_scheme


def is_compressed(source: SourceCheckpoint) -> bool:
    """Whether there are weights to dequantize."""
    return source.quantization.get("quant_method") == "compressed-tensors" and bool(source.quantization.get("config_groups"))


def load_dtype(source: SourceCheckpoint, dtype: torch.dtype) -> torch.dtype:
    """The type to load in: transformers rounds scales to it, so that a checkpoint with scales in fp32 is loaded in fp32."""
    entries = (entry for header in source.headers.values() for entry in json.loads(header).items() if is_compressed(source))
    wide = any(name.endswith("_scale") and entry["dtype"] == "F32" for name, entry in entries if name != "__metadata__")
    return torch.float32 if wide else dtype


def ignored_wherever_it_stands(quantization: dict[str, Any]) -> dict[str, Any]:
    """A vision-language model's quantization_config, without a KV scheme, that ignores its modules under transformers' names too.

    `ignore` spells them as the checkpoint does ("vision_tower.…", "language_model.model.…"); transformers puts "model." before them, and compares
    whole names: it would take the towers for quantized.
    """
    rest, more = without_kv_scheme(quantization), []
    if not isinstance(rest.get("ignore"), list) or not all(isinstance(name, str) for name in rest["ignore"]):
        return rest  # none, or nothing that compressed-tensors' schema takes
    for name in rest["ignore"]:
        pattern = name.removeprefix("re:") if name.startswith("re:") else f"{re.escape(name)}$"
        tail = name.removeprefix("language_model.").removeprefix("model.")
        more += [f"re:(.*\\.)?({pattern})"] if tail == name else [f"re:(model\\.)?(language_model\\.)?{re.escape(tail)}$"]
    return {**rest, "ignore": [*rest["ignore"], *more]}


@contextmanager
def quiet_compressed_tensors() -> Iterator[None]:
    """compressed-tensors draws a bar while it makes room for compressed weights, and has no switch for it."""
    bar = model_compressor.tqdm
    model_compressor.tqdm = lambda modules, **_: modules
    try:
        yield
    finally:
        model_compressor.tqdm = bar


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """FP8 [out, in] with a scale a block, in the scale's type. compressed-tensors' decompression takes a block's size from the number of blocks,
    which is wrong where they do not divide the shape; its dequantization takes it from the scheme, and the last ones are smaller."""
    return dequantize(weight, scale, args=scheme.weights, dtype=scale.dtype)


def dequantize_model(model: PreTrainedModel, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Replace compressed weights by what they mean, in `dtype`; activations are still quantized as the scheme says.

    Integer weights of layers with 16-bit activations are rounded to `stored`, the checkpoint's type: kernels for these multiply code and scale in it,
    and so do AutoAWQ and GPTQ. Kernels for quantized activations multiply the scale in fp32, after the product.
    """
    if hasattr(model, "ct_decompress_hook"):  # compressed-tensors' own, at the first forward: all at once, and in whatever type the scales came
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        if scheme.weights is not None and scheme.weights.strategy == "block":
            weight = dequantize_blocks(module.weight.data, module.weight_scale.data, scheme)
            module.quantization_status = QuantizationStatus.DECOMPRESSED
        else:
            if module.quantization_status == QuantizationStatus.COMPRESSED:
                decompress_module(module)
            weight = module.weight.data
        if scheme.weights is not None and scheme.weights.type == "int" and scheme.input_activations is None:
            weight = weight.to(stored)
        module.weight.data = weight.to(dtype)
    kept = set(model._keep_in_fp32_modules or ()) | set(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)  # loaded in fp32 for the scales' sake
