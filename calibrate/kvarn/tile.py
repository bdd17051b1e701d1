"""A KVarN tile: balanced by VarN, rounded asymmetrically per row, its scales folded together and kept in fp16."""

from dataclasses import dataclass

import torch

from calibrate.kvarn.varn import varn

_SMALLEST_STEP = 1e-10
_HALF_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class QuantizedTile:
    """What is stored of tiles [..., rows, columns]: x̂ = (codes · scale + zero) · columns.

    Attributes:
        codes: uint8 [..., rows, columns], below 2^bits.
        scale, zero: float16 [..., rows, 1], the row's step and least value with VarN's row scale in them.
        columns: float16 [..., 1, columns], VarN's column scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    columns: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[..., rows, columns]."""
        return (self.codes.to(dtype) * self.scale.to(dtype) + self.zero.to(dtype)) * self.columns.to(dtype)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def quantize(tile: torch.Tensor, bits: int) -> QuantizedTile:
    """Quantize [..., rows, columns]: K as [channels, tokens], V as [tokens, channels], both rotated."""
    tile = tile.contiguous()  # sums along an axis depend on the layout in their last bit
    balance = varn(tile)
    balanced = tile / balance.columns / balance.rows
    zero, top = balanced.amin(dim=-1, keepdim=True), balanced.amax(dim=-1, keepdim=True)
    step = ((top - zero) / (2**bits - 1)).clamp_min(_SMALLEST_STEP)
    codes = ((balanced - zero) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return QuantizedTile(codes, _half(step * balance.rows), _half(zero * balance.rows), _half(balance.columns))
