"""TurboQuant as vLLM runs it: Hadamard-rotated keys on Lloyd-Max levels with their norm, uniform values, the ends of the model in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from calibrate.errors import UsageError
from calibrate.kvarn.hadamard import block_size, rotate
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, half
from calibrate.lowbit.lloydmax import nearest
from calibrate.model import AttentionLayer
from calibrate.scales import FORMATS

_LEAST_SCALE = 1e-8
_SOURCE = "vLLM 0.32 (turboquant_attn.py, triton_turboquant_store.py), after arXiv 2504.19874; no QJL"


@dataclass(frozen=True)
class KeyCodes:
    """codes: int64 [..., dim], places in the levels. norm: float32 that is exact in fp16, [..., 1]."""

    codes: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TurboQuant(LowBitFormat):
    """`key_bits` 8 stores keys as E4M3 without a scale. Presets below 8 scale the stored levels back to unit norm (vLLM's norm correction)."""

    key_bits: int
    value_bits: int

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        for layer in layers if self.key_bits < 8 else ():
            if block_size(layer.head_dim) != layer.head_dim:
                raise UsageError(f"{self.name} needs heads of a power of two channels, as vLLM does, and {layer.module} has {layer.head_dim}")

    def encode_key(self, tile: torch.Tensor) -> KeyCodes:
        """Of float32 [..., dim]."""
        dim = tile.shape[-1]
        norm = tile.norm(dim=-1, keepdim=True)
        return KeyCodes(nearest(rotate(tile / (norm + 1e-8)), _levels(self.key_bits, dim, tile.device)), half(norm))

    def decode_key(self, stored: KeyCodes) -> torch.Tensor:
        found = _levels(self.key_bits, stored.codes.shape[-1], stored.norm.device)[stored.codes]
        return rotate(found * (found.square().sum(dim=-1, keepdim=True) + 1e-16).rsqrt() * stored.norm)

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return FORMATS["e4m3"].round_trip(tile) if self.key_bits == 8 else self.decode_key(self.encode_key(tile))

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        low, high = tile.amin(dim=-1, keepdim=True), tile.amax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**self.value_bits - 1)).clamp_min(_LEAST_SCALE)
        codes = ((tile - low) / scale + 0.5).trunc().clamp(0, 2**self.value_bits - 1)  # from the exact scale, read with the rounded one
        return codes * half(scale) + half(low)

    def key_bytes(self, dim: int) -> float:
        return sizes.turboquant_key(dim, self.key_bits)

    def value_bytes(self, dim: int) -> float:
        return sizes.turboquant_value(dim, self.value_bits)

    def token_bytes(self, kv_heads: int, key_dim: int, value_dim: int) -> float:
        return kv_heads * sizes.turboquant_slot(self.key_bytes(key_dim), self.value_bytes(value_dim))


def _levels(bits: int, dim: int, device: torch.device) -> torch.Tensor:
    return _lloyd_max_by_trapezoids(bits, dim).to(device)


@lru_cache(maxsize=8)
def _lloyd_max_by_trapezoids(bits: int, dim: int) -> torch.Tensor:
    """Lloyd-Max levels for coordinates of a rotated unit vector, N(0, 1/dim), as vLLM finds them: 200 trapezoids a cell, to 10.5 deviations. Float32.

    They are up to 0.08% off the exact ones (`lloydmax.lloyd_max`).
    """
    count, deviation = 2**bits, dim**-0.5
    levels = 3.5 * deviation * (2 * np.arange(count) + 1 - count) / count
    for _ in range(200):
        bounds = np.concatenate([[-10.5 * deviation], (levels[1:] + levels[:-1]) / 2, [10.5 * deviation]])
        places = np.linspace(bounds[:-1], bounds[1:], 201)  # [201, levels]
        density = np.exp(-np.square(places / deviation) / 2)
        found = np.trapezoid(places * density, axis=0) / np.trapezoid(density, axis=0)
        moved = np.abs(found - levels).max()
        if moved < 1e-10:
            break
        levels = found
    return torch.tensor(levels, dtype=torch.float32)


def turboquant(preset: str, key_bits: int, value_bits: int) -> TurboQuant:
    """A preset of vLLM. A later prefill block of more than 128 tokens attends to its own tokens in 16 bits, a smaller one to what is stored."""
    name = f"turboquant_{preset}"
    return TurboQuant(name=name, source=_SOURCE, key_bits=key_bits, value_bits=value_bits, skip_ends=2, own_exact_above=128)
