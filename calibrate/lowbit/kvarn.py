"""KVarN (arXiv 2606.03458) as a cache format, as published or with this project's tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from calibrate.artefact import sha256_bytes
from calibrate.errors import UsageError
from calibrate.kvarn import KindTable, KVarNTables
from calibrate.kvarn.hadamard import rotate
from calibrate.kvarn.tile import QuantizedTile, quantize
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Window
from calibrate.model import AttentionLayer

Uses = Literal["", "prescale", "mean", "channel"]
SINK = 128
_SOURCE = "arXiv 2606.03458, its reference: Hadamard, 8 rounds of VarN, asymmetric rounding, fp16 scales"
_LEAST_SHARE = 1e-3  # of a head's deviation that a channel is counted with, at least


@dataclass(frozen=True)
class Static:
    """What tables say of one layer's K or V. rotated = (x − mean) rotated · scale. mean: [kv_heads, 1, dim]. scale: [kv_heads, 1, 1 or dim]."""

    mean: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, table: KindTable, uses: Uses) -> "Static":
        """prescale: a factor a head. mean: that, after the channel mean is taken off. channel: that, and rotated channels get one deviation."""
        mean = torch.from_numpy(table.mean if uses != "prescale" else np.zeros_like(table.mean))
        scale = torch.from_numpy(table.prescale.astype(np.float64))[:, None]  # [kv_heads, 1]
        if uses == "channel":
            std = torch.from_numpy(np.sqrt(table.rotated_variance))  # [kv_heads, dim]
            usual = std.square().mean(dim=-1, keepdim=True).sqrt()
            even = usual / torch.maximum(std, usual * _LEAST_SHARE)
            scale = scale * torch.where(usual > 0, even, torch.ones_like(even))
        return cls(mean[:, None].to(torch.float32), scale[:, None].to(torch.float32))

    def to(self, device: torch.device) -> "Static":
        return Static(self.mean.to(device), self.scale.to(device))


@dataclass(frozen=True, kw_only=True)
class KVarN(LowBitFormat):
    """`tables` are read as `uses` says; "" reads none and is the paper's method."""

    key_bits: int
    value_bits: int
    group: int
    uses: Uses = ""
    tables: KVarNTables | None = None
    _static: dict[tuple[int, str], Static] = field(default_factory=dict, repr=False, compare=False)

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        if self.tables is None:
            return
        known = {layer.index: layer for layer in self.tables.layers}
        for layer in layers:
            if layer.index not in known:
                raise UsageError(f"the KVarN tables have no layer {layer.index} ({layer.module}): they are of another model")
            for kind, dim in (("k", layer.head_dim), ("v", layer.value_head_dim)):
                found = getattr(known[layer.index], kind).mean.shape
                if found != (layer.num_key_value_heads, dim):
                    raise UsageError(f"the KVarN tables have {found} {kind} heads and channels in layer {layer.index}: they are of another model")

    def _of(self, layer: int, kind: str, device: torch.device) -> Static | None:
        if self.tables is None:
            return None
        if (layer, kind) not in self._static:
            self._static[layer, kind] = Static.of(getattr(self.tables[layer], kind), self.uses).to(device)
        return self._static[layer, kind]

    def encode(self, tile: torch.Tensor, kind: str, static: Static | None) -> QuantizedTile:
        """Of [batch, kv_heads, tokens, dim]: tiles [batch, kv_heads, groups, dim, group] of K, [..., groups, group, dim] of V."""
        rotated = rotate(tile) if static is None else rotate(tile - static.mean) * static.scale
        tiles = rotated.unflatten(-2, (-1, self.group))
        return quantize(tiles.mT if kind == "k" else tiles, self.key_bits if kind == "k" else self.value_bits)

    def decode(self, stored: QuantizedTile, kind: str, static: Static | None) -> torch.Tensor:
        tiles = stored.dequantize()
        rotated = (tiles.mT if kind == "k" else tiles).flatten(-3, -2)
        return rotate(rotated) if static is None else rotate(rotated / static.scale) + static.mean

    def key(self, tile: torch.Tensor, layer: int, start: int) -> torch.Tensor:
        static = self._of(layer, "k", tile.device)
        return self.decode(self.encode(tile, "k", static), "k", static)

    def value(self, tile: torch.Tensor, layer: int, start: int) -> torch.Tensor:
        static = self._of(layer, "v", tile.device)
        return self.decode(self.encode(tile, "v", static), "v", static)

    def key_bytes(self, dim: int) -> float:
        return sizes.kvarn_key(dim, self.key_bits, self.group)

    def value_bytes(self, dim: int) -> float:
        return sizes.kvarn_value(dim, self.value_bits, self.group)


def kvarn(key_bits: int, value_bits: int, group: int, uses: Uses = "", tables: KVarNTables | None = None) -> KVarN:
    """A preset. `tables` are read only where `uses` asks for them. Raises UsageError where it does and there are none."""
    name = f"kvarn_k{key_bits}v{value_bits}_g{group}" + (f"+{uses}" if uses else "")
    if uses and tables is None:
        raise UsageError(f"{name} reads KVarN tables and none were given")
    window = Window(group=group, sink=SINK)
    return KVarN(
        name=name,
        source=_SOURCE + ("; tables of this project" if uses else ""),
        key_bits=key_bits,
        value_bits=value_bits,
        group=group,
        uses=uses,
        tables=tables if uses else None,
        key_window=window,
        value_window=window,
        skip_sliding=True,
        own_exact_above=0,
        digest=_digest(tables) if uses and tables else None,
    )


def _digest(tables: KVarNTables) -> str:
    kinds = [getattr(layer, kind) for layer in tables.layers for kind in ("k", "v")]
    return sha256_bytes(*(part.tobytes() for each in kinds for part in (each.mean, each.variance, each.rotated_variance, each.prescale)))
