"""INT8 and INT4 per token and head, as vLLM's TRITON_ATTN stores them."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from calibrate.kvarn.hadamard import block_size, rotate
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start

_LEAST_SCALE = 1e-6
_SIGN_SEED = 0x9E3779B9  # of vLLM's randomized Hadamard transform
_ZERO_BITS = -16  # all but the low four bits of a float32, where the zero point hides


@dataclass(frozen=True, kw_only=True)
class Int8PerTokenHead(LowBitFormat):
    """Symmetric, scale amax/127 in float32, halves rounded away from zero."""

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        scale = (tile.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(_LEAST_SCALE)
        return _away_from_zero(tile * (1.0 / scale)).clamp(-128, 127) * scale

    value = key

    def key_bytes(self, dim: int) -> float:
        return sizes.eight_bit_per_token(dim)

    value_bytes = key_bytes


@dataclass(frozen=True)
class Int4Codes:
    """codes: uint8 [..., dim], below 16. packed: float32 [..., 1], the scale with the zero point in its four lowest bits."""

    codes: torch.Tensor
    packed: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Float32 [..., dim], still transformed."""
        bits = self.packed.view(torch.int32)
        return (self.codes.to(torch.float32) - (bits & 15).to(torch.float32)) * (bits & _ZERO_BITS).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Int4PerTokenHead(LowBitFormat):
    """Asymmetric, after signs and a Hadamard transform of the head; the transformed values are rounded to the model's 16-bit type as vLLM does.

    `transformed_type`: that type.
    """

    transformed_type: torch.dtype = torch.bfloat16

    def encode(self, tile: torch.Tensor) -> Int4Codes:
        """Of float32 [..., dim]."""
        values = transform(tile).to(self.transformed_type).to(torch.float32)
        low, high = values.amin(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(_LEAST_SCALE)
        zero = _away_from_zero(-low / scale).clamp(0, 15)
        codes = _away_from_zero(values * (1.0 / scale) + zero).clamp(0, 15)
        packed = ((scale.view(torch.int32) & _ZERO_BITS) | zero.to(torch.int32)).view(torch.float32)
        return Int4Codes(codes.to(torch.uint8), packed)

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return transform(self.encode(tile).dequantize(), inverse=True)

    value = key

    def key_bytes(self, dim: int) -> float:
        return sizes.int4_per_token(dim)

    value_bytes = key_bytes


def _away_from_zero(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values >= 0, values + 0.5, values - 0.5).trunc()


@lru_cache(maxsize=8)
def _signs(size: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    return (2.0 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1.0).to(device)


def transform(values: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Signs, then the unnormalized Hadamard transform, within blocks of the largest power of two that divides the head: float32 [..., dim].

    The inverse undoes it, the norm included.
    """
    size = block_size(values.shape[-1])
    signs = _signs(size, str(values.device)).repeat(values.shape[-1] // size)
    return rotate(values) * signs / size**0.5 if inverse else rotate(values * signs) * size**0.5
