"""KVarN variance tables: what a low-bit KV cache can know of a model before it has seen a token. This project's artefact, not the paper's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import read_tensors, write_tensors
from calibrate.errors import UsageError
from calibrate.kvarn.basis import NAMES, KeyBasis

SCHEMA = "kv-calibrate/kvarn-tables/2"
_FIELDS = ("mean", "variance", "rotated_variance", "prescale")
_BASIS = ("smooth", "balanced", "noise")


@dataclass(frozen=True)
class KindTable:
    """K or V of one layer, after RoPE, without each document's first tokens (which KVarN keeps in 16 bits).

    Attributes:
        mean: per channel, float64 [kv_heads, head_dim].
        variance: about the mean, per channel, float64 [kv_heads, head_dim].
        rotated_variance: the same after the orthonormal Sylvester Hadamard rotation of each head, float64 [kv_heads, head_dim].
        prescale: a power of two for each head; x · prescale has rotated standard deviations well above VarN's clamp floor, float32 [kv_heads].
    """

    mean: np.ndarray
    variance: np.ndarray
    rotated_variance: np.ndarray
    prescale: np.ndarray


@dataclass(frozen=True)
class LayerTable:
    """The tables of one layer that writes a cache. basis: in which keys can be stored."""

    index: int
    module: str
    k: KindTable
    v: KindTable
    basis: KeyBasis

    @property
    def sensitivity(self) -> float:
        """How much noise of K moves the logits of this layer's worst head under KVarN's rotation (`KeyBasis.noise`)."""
        return float(self.basis.noise[:, NAMES.index("rotated")].max())


@dataclass(frozen=True)
class KVarNTables:
    """The tables of a model.

    Attributes:
        layers: in layer order.
        skipped_tokens: tokens at the start of each document that were not counted.
        tokens: tokens that were counted.
        sixteen_bit_layers: layers that are proposed to stay in 16 bits.
        statistics_digest: of the statistics that they were computed from.
    """

    layers: tuple[LayerTable, ...]
    skipped_tokens: int
    tokens: int
    sixteen_bit_layers: tuple[int, ...] = ()
    statistics_digest: str = ""

    def __getitem__(self, index: int) -> LayerTable:
        return next(layer for layer in self.layers if layer.index == index)

    def save(self, path: Path) -> None:
        """Write as safetensors: `layers.N.{k,v}.{mean,variance,rotated_variance,prescale}` and `layers.N.k.{smooth,balanced,noise}`."""
        tensors = {
            f"layers.{layer.index}.{kind}.{field}": getattr(getattr(layer, kind), field)
            for layer in self.layers
            for kind in ("k", "v")
            for field in _FIELDS
        }
        tensors |= {f"layers.{layer.index}.k.{field}": getattr(layer.basis, field) for layer in self.layers for field in _BASIS}
        write_tensors(path, tensors, self._header())

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "modules": {str(layer.index): layer.module for layer in self.layers},
            "skipped_tokens": self.skipped_tokens,
            "tokens": self.tokens,
            "sixteen_bit_layers": list(self.sixteen_bit_layers),
            "statistics": self.statistics_digest,
        }

    @classmethod
    def load(cls, path: Path) -> "KVarNTables":
        """Read a tables file. Raises UsageError where it is missing, damaged or something else."""
        try:
            tensors, header = read_tensors(path, SCHEMA)
        except UsageError as error:
            raise UsageError(f"{error}: make the tables again, by `kvarn` from statistics or by `run --kvarn`") from error
        try:
            layers = tuple(_layer(tensors, int(index), module) for index, module in sorted(header["modules"].items(), key=lambda item: int(item[0])))
            kept = tuple(int(index) for index in header["sixteen_bit_layers"])
            return cls(layers, int(header["skipped_tokens"]), int(header["tokens"]), kept, header["statistics"])
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise UsageError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _layer(tensors: dict[str, np.ndarray], index: int, module: str) -> LayerTable:
    kinds = [KindTable(*(tensors[f"layers.{index}.{kind}.{field}"] for field in _FIELDS)) for kind in ("k", "v")]
    for table in kinds:
        if table.mean.ndim != 2 or table.variance.shape != table.mean.shape or table.rotated_variance.shape != table.mean.shape:
            raise ValueError(f"layer {index} has tables of different shapes")
        if table.prescale.shape != table.mean.shape[:1] or not (np.isfinite(table.prescale) & (table.prescale > 0)).all():
            raise ValueError(f"layer {index} has a prescale that is no positive number a head")
    basis = KeyBasis(*(tensors[f"layers.{index}.k.{field}"] for field in _BASIS))
    heads, dim = kinds[0].mean.shape
    if (basis.smooth.shape, basis.balanced.shape, basis.noise.shape) != ((heads, dim), (heads, dim, dim), (heads, len(NAMES))):
        raise ValueError(f"layer {index} has bases of another shape than its keys")
    if not (np.isfinite(basis.smooth) & (basis.smooth > 0)).all() or not np.isfinite(basis.balanced).all():
        raise ValueError(f"layer {index} has a basis that is not finite")
    return LayerTable(index, module, *kinds, basis)
