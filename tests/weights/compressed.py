"""Tiny compressed-tensors checkpoints of every scheme, and what they mean, computed without the library."""

import re
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file

from tests.tiny import tiny_checkpoint
from tests.weights.foreign import SHAPE, block_scales, linears, rewrite

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_PACKED, _FLOAT, _INT = "pack-quantized", "float-quantized", "int-quantized"
_FP8_DYNAMIC = {"weights": _FP8 | {"strategy": "channel"}, "input_activations": _FP8 | {"strategy": "token", "dynamic": True}, "format": _FLOAT}
_FP8_BLOCK = {"input_activations": _FP8 | {"strategy": "group", "group_size": 64, "dynamic": True}, "format": _FLOAT}
# name → target → scheme
SCHEMES: dict[str, dict[str, dict]] = {
    "fp8-dynamic": {"Linear": _FP8_DYNAMIC},
    "fp8-static": {"Linear": {"weights": _FP8 | {"strategy": "tensor"}, "input_activations": _FP8 | {"strategy": "tensor"}, "format": _FLOAT}},
    "fp8-block": {"Linear": _FP8_BLOCK | {"weights": _FP8 | {"strategy": "block", "block_structure": [64, 64]}}},
    "fp8-odd-block": {"Linear": _FP8_BLOCK | {"weights": _FP8 | {"strategy": "block", "block_structure": [48, 96]}}},
    "w8a8": {
        "Linear": {
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
            "format": _INT,
        }
    },
    "w4a16": {"Linear": {"weights": _INT4, "format": _PACKED}},
    "w4a16-asymmetric": {"Linear": {"weights": _INT4 | {"symmetric": False, "group_size": 128}, "format": _PACKED}},
    "w4a16-channel": {"Linear": {"weights": _INT4 | {"strategy": "channel", "group_size": None}, "format": _PACKED}},
    "w8a16": {"Linear": {"weights": _INT4 | {"num_bits": 8}, "format": _PACKED}},
    "w4a16-ordered": {"Linear": {"weights": _INT4 | {"actorder": "group"}, "format": _PACKED}},
    "nvfp4": {"Linear": {"weights": _FP4, "input_activations": _FP4 | {"dynamic": "local"}, "format": "nvfp4-pack-quantized"}},
    "mixed": {r"re:.*self_attn\..*_proj$": _FP8_DYNAMIC, r"re:.*mlp\..*_proj$": {"weights": _INT4, "format": _PACKED}},
}


def compressed(path: Path, name: str, *, scales: torch.dtype = torch.bfloat16) -> Path:
    """The tiny llama in bf16 by one of SCHEMES; scales (of integer and FP8 weights) in this type."""
    return compress(tiny_checkpoint(path, "llama", **SHAPE), path, name, scales=scales)


def compress(source: Path, target: Path, name: str, *, scales: torch.dtype = torch.bfloat16) -> Path:
    """A dense tiny llama by one of SCHEMES."""
    tensors = load_file(source / "model.safetensors")
    groups = {f"group_{number}": QuantizationScheme(targets=[target], **scheme) for number, (target, scheme) in enumerate(SCHEMES[name].items())}
    for number, module in enumerate(linears(tensors)):
        scheme = scheme_of(module, groups)
        state = _parameters(tensors.pop(f"{module}.weight"), scheme, scales, number)
        made = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
        tensors |= {f"{module}.{part}": tensor for part, tensor in made.items()}
    whole = QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], format="mixed-precision" if len(groups) > 1 else scheme.format, quantization_status="compressed"
    )
    return rewrite(source, target, tensors, quantization_config=whole.model_dump(mode="json"))


def scheme_of(module: str, groups: dict[str, QuantizationScheme]) -> QuantizationScheme:
    def targeted(target: str) -> bool:
        return target == "Linear" or re.match(target.removeprefix("re:"), module) is not None

    return next(group for group in groups.values() if targeted(group.targets[0]))


