"""KIVI (arXiv 2402.02750): keys per channel, values per token, both in groups of 32, the newest 128 tokens in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from calibrate.errors import UsageError
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, Window
from calibrate.lowbit.uniform import UniformCodes, encode
from calibrate.model import AttentionLayer

_GROUP, _RESIDUAL = 32, 128
_SOURCE = "arXiv 2402.02750 and its code: K waits until 128 tokens are there, V leaves the residual token by token"


@dataclass(frozen=True, kw_only=True)
class Kivi(LowBitFormat):
    bits: int

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        for layer in layers:
            if layer.value_head_dim % _GROUP:
                raise UsageError(f"{self.name} groups {_GROUP} channels of V, and the {layer.value_head_dim} of {layer.module} are no multiple")

    def encode_key(self, tile: torch.Tensor) -> UniformCodes:
        """Of [..., tokens, dim]: codes [..., groups, 32, dim], a scale and a zero for each channel of a group of tokens."""
        return encode(tile.unflatten(-2, (-1, _GROUP)), self.bits, -2)

    def encode_value(self, tile: torch.Tensor) -> UniformCodes:
        """Of [..., tokens, dim]: codes [..., tokens, groups, 32], a scale and a zero for each group of channels of a token."""
        return encode(tile.unflatten(-1, (-1, _GROUP)), self.bits, -1)

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self.encode_key(tile).dequantize().flatten(-3, -2)

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self.encode_value(tile).dequantize().flatten(-2)

    def key_bytes(self, dim: int) -> float:
        return sizes.kivi(dim, self.bits, _GROUP)

    value_bytes = key_bytes


def kivi(bits: int) -> Kivi:
    """KIVI's published setting with `bits` for K and V."""
    return Kivi(
        name=f"kivi_{bits}bit",
        source=_SOURCE,
        bits=bits,
        key_window=Window(group=_RESIDUAL),
        value_window=Window(residual=_RESIDUAL),
        skip_sliding=True,
        own_exact_above=0,
    )
