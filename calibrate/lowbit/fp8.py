"""FP8, per tensor or head with given scales (1.0 without), and per token and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from calibrate.errors import UsageError
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start
from calibrate.model import AttentionLayer
from calibrate.scales import FORMATS, NumberFormat, Scales


@dataclass(frozen=True, kw_only=True)
class Fp8(LowBitFormat):
    """x̂ = scale · fp8(x / scale), the scale known beforehand, as FLASH_ATTN and TRITON_ATTN store it. Q stays in 16 bits here."""

    number_format: str
    scales: Scales | None = None
    latent: bool = True

    @property
    def fmt(self) -> NumberFormat:
        return FORMATS[self.number_format]

    @cached_property
    def _given(self) -> dict[tuple[int, str], torch.Tensor]:
        layers = () if self.scales is None else self.scales.layers
        return {(layer.index, kind): torch.tensor(scale).view(-1, 1, 1) for layer in layers for kind, scale in layer.items()}  # [heads or 1, 1, 1]

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        for layer in layers if self.scales is not None else ():
            counts = {len(self._given.get((layer.index, kind), ())) for kind in ("k", "v")}
            if not counts <= {1, layer.num_key_value_heads}:
                raise UsageError(
                    f"the scales do not fit layer {layer.index} ({layer.module}) with {layer.num_key_value_heads} heads: they are of another model"
                )

    def _stored(self, tile: torch.Tensor, layer: int, kind: str) -> torch.Tensor:
        if self.scales is None:
            return self.fmt.round_trip(tile)
        scale = self._given[layer, kind].to(tile.device)
        return self.fmt.round_trip(tile / scale) * scale

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self._stored(tile, layer, "k")

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return self._stored(tile, layer, "v")

    def key_bytes(self, dim: int) -> float:
        return sizes.per_tensor(dim, 1)

    value_bytes = key_bytes


@dataclass(frozen=True, kw_only=True)
class Fp8PerTokenHead(LowBitFormat):
    """A float32 scale, amax/448, for each token and head, found when it is written: vLLM's `fp8_per_token_head`."""

    number_format: str = "e4m3"

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        fmt = FORMATS[self.number_format]
        scale = (tile.abs().amax(dim=-1, keepdim=True) / fmt.max).clamp_min(1e-6)
        return fmt.round_trip(tile * (1.0 / scale)) * scale

    value = key

    def key_bytes(self, dim: int) -> float:
        return sizes.eight_bit_per_token(dim)

    value_bytes = key_bytes
