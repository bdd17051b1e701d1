"""Asymmetric rounding with its scale and zero in fp16: what KIVI, GEAR and TurboQuant's values share."""

from dataclasses import dataclass

import torch

from calibrate.lowbit.base import half

_TINY = 2.0**-24  # fp16's smallest


@dataclass(frozen=True)
class UniformCodes:
    """x̂ = codes · scale + zero. codes: uint8. scale, zero: float32 that are exact in fp16, broadcastable to the codes."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.codes.to(torch.float32) * self.scale + self.zero


def encode(values: torch.Tensor, bits: int, dim: int) -> UniformCodes:
    """Round to 2^bits levels between the least and the largest value along `dim`; levels are those of the rounded scale and zero."""
    low, high = values.amin(dim=dim, keepdim=True), values.amax(dim=dim, keepdim=True)
    zero, scale = half(low), half(((high - low) / (2**bits - 1)).clamp_min(_TINY))
    return UniformCodes(((values - zero) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8), scale, zero)
