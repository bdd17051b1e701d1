"""`quant_method: fp8`: `weight` float8_e4m3fn [out, in], a `weight_scale` a tensor or `weight_scale_inv` [out/128, in/128] a block; `input_scale`.

Both names hold what the weight is multiplied by, in the scale's type. compressed-tensors keeps the same tensors: nothing is computed.
"""

from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from calibrate.errors import UsageError
from calibrate.weights.packing import FLOATS, Facts, Tensors

_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


class Fp8:
    """FP8 as vLLM's and transformers' `fp8` methods write it (AutoFP8, DeepSeek, Qwen)."""

    name = "FP8"
    key = "weight"
    types: ClassVar = {"weight": ("F8_E4M3",), "weight_scale": FLOATS, "weight_scale_inv": FLOATS, "input_scale": FLOATS}

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.block: list[int] | None = config.get("weight_block_size")
        if self.block is not None and not _is_two_sizes(self.block):
            raise UsageError(f"{where}: weight_block_size is {self.block}: it must be two positive numbers")
        self.activations = config.get("activation_scheme", "dynamic")
        if self.activations not in ("static", "dynamic") or (self.block and self.activations == "static"):
            raise UsageError(f"{where}: activation_scheme {self.activations}{' with blocks' if self.block else ''} is not converted")
        if str(config.get("fmt") or config.get("weight_format") or "e4m3").lower() != "e4m3":
            raise UsageError(f"{where}: FP8 weights other than e4m3 are not converted")

    def examine(self, module: str, shape: list[int], small: Tensors) -> Facts:
        scale = small.get("weight_scale_inv", small.get("weight_scale"))
        if scale is None:
            raise UsageError(f"{module} has no weight_scale: its weight is not known")
        if self.activations == "static" and small.get("input_scale", torch.empty(0)).numel() != 1:
            raise UsageError(f"{module} has no input_scale of one number, though the config says that activations are quantized statically")
        if self.block is None and scale.numel() != 1:
            raise UsageError(
                f"{module}: {list(scale.shape)} scales, and no weight_block_size in the config: only one a tensor, or blocks, are converted"
            )
        if self.block is not None and list(scale.shape) != [-(-size // block) for size, block in zip(shape, self.block, strict=True)]:
            raise UsageError(f"{module}: {list(scale.shape)} scales are not those of {shape} in blocks of {self.block}: the checkpoint is damaged")
        return Facts()

    def scheme(self, facts: Facts) -> QuantizationScheme:
        static = {**_FLOAT8, "strategy": "tensor", "dynamic": False}
        if self.block:
            weights = {**_FLOAT8, "strategy": "block", "block_structure": self.block}
            inputs = {**_FLOAT8, "strategy": "group", "group_size": self.block[1], "dynamic": True}
        else:
            weights, inputs = static, static if self.activations == "static" else {**_FLOAT8, "strategy": "token", "dynamic": True}
        return QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=QuantizationArgs(**inputs), format="float-quantized"
        )

    def convert(self, tensors: Tensors, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
        made = {name: tensor for name, tensor in tensors.items() if name not in self.types}
        made |= {"weight": tensors["weight"], "weight_scale": self._scale(tensors)}
        if self.activations == "static":
            made["input_scale"] = tensors["input_scale"].reshape(1)
        return made

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        weight, scale = tensors["weight"], self._scale(tensors)
        if self.block:
            rows, columns = weight.shape
            scale = scale.repeat_interleave(self.block[0], 0)[:rows]  # the last blocks may be smaller
            scale = scale.repeat_interleave(self.block[1], 1)[:, :columns]
        return weight.to(scale.dtype) * scale

    def _scale(self, tensors: Tensors) -> torch.Tensor:
        scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        return scale if self.block else scale.reshape(1)


def _is_two_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
