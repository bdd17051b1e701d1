"""Statistics with second moments in, KVarN tables out."""

from typing import Any

import numpy as np
import torch

from calibrate.errors import UsageError
from calibrate.kvarn.basis import NAMES, key_basis
from calibrate.kvarn.hadamard import rotate
from calibrate.kvarn.tables import KindTable, KVarNTables, LayerTable
from calibrate.statistics import Statistics
from calibrate.statistics.second import SKIPPED_TOKENS, Second, second_moments

TARGET_STD = 4.0  # of the rotated channels after the prescale: VarN's clamp floor lets a standard deviation grow by a factor of 1.35 alone
_TOO_SHORT = f"no document is longer than {SKIPPED_TOKENS} tokens, which KVarN leaves in 16 bits: give longer ones"
_STANDS_OUT = 3.0  # a layer is proposed to stay in 16 bits where its sensitivity is this many times the median


def check_longest(tokens: int) -> None:
    """Raise UsageError, as `variance_tables` would, where the longest row has no more `tokens` than KVarN leaves out."""
    if tokens <= SKIPPED_TOKENS:
        raise UsageError(_TOO_SHORT)


def variance_tables(statistics: Statistics) -> KVarNTables:
    """Tables for every layer that writes a cache of heads (latent attention has none).

    Raises:
        UsageError: the statistics hold no second moments, no document was longer than what KVarN leaves out, or no layer has heads.
    """
    if not statistics.has_second_moments:
        raise UsageError("these statistics hold no second moments: collect with --kvarn")
    entries = [layer for layer in statistics.layout["layers"] if layer["target"] == layer["index"] and not layer["latent"]]
    if not entries:
        raise UsageError("every layer of this model caches latents: KVarN is for caches of K and V heads")
    layers, tokens = [], 0
    for entry in entries:
        seen = statistics.layers[entry["index"]]
        try:
            k, v, q = (second_moments(seen[kind].second) for kind in ("k", "v", "q"))
        except ValueError as error:
            raise UsageError(_TOO_SHORT) from error
        tokens = int(k.tokens[0])
        layers.append(LayerTable(entry["index"], entry["module"], _kind_table(k), _kind_table(v), key_basis(k, q, TARGET_STD)))
    return KVarNTables(tuple(layers), SKIPPED_TOKENS, tokens, _standing_out(layers), statistics.digest())


def _kind_table(moments: Second) -> KindTable:
    variance = np.diagonal(moments.covariance, axis1=1, axis2=2).copy()
    covariance = torch.from_numpy(moments.covariance)
    rotated = rotate(rotate(covariance).transpose(1, 2))  # H Σ H: [kv_heads, head_dim, head_dim]
    rotated_variance = rotated.diagonal(dim1=1, dim2=2).clamp(min=0).numpy().copy()
    return KindTable(moments.mean, variance, rotated_variance, _prescale(rotated_variance))


def _prescale(rotated_variance: np.ndarray) -> np.ndarray:
    """Each head's least power of two that brings the rotated channels' mean variance to TARGET_STD² at least; 1 where nothing varies."""
    spread = np.sqrt(rotated_variance.mean(axis=1))
    alive = spread > 0
    exponent = np.zeros(len(spread))
    exponent[alive] = np.ceil(np.log2(TARGET_STD / spread[alive]))
    return np.exp2(np.clip(exponent, -100, 100)).astype(np.float32)


def _standing_out(layers: list[LayerTable]) -> tuple[int, ...]:
    values = np.array([layer.sensitivity for layer in layers])
    return tuple(layer.index for layer in layers if layer.sensitivity > _STANDS_OUT * np.median(values))


def as_dict(tables: KVarNTables) -> dict[str, Any]:
    """What a reader wants of them, as a JSON value."""
    return {
        "tokens": tables.tokens,
        "skipped_tokens": tables.skipped_tokens,
        "sixteen_bit_layers": list(tables.sixteen_bit_layers),
        "layers": [
            {
                "index": layer.index,
                "sensitivity": layer.sensitivity,
                "logit_noise": dict(zip(NAMES, layer.basis.noise.T.tolist(), strict=True)),
                **{
                    kind: {
                        "prescale": table.prescale.tolist(),
                        "std": np.sqrt(table.variance.mean(axis=1)).tolist(),
                        "channel_spread": _spread(table.variance),
                        "rotated_channel_spread": _spread(table.rotated_variance),
                    }
                    for kind, table in (("k", layer.k), ("v", layer.v))
                },
            }
            for layer in tables.layers
        ],
    }


def _spread(variance: np.ndarray) -> list[float]:
    """Largest over mean standard deviation of a head's channels: 1 where all are alike."""
    deviation = np.sqrt(variance)
    mean = deviation.mean(axis=1)
    return np.divide(deviation.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0).tolist()
