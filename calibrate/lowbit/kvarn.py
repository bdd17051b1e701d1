"""KVarN (arXiv 2606.03458) as a cache format, as published or with this project's tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from calibrate.artefact import sha256_bytes
from calibrate.errors import UsageError
from calibrate.kvarn import KindTable, KVarNTables
from calibrate.kvarn.basis import KeyBasis
from calibrate.kvarn.hadamard import rotate
from calibrate.kvarn.tile import QuantizedTile, quantize
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, Window
from calibrate.model import AttentionLayer

Uses = Literal["", "prescale", "mean", "channel", "smooth", "balanced", "layers"]
SINK = 128
_SOURCE = "arXiv 2606.03458, its reference: Hadamard, 8 rounds of VarN, asymmetric rounding, fp16 scales"
_LEAST_SHARE = 1e-3  # of a head's deviation that a channel is counted with, at least


@dataclass(frozen=True)
class Static:
    """What tables say of one layer's K or V: stored = ((x − mean) @ before, rotated) · scale.

    Attributes:
        mean: [kv_heads, 1, dim]. scale: [kv_heads, 1, 1 or dim]. before, after: a matrix [kv_heads, dim, dim] and its inverse, or None.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None

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

    @classmethod
    def with_basis(cls, basis: KeyBasis, uses: Uses) -> "Static":
        """smooth: channels are scaled before the rotation. balanced: keys go into the balanced basis."""
        before = torch.from_numpy(basis.balanced).double() if uses == "balanced" else torch.diag_embed(torch.from_numpy(basis.smooth).double())
        heads, dim = basis.smooth.shape
        matrices = before.to(torch.float32), torch.linalg.inv(before).to(torch.float32)
        return cls(torch.zeros(heads, 1, dim), torch.ones(heads, 1, 1), *matrices)

    def to(self, device: torch.device) -> "Static":
        return Static(*(None if part is None else part.to(device) for part in (self.mean, self.scale, self.before, self.after)))

    def apply(self, tiles: torch.Tensor) -> torch.Tensor:
        """Of [batch, kv_heads, groups, group, dim]. Groups are multiplied one by one: what a token becomes depends on no other group."""
        centred = tiles - self.mean[:, None]
        turned = centred if self.before is None else centred @ self.before[:, None]
        return rotate(turned) * self.scale[:, None]

    def undo(self, tiles: torch.Tensor) -> torch.Tensor:
        """The way back."""
        turned = rotate(tiles / self.scale[:, None])
        return (turned if self.after is None else turned @ self.after[:, None]) + self.mean[:, None]


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
        in_basis = self.uses in ("smooth", "balanced")
        if self.tables is None or self.uses == "layers" or (in_basis and kind == "v"):
            return None
        if (layer, kind) not in self._static:
            table = self.tables[layer]
            made = Static.with_basis(table.basis, self.uses) if in_basis else Static.of(getattr(table, kind), self.uses)
            self._static[layer, kind] = made.to(device)
        return self._static[layer, kind]

    def encode(self, tile: torch.Tensor, kind: str, static: Static | None) -> QuantizedTile:
        """Of [batch, kv_heads, tokens, dim]: tiles [batch, kv_heads, groups, dim, group] of K, [..., groups, group, dim] of V."""
        tiles = tile.unflatten(-2, (-1, self.group))
        rotated = rotate(tiles) if static is None else static.apply(tiles)
        return quantize(rotated.mT if kind == "k" else rotated, self.key_bits if kind == "k" else self.value_bits)

    def decode(self, stored: QuantizedTile, kind: str, static: Static | None) -> torch.Tensor:
        tiles = stored.dequantize()
        rotated = tiles.mT if kind == "k" else tiles
        return (rotate(rotated) if static is None else static.undo(rotated)).flatten(-3, -2)

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        static = self._of(layer, "k", tile.device)
        return self.decode(self.encode(tile, "k", static), "k", static)

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
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
    kept = frozenset(tables.sixteen_bit_layers) if uses == "layers" else frozenset()
    if uses == "layers" and not kept:
        raise UsageError(f"the KVarN tables propose no layer for 16 bits: {name} is the same as {name.removesuffix('+layers')}")
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
        kept_layers=kept,
        own_exact_above=0,
        digest=_digest(tables) if uses and tables else None,
    )


def _digest(tables: KVarNTables) -> str:
    parts = [getattr(layer, kind) for layer in tables.layers for kind in ("k", "v")] + [layer.basis for layer in tables.layers]
    arrays = [array.tobytes() for part in parts for array in vars(part).values()]
    return sha256_bytes(*arrays, str(tables.sixteen_bit_layers).encode())
