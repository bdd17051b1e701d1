"""KVarN variance tables: what a low-bit KV cache can know of a model before it has seen a token. This project's artefact, not the paper's."""

from dataclasses import dataclass

import numpy as np


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
    """The tables of one layer that writes a cache."""

    index: int
    module: str
    k: KindTable
    v: KindTable


@dataclass(frozen=True)
class KVarNTables:
    """The tables of a model.

    Attributes:
        layers: in layer order.
        skipped_tokens: tokens at the start of each document that were not counted.
        tokens: tokens that were counted.
    """

    layers: tuple[LayerTable, ...]
    skipped_tokens: int
    tokens: int

    def __getitem__(self, index: int) -> LayerTable:
        return next(layer for layer in self.layers if layer.index == index)