def _parameters(weight: torch.Tensor, scheme: QuantizationScheme, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """The weight with scales by largest magnitude, and zero points off the middle where there are any."""
    weights, inputs, state = scheme.weights, scheme.input_activations, {"weight": weight}
    values, columns = weight.float(), weight.shape[1]
    if weights.actorder == "group":
        order = torch.from_numpy(np.random.default_rng(seed).permutation(columns))
        state["weight_g_idx"] = torch.empty(columns, dtype=torch.int32)
        state["weight_g_idx"][order] = torch.arange(columns, dtype=torch.int32) // weights.group_size
        values = values[:, torch.argsort(state["weight_g_idx"])]
    amax = {"tensor": lambda: values.abs().amax()[None], "channel": lambda: values.abs().amax(1, keepdim=True)}.get(
        str(weights.strategy), lambda: None if weights.strategy == "block" else values.reshape(len(values), -1, weights.group_size).abs().amax(2)
    )()
    if weights.type == "float" and weights.num_bits == 4:
        state["weight_global_scale"] = whole = 448 * 6 / values.abs().amax()[None]
        state["weight_scale"] = (amax / 6 * whole).to(torch.float8_e4m3fn).float()
        state["input_global_scale"] = torch.tensor([150.0 + seed])
        return state
    largest = 448 if weights.type == "float" else (1 << (weights.num_bits - 1)) - 1
    state["weight_scale"] = (block_scales(weight, weights.block_structure) if weights.strategy == "block" else amax / largest).to(dtype)
    if not weights.symmetric:
        state["weight_zero_point"] = torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, amax.shape)).to(torch.int8)
    if inputs is not None and not inputs.dynamic:
        state["input_scale"] = torch.tensor([0.01 + seed / 1000], dtype=dtype)
    return state


def unpacked(packed: torch.Tensor, bits: int, columns: int) -> np.ndarray:
    """compressed-tensors' pack-quantized, one value after another: the signed code + 2^(bits-1), lowest bits first, rows padded to whole int32s."""
    words, run = packed.numpy().view(np.uint32), 32 // bits
    values = np.empty((words.shape[0], words.shape[1] * run), np.int64)
    for place in range(run):
        values[:, place::run] = (words >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return values[:, :columns] - (1 << (bits - 1))


def meant(tensors: dict[str, torch.Tensor], module: str, group: dict) -> torch.Tensor:
    """The weight [out, in] that a file says, by a config group: in the scales' type where activations are 16-bit, in fp32 else."""
    weights, part = group["weights"], lambda name: tensors[f"{module}.{name}"]
    scale = part("weight_scale")
    if weights["strategy"] == "tensor_group":  # two codes a byte, the lower first; scales E4M3, over one for the whole
        codes = torch.stack((part("weight_packed") & 15, part("weight_packed") >> 4), -1).flatten(1).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        return (values * (scale.float() / part("weight_global_scale")).repeat_interleave(16, 1)).to(torch.bfloat16)
    if group["input_activations"]:
        scale = scale.float()
    if weights["type"] == "float" or group["format"] == _INT:
        if weights["strategy"] == "block":
            rows, columns = part("weight").shape
            scale = torch.from_numpy(np.kron(scale.numpy(), np.ones(weights["block_structure"], np.float32))[:rows, :columns])
        return part("weight").to(scale.dtype) * scale
    rows, columns = part("weight_shape").tolist()
    codes = unpacked(part("weight_packed"), weights["num_bits"], columns)
    size = weights["group_size"] if weights["strategy"] == "group" else columns
    order = part("weight_g_idx").numpy() if weights["actorder"] == "group" else np.arange(columns) // size
    zeros = np.zeros((rows, columns // size), np.int64)
    if not weights["symmetric"]:
        zeros = unpacked(part("weight_zero_point").T.contiguous(), weights["num_bits"], rows).T
    return torch.from_numpy(codes - zeros[:, order]).to(scale.dtype) * scale[:, torch.from_numpy(order).long()]


def quantized_input(x: torch.Tensor, inputs: dict, static: torch.Tensor | None) -> torch.Tensor:
    """What a layer with quantized activations multiplies, by the schemes' own definitions."""
    if inputs["strategy"] == "tensor_group":
        runs = x.unflatten(-1, (-1, 16))
        scale = (runs.abs().amax(-1) / 6 * static).to(torch.float8_e4m3fn).float()[..., None] / static
        size = (runs / scale).abs().clamp(max=6)
        bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        code = torch.bucketize(size, bounds) + ((size == bounds[:, None, None, None, None]).any(0) & (torch.bucketize(size, bounds) % 2 == 1))
        return (E2M1[code] * runs.sign() * scale).flatten(-2)
    largest = 448 if inputs["type"] == "float" else 127.5
    if inputs["strategy"] == "group":
        runs = x.unflatten(-1, (-1, inputs["group_size"]))
        scale = runs.abs().amax(-1, keepdim=True) / largest
        return ((runs / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    scale = static if not inputs["dynamic"] else x.abs().amax(-1, keepdim=True) / largest
    if inputs["type"] == "float":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return (x / scale).round().clamp(-128, 127) * scale
