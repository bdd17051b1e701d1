"""The policies that are measured, by name: how each makes its scales from statistics, and what was expected of it before it was measured."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from calibrate.evaluate.baselines import old_formula, unit_scales
from calibrate.scales import FORMATS, LayerScales, PolicyOptions, Population, Scales, solve, squared_errors
from calibrate.scales.error import quantized
from calibrate.statistics import Statistics

KINDS = ("k", "v", "q")
_STEPS = 128  # candidates an octave: the bfloat16 numbers, as the mse policy has them


@dataclass(frozen=True)
class Material:
    """What rows are made from: statistics of text and of random tokens, the engine's granularity and, for objectives that look again, the model."""

    statistics: Statistics
    random: Statistics
    granularity: str
    model: Path | None = None
    _kept: dict[PolicyOptions, Scales] = field(default_factory=dict)

    def solved(self, policy: str = "mse", margin: float = 2.0, granularity: str | None = None) -> Scales:
        """Scales of the statistics; each is solved once."""
        options = PolicyOptions(policy=policy, margin=margin, granularity=granularity or self.granularity)
        if options not in self._kept:
            self._kept[options] = solve(self.statistics, options)
        return self._kept[options]


@dataclass(frozen=True)
class Row:
    """A policy: `make` builds its scales, `prediction` was written before the measurement, `only` is the granularity it makes sense for."""

    make: Callable[[Material], Scales]
    prediction: str
    only: str | None = None


def combined(chosen: Scales, kinds: str) -> Scales:
    """`chosen` for the given kinds, 1.0 for the rest."""
    rest = unit_scales(chosen)
    layers = []
    for first, second in zip(chosen.layers, rest.layers, strict=True):
        values = {kind: getattr(first if kind in kinds else second, kind) for kind in KINDS}
        layers.append(LayerScales(first.index, first.module, **values))
    return replace(chosen, layers=tuple(layers))


def mapped(scales: Scales, change: Callable[[str, np.ndarray], np.ndarray]) -> Scales:
    """Scales with every array changed: `change(kind, values)`."""
    layers = (
        LayerScales(each.index, each.module, *(change(kind, value).astype(np.float32) for kind, value in each.items())) for each in scales.layers
    )
    return replace(scales, layers=tuple(layers))


def next_pow2(values: np.ndarray) -> np.ndarray:
    """The nearest power of two in the logarithm."""
    return np.exp2(np.round(np.log2(values.astype(np.float64))))


def broadcast(scales: Scales, like: Scales) -> Scales:
    """Per-tensor scales in the shapes of per-head ones."""
    layers = (
        LayerScales(one.index, one.module, *(np.resize(value, getattr(other, kind).shape) for kind, value in one.items()))
        for one, other in zip(scales.layers, like.layers, strict=True)
    )
    return replace(scales, layers=tuple(layers), options=like.options)


