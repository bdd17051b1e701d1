"""Which multipliers and rotations: for each pair and channel the least predicted error, where it gains enough to be worth a rounding."""

from dataclasses import dataclass

import numpy as np

from calibrate.fold.artefact import LayerFold
from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample
from calibrate.fold.tables import PHASES, TURNS, key_tables

_WORTH = 0.002  # of a layer's mean error per pair or channel: less gain leaves it alone


@dataclass(frozen=True)
class Predicted:
    """Error of one layer before and after, at the best scale for each: of logits, K's part and Q's.

    Held out: chosen on one half of the sample and counted on the other, both ways.
    """

    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class _Pick:
    """A choice for every pair or channel: places in the flattened grid of rotations and phases, [rows, width], and the scales' own phases."""

    place: np.ndarray
    scales: tuple[int, int]


def choose(sample: LayerSample, parts: Parts, switches: tuple[str, ...]) -> tuple[LayerFold, Predicted]:
    """Choose the fold of one layer."""
    free = "turn" in switches, "k" in switches
    sides = [np.stack([half.key, half.query]) for half in key_tables(sample, parts, turns=free[0])]  # [2, rows, TURNS, PHASES, width]
    before, after = (dict(zip("kq", errors, strict=True)) for errors in _held_out(sides, free))
    turn, phase = np.divmod(_best(sum(sides), free).place, PHASES)
    factors = _multiplier(phase) * np.exp(0.5j * np.pi * turn / TURNS)
    pairs, rest = factors[:, : len(parts.first)], factors[:, len(parts.first) :].real
    return LayerFold(parts.layer.index, parts.layer.module, pairs, rest), Predicted(before, after)


def _held_out(sides: list[np.ndarray], free: tuple[bool, bool]) -> tuple[list[float], list[float]]:
    """Error of each kind without and with a choice that was made on the other half, summed over both."""
    totals = []
    for allowed in ((False, False), free):
        errors = [_errors_of(other, _best(one, allowed)) for one, other in (sides, sides[::-1])]
        totals.append([float(sum(kind)) for kind in zip(*errors, strict=True)])
    return totals[0], totals[1]


def _best(table: np.ndarray, free: tuple[bool, bool]) -> _Pick:
    """The choice of least error, scales included; what gains too little stays neutral.

    At scales of phases a and b the multiplier of phase m puts K at a + m and Q at b - m: what can be reached depends on a + b alone.

    Args:
        table: [2, rows, turns, PHASES, width]: error of K and of Q.
        free: whether rotations and whether multipliers may be chosen.
    """
    steps, best = np.arange(PHASES), None
    turns = slice(None if free[0] else 1)
    for both in range(PHASES):
        cost = table[0] + table[1][:, :, (both - steps) % PHASES]  # by K's phase: [rows, turns, PHASES, width]
        reach = _least(cost[:, turns]) if free[1] else None
        for scale in steps:
            turn, phase, least = reach or _least(cost[:, turns, scale : scale + 1])
            base = cost[:, 0, scale]  # [rows, width]
            worth = base - least > _WORTH * base.mean()
            total = float(np.where(worth, least, base).sum())
            if best is None or total < best[0]:
                place = turn * PHASES + ((phase - scale) % PHASES if free[1] else 0)
                best = total, _Pick(np.where(worth, place, 0), (int(scale), int((both - scale) % PHASES)))
    return best[1]


def _least(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotation and phase of the least error, and it: [rows, turns, phases, width] → [rows, width] each."""
    flat = cost.reshape(len(cost), -1, cost.shape[-1])
    place = flat.argmin(axis=1)
    return *np.divmod(place, cost.shape[2]), np.take_along_axis(flat, place[:, None], axis=1)[:, 0]


def _errors_of(table: np.ndarray, pick: _Pick) -> list[float]:
    """The error of each kind under a choice."""
    flat = [side.reshape(len(side), -1, side.shape[-1]) for side in _shifted(table, pick.scales)]
    return [float(np.take_along_axis(side, pick.place[:, None], axis=1).sum()) for side in flat]


def _shifted(table: np.ndarray, scales: tuple[int, int]) -> list[np.ndarray]:
    """Errors by the multiplier's phase, at scales of these phases: K is multiplied, Q divided. [rows, turns, PHASES, width] each."""
    steps = np.arange(PHASES)
    return [side[:, :, (scale + (steps if kind == 0 else -steps)) % PHASES] for kind, (side, scale) in enumerate(zip(table, scales, strict=True))]


def _multiplier(phase: np.ndarray) -> np.ndarray:
    """In [2^-0.5, 2^0.5)."""
    return 2.0 ** (((phase + PHASES // 2) % PHASES - PHASES // 2) / PHASES)
