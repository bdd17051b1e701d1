"""Which multipliers and rotations: for each pair and channel the least predicted error, where it gains enough to be worth a rounding."""

from dataclasses import dataclass

import numpy as np
import torch

from calibrate.fold.artefact import LayerFold
from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample
from calibrate.fold.tables import PHASES, TURNS, KeyTables, key_tables, value_table

_WORTH = 0.02  # of a layer's mean error per pair or channel: less gain leaves it alone
_MEAN_WORTH = 0.05  # of a head's energy
_STEPS = np.arange(PHASES)


@dataclass(frozen=True)
class Predicted:
    """Error of one layer before and after, at the best scale for each: of logits (K's part and Q's) and of attention's output (V's)."""

    before: dict[str, float]
    after: dict[str, float]


def choose(sample: LayerSample, parts: Parts, output_weight: torch.Tensor, switches: tuple[str, ...]) -> tuple[LayerFold, Predicted]:
    """Choose the fold of one layer.

    Args:
        output_weight: o_proj.weight, [hidden, heads · value_head_dim].
    """
    layer, rows = parts.layer, 1 if parts.norm else parts.layer.num_key_value_heads
    pairs = np.ones((rows, len(parts.first)), dtype=np.complex128)
    rest = np.ones((rows, len(parts.rest)))
    before, after = {}, {}
    if {"k", "turn"} & set(switches):
        tables = key_tables(sample, parts, turns="turn" in switches)
        factors, before, after = _keys(tables, turns="turn" in switches, phases="k" in switches)
        pairs, rest = factors[:, : len(parts.first)], factors[:, len(parts.first) :].real
    shape = (layer.num_key_value_heads, layer.value_head_dim)
    mean, multiplier = np.zeros(shape), np.ones(shape)
    if {"v", "mean"} & set(switches):
        columns = output_weight.float().square().sum(dim=0).view(layer.num_key_value_heads, parts.group, -1).sum(dim=1)  # [kv_heads, channels]
        plain = value_table(sample.v, columns)
        if "mean" in switches:
            mean = _mean(sample)
        moved = sample.v.float() - torch.from_numpy(mean).to(sample.v.device, torch.float32)[:, None]
        multiplier, least = _values(value_table(moved, columns), phases="v" in switches)
        before["v"], after["v"] = float(plain.sum(axis=(0, 2)).min()), least
    return LayerFold(layer.index, layer.module, pairs, rest, multiplier, mean), Predicted(before, after)


def _keys(tables: KeyTables, *, turns: bool, phases: bool) -> tuple[np.ndarray, dict[str, float], dict[str, float]]:
    """Factors, complex128 [rows, pairs + rest], at the scales for which their sum of errors is least; and that error before and after."""
    allowed = np.full((TURNS, PHASES), np.inf)
    allowed[: TURNS if turns else 1, : PHASES if phases else 1] = 0
    best = plain = None
    for of_key in _STEPS:
        key = np.roll(tables.key, -of_key, axis=2)  # [rows, TURNS, PHASES, width]: by the multiplier's phase
        for of_query in _STEPS:
            query = tables.query[:, :, (of_query - _STEPS) % PHASES]
            cost = key + query + allowed[None, :, :, None]
            flat = cost.reshape(len(cost), -1, cost.shape[-1])
            base, pick = flat[:, 0], flat.argmin(axis=1)  # [rows, width]
            least = np.take_along_axis(flat, pick[:, None], axis=1)[:, 0]
            pick = np.where(base - least > _WORTH * base.mean(), pick, 0)
            total = float(np.take_along_axis(flat, pick[:, None], axis=1).sum())
            if best is None or total < best[0]:
                sides = [np.take_along_axis(side.reshape(flat.shape), pick[:, None], axis=1).sum() for side in (key, query)]
                best = total, pick, dict(zip("kq", map(float, sides), strict=True))
            if plain is None or base.sum() < plain[0]:
                plain = float(base.sum()), {"k": float(key[:, 0, 0].sum()), "q": float(query[:, 0, 0].sum())}
    turn, phase = np.divmod(best[1], PHASES)
    return _multiplier(phase) * np.exp(0.5j * np.pi * turn / TURNS), plain[1], best[2]


def _values(table: np.ndarray, *, phases: bool) -> tuple[np.ndarray, float]:
    """Multipliers, float64 [kv_heads, channels], and the error that is left at the best scale."""
    best = None
    for shift in _STEPS:
        cost = np.roll(table, -shift, axis=1)  # [kv_heads, PHASES, channels]
        base, pick = cost[:, 0], cost.argmin(axis=1)
        least = np.take_along_axis(cost, pick[:, None], axis=1)[:, 0]
        pick = np.where((base - least > _WORTH * base.mean()) & phases, pick, 0)
        total = float(np.take_along_axis(cost, pick[:, None], axis=1).sum())
        if best is None or total < best[1]:
            best = _multiplier(pick), total
    return best


def _multiplier(phase: np.ndarray) -> np.ndarray:
    """In [2^-0.5, 2^0.5)."""
    return 2.0 ** (((phase + PHASES // 2) % PHASES - PHASES // 2) / PHASES)


def _mean(sample: LayerSample) -> np.ndarray:
    """The mean of V that leaves least energy where attention looks, float64 [kv_heads, channels]; zero for heads that would gain little.

    Tokens count with Σp²: a head that rests on the first token, whose value is near zero, must not move it away from there.
    """
    values = sample.v.double()
    weight = sample.mass.double()[:, :, None]
    mean = (weight * values).sum(dim=1) / weight.sum(dim=1)
    energy = (weight * values.square()).sum(dim=(1, 2))
    left = (weight * (values - mean[:, None]).square()).sum(dim=(1, 2))
    keep = (energy - left > _MEAN_WORTH * energy)[:, None]
    return (mean * keep).cpu().numpy()
