"""TurboQuant as the paper has it (arXiv 2504.19874): a random rotation, Lloyd-Max levels, and for keys the sign of the projected residual (QJL)."""

from dataclasses import dataclass
from functools import lru_cache
from math import pi, sqrt

import torch

from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, half
from calibrate.lowbit.lloydmax import lloyd_max, nearest

_SOURCE = (
    "arXiv 2504.19874: keys by its inner-product quantizer (bits−1 of Lloyd-Max and one of QJL), values by its MSE quantizer; "
    "whole bits only, without the paper's split into outlier channels"
)
_ROTATION_SEED, _PROJECTION_SEED = 0, 1


@dataclass(frozen=True, kw_only=True)
class TurboQuantPaper(LowBitFormat):
    bits: int

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        norm, unit = _split(tile)
        rotation = _rotation(tile.shape[-1], str(tile.device))
        coarse = _rounded(unit @ rotation, self.bits - 1) @ rotation.T
        return (half(norm) * (coarse + _residual(unit - coarse))).float()

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        norm, unit = _split(tile)
        rotation = _rotation(tile.shape[-1], str(tile.device))
        return (half(norm) * (_rounded(unit @ rotation, self.bits) @ rotation.T)).float()

    def key_bytes(self, dim: int) -> float:
        return sizes.turboquant_paper(dim, self.bits, norms=2)

    def value_bytes(self, dim: int) -> float:
        return sizes.turboquant_paper(dim, self.bits, norms=1)


def _split(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and direction of each vector, in float64: products in float32 round differently by the shape of a block, and levels would follow."""
    tile = tile.double()
    norm = tile.norm(dim=-1, keepdim=True)
    return norm, tile / norm.clamp_min(1e-30)


def _rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    levels = (lloyd_max(bits) / values.shape[-1] ** 0.5).to(values)
    return levels[nearest(values, levels)]


def _residual(rest: torch.Tensor) -> torch.Tensor:
    """What the signs of a random projection and the norm say of the residual: without bias in inner products."""
    dim = rest.shape[-1]
    projection = _projection(dim, str(rest.device))
    signs = torch.where(rest @ projection.T >= 0, 1.0, -1.0).double()
    return sqrt(pi / 2) / dim * half(rest.norm(dim=-1, keepdim=True)) * (signs @ projection)


@lru_cache(maxsize=8)
def _rotation(dim: int, device: str) -> torch.Tensor:
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(_ROTATION_SEED))
    orthogonal, upper = torch.linalg.qr(gaussian)
    return (orthogonal * upper.diagonal().sign()).to(device)


@lru_cache(maxsize=8)
def _projection(dim: int, device: str) -> torch.Tensor:
    return torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(_PROJECTION_SEED)).to(device)


def turboquant_paper(bits: int) -> TurboQuantPaper:
    """Both quantizers at `bits`. No token stays in 16 bits; a block attends to its own tokens exactly, as a prefill does in the paper."""
    return TurboQuantPaper(name=f"turboquant_paper_{bits}bit", source=_SOURCE, bits=bits, own_exact_above=0)