def searched(material: Material, error: Callable[[Population, np.ndarray], np.ndarray], *, worst: bool = False) -> Scales:
    """The scale of least (or largest) error within the octave above 2·amax/448. `error`: float64 [rows, scales] of a population at scales."""
    floor = material.solved("amax")
    values = material.statistics.values()
    layers = []
    for layer in floor.layers:
        chosen = {}
        for kind, low in layer.items():
            seen = material.statistics.layers[layer.index].get(kind) or material.statistics.layers[_target(material, layer.index)][kind]
            counts = seen.counts.sum(axis=0, keepdims=True) if low.size == 1 else seen.counts
            groups = len(low) if kind != "q" else min(len(low), len(material.statistics.layers[_target(material, layer.index)]["k"].counts))
            rows = counts.reshape(groups, -1, counts.shape[-1]).sum(axis=1)
            best = [
                _search(Population.of(row[None], values), float(start), error, worst)
                for row, start in zip(rows, low[:: len(low) // groups], strict=True)
            ]
            chosen[kind] = np.repeat(np.array(best, np.float32), len(low) // groups)
        layers.append(LayerScales(layer.index, layer.module, **chosen))
    return replace(floor, layers=tuple(layers))


def _target(material: Material, index: int) -> int:
    return next(layer["target"] for layer in material.statistics.layout["layers"] if layer["index"] == index)


def _search(population: Population, floor: float, error: Callable[[Population, np.ndarray], np.ndarray], worst: bool) -> float:
    grid = floor * np.exp2(np.arange(_STEPS) / _STEPS)
    errors = error(population, grid)[0]
    return float(grid[errors.argmax() if worst else errors.argmin()])


def relative_error(population: Population, scales: np.ndarray) -> np.ndarray:
    """Σ((x − x̂)/x)² over values that are not zero."""
    wrong = (quantized(population.values, scales, FORMATS["e4m3"]) - population.values) / np.where(population.values > 0, population.values, np.inf)
    return population.counts.astype(np.float64) @ np.square(wrong).T


def element_error(population: Population, scales: np.ndarray) -> np.ndarray:
    return squared_errors(population, scales, FORMATS["e4m3"])


def _pow2_q(material: Material) -> Scales:
    return mapped(material.solved(), lambda kind, value: next_pow2(value) if kind == "q" else value)


ROWS: dict[str, Row] = {
    "unit": Row(lambda m: unit_scales(m.solved()), "between mse and amax/448 on plain models, worse where K or Q outliers pass 448"),
    "amax": Row(lambda m: m.solved("amax", 1.0), "what others write: 4 to 10% worse than mse in mean abs Δ log p"),
    "amax x1.41": Row(lambda m: m.solved("amax", 2**0.5), "another phase of the octave: within 4% of amax, either way"),
    "amax x2": Row(lambda m: m.solved("amax", 2.0), "equal to amax within noise: the relative error repeats every octave"),
    "amax x16": Row(lambda m: m.solved("amax", 16.0), "equal to amax within noise, a little worse where small values underflow"),
    "pow2": Row(lambda m: m.solved("pow2", 1.0), "as unit where nothing saturates there"),
    "percentile 99.99": Row(lambda m: m.solved("percentile", 1.0), "worse than amax: what it clips costs more than it saves"),
    "mse": Row(lambda m: m.solved(), "the default: best of the published rules, 5% below amax on SmolLM2, 9% on Qwen2.5"),
    "mse margin 1": Row(lambda m: m.solved(margin=1.0), "equal to mse"),
    "mse, q 1.0": Row(lambda m: combined(m.solved(), "kv"), "1% worse than mse where Q stays below 448"),
    "mse, q pow2": Row(_pow2_q, "equal to mse: q matters least"),
    "mse k": Row(lambda m: combined(m.solved(), "k"), "most of the gain of mse over unit"),
    "mse v": Row(lambda m: combined(m.solved(), "v"), "little of the gain"),
    "mse q": Row(lambda m: combined(m.solved(), "q"), "little of the gain, unless Q passes 448 somewhere"),
    "relative error": Row(lambda m: searched(m, relative_error), "worse than mse: small values get as much say as those that decide the logits"),
    "worst phase": Row(lambda m: searched(m, element_error, worst=True), "the largest element error in the octave: at least 5% worse than mse"),
    "random amax": Row(
        lambda m: solve(m.random, PolicyOptions(policy="amax", margin=1.0, granularity=m.granularity)), "worse than amax, much on Qwen2.5"
    ),
    "old formula": Row(lambda m: old_formula(m.random, m.solved().options), "about as random amax, within a few per cent of unit"),
    "mse per tensor": Row(
        lambda m: broadcast(m.solved(granularity="tensor"), m.solved()), "1% worse than per head on SmolLM2, better on Qwen2.5", "head"
    ),
    "mse, every head by itself": Row(lambda m: searched(m, element_error), "most of what per head changes", "head"),
}


def rows_for(granularity: str, names: list[str] | None = None) -> dict[str, Row]:
    """The rows of a granularity, or those named."""
    fitting = {name: row for name, row in ROWS.items() if row.only in (None, granularity)}
    return fitting if names is None else {name: fitting[name] for name in names if name in fitting}
