"""GEAR (arXiv 2403.05527): uniform codes, the largest outliers kept exactly, and a low-rank copy of the error that is left."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from calibrate.errors import UsageError
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, Window, half
from calibrate.lowbit.uniform import encode
from calibrate.model import AttentionLayer

_GROUP = 128  # tokens compressed together
_RANK = 4
_SPARSE = 0.02
_ITERATIONS = 3
_SOURCE = (
    "arXiv 2403.05527: rank 4 and 2% outliers; 4 bits over whole vectors (KCVT), 2 bits in groups of 64 (KIVI). "
    "The paper compresses a whole prompt at once; here every 128 tokens, so that the result does not depend on the prompt's length"
)


@dataclass(frozen=True)
class Parts:
    """A tile [..., tokens, dim] taken apart.

    Attributes:
        dense: the dequantized codes. low_rank: product of two fp16 factors. outliers: True where the value itself is kept, in fp16.
        kept: float32, the values in fp16 precision.
    """

    dense: torch.Tensor
    low_rank: torch.Tensor
    outliers: torch.Tensor
    kept: torch.Tensor

    def total(self) -> torch.Tensor:
        return torch.where(self.outliers, self.kept, self.dense + self.low_rank)


def outlier_count(length: int) -> int:
    """Values kept at either end of a vector: half of 2%, at least one."""
    return max(1, round(length * _SPARSE / 2))


@dataclass(frozen=True, kw_only=True)
class Gear(LowBitFormat):
    """`share`: values that share a scale along a vector (tokens of a key's channel, channels of a token's value), None for all of them."""

    bits: int
    share: int | None

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        for layer in layers:
            if layer.value_head_dim % (self.share or 1):
                raise UsageError(f"{self.name} groups {self.share} channels of V, and the {layer.value_head_dim} of {layer.module} are no multiple")

    def parts(self, tile: torch.Tensor, axis: int) -> Parts:
        """Take apart [..., tokens, dim]; vectors lie along `axis`: −2 for keys, −1 for values."""
        outliers = _outliers(tile, axis)
        count = tile.shape[axis]
        share = self.share or count
        filled = torch.where(outliers, tile.mean(dim=axis, keepdim=True), tile)
        dense = encode(filled.unflatten(axis, (-1, share)), self.bits, axis).dequantize().flatten(axis - 1, axis)
        error = (tile - dense).masked_fill(outliers, 0.0)
        return Parts(dense, _low_rank(error), outliers, half(tile))

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self.parts(tile.unflatten(-2, (-1, _GROUP)), -2).total().flatten(-3, -2)

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self.parts(tile.unflatten(-2, (-1, _GROUP)), -1).total().flatten(-3, -2)

    def key_bytes(self, dim: int) -> float:
        return sizes.gear(dim, self.bits, vectors=dim, length=_GROUP, share=self.share, kept=2 * outlier_count(_GROUP), group=_GROUP, rank=_RANK)

    def value_bytes(self, dim: int) -> float:
        return sizes.gear(dim, self.bits, vectors=_GROUP, length=dim, share=self.share, kept=2 * outlier_count(dim), group=_GROUP, rank=_RANK)


def _outliers(tile: torch.Tensor, axis: int) -> torch.Tensor:
    count = outlier_count(tile.shape[axis])
    order = tile.argsort(dim=axis, stable=True)
    ends = torch.cat([order.narrow(axis, 0, count), order.narrow(axis, tile.shape[axis] - count, count)], dim=axis)
    return torch.zeros_like(tile, dtype=torch.bool).scatter(axis, ends, True)


@lru_cache(maxsize=8)
def _start(dim: int, device: str) -> torch.Tensor:
    return torch.randn(dim, _RANK, generator=torch.Generator().manual_seed(0)).to(device)


def _low_rank(error: torch.Tensor) -> torch.Tensor:
    """The leading singular directions of [..., tokens, dim] by power iteration from a fixed start, both factors in fp16."""
    right = _start(error.shape[-1], str(error.device))
    for _ in range(_ITERATIONS):
        left = torch.linalg.qr(error @ right).Q  # [..., tokens, rank]
        right = error.mT @ left  # [..., dim, rank]
    return half(left) @ half(right).mT


def gear(bits: int, share: int | None) -> Gear:
    """GEAR's published setting at `bits`."""
    window = Window(group=_GROUP)
    name = f"gear_{bits}bit"
    return Gear(name=name, source=_SOURCE, bits=bits, share=share, key_window=window, value_window=window, skip_sliding=True, own_exact_above=0)
