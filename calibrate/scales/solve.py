"""Statistics in, scales out."""

from typing import Any

import numpy as np

from calibrate.errors import UsageError
from calibrate.scales.artefact import LayerScales, Scales
from calibrate.scales.error import Population
from calibrate.scales.formats import FORMATS
from calibrate.scales.policies import POLICIES, PolicyOptions
from calibrate.statistics import Statistics

_SMALLEST = 2.0**-100  # a kernel may multiply by 1/scale: both must be normal fp32 numbers
_LARGEST = 2.0**100


def solve(statistics: Statistics, options: PolicyOptions) -> Scales:
    """Solve k, v and q scales for every attention layer.

    One row per tensor, or per KV head. Q is solved per KV head too (the query heads that read it together), because engines keep one q
    scale a KV head; it is written once for each query head. KV-shared readers get their target's k and v scale, MLA layers one scale for
    latent and rotary key, which lie in one cache line. `mse` gives the heads of K, and those of V, one place in the octave, the layer's.

    Raises:
        UsageError: the statistics hold infinity or NaN, or a scale is not a positive normal float32 (amax 0 gives 1.0 with a warning instead).
    """
    rows: list[tuple[int, str, np.ndarray]] = []  # (layer, kind, counts [rows, codes])
    for layer in statistics.layout["layers"]:
        rows += [(layer["index"], kind, counts) for kind, counts in _rows_of_layer(statistics, layer, options.granularity)]
    population = Population.of(np.concatenate([counts for _, _, counts in rows]), statistics.values())
    _check_finite(population, [(index, kind) for index, kind, counts in rows for _ in counts])
    amax = population.amax
    scales = np.ones(len(amax))
    alive = amax > 0
    fmt = FORMATS[options.number_format]
    scales[alive] = POLICIES[options.policy](Population(population.values, population.counts[alive]), fmt, options)
    if options.granularity == "head" and options.policy == "mse":
        _in_one_place(scales, population, [(kind, len(counts)) for _, kind, counts in rows], options)
    solved, warnings, start = {}, [], 0
    for index, kind, counts in rows:
        part = slice(start, start + len(counts))
        start = part.stop
        _check(index, kind, scales[part])
        solved[index, kind] = scales[part].astype(np.float32)
        warnings += [f"{kind.upper()} of layer {index}, row {row}, was zero everywhere: scale 1.0" for row in np.flatnonzero(~alive[part])]
    layers = tuple(_layer_scales(layer, solved, statistics, options) for layer in statistics.layout["layers"])
    return Scales(layers, options, statistics.layout, statistics.digest(), statistics.counted, statistics.provenance, tuple(warnings))


def _in_one_place(scales: np.ndarray, population: Population, sizes: list[tuple[str, int]], options: PolicyOptions) -> None:
    """Give the heads of each K and V the scale of its layer, moved by whole octaves to their ranges, in place.

    A head's own least error is a bad guide for K: where its channels stand far from zero (Qwen2's biases), most of that error is the same for all
    tokens, which softmax does not see. Over all heads of a layer it is a good one, and for V no worse, measured on real kernels
    (docs/scale-quality.md).

    Args:
        scales: float64 [rows]. sizes: kind and number of rows of each tensor, in the order of the population's rows.
    """
    ends = np.cumsum([size for _, size in sizes])
    parts = [slice(end - size, end) for (kind, size), end in zip(sizes, ends, strict=True) if kind in ("k", "v") and size > 1]
    parts = [part for part in parts if population.counts[part][:, population.values > 0].any()]
    if not parts:
        return
    amax = population.amax
    whole = Population(population.values, np.stack([population.counts[part].sum(axis=0) for part in parts]))
    for part, scale in zip(parts, POLICIES[options.policy](whole, FORMATS[options.number_format], options), strict=True):
        alive = amax[part] > 0
        octaves = np.floor(np.log2(amax[part].max() / np.where(alive, amax[part], 1.0)))
        scales[part] = np.where(alive, scale * 2.0**-octaves, 1.0)


def _rows_of_layer(statistics: Statistics, layer: dict[str, Any], granularity: str) -> list[tuple[str, np.ndarray]]:
    seen = statistics.layers[layer["index"]]
    counts = {kind: observed.counts for kind, observed in seen.items()}
    if layer["latent"]:
        both = counts["k"] + counts["v"]
        counts = {"k": both, "v": both, "q": counts["q"]}
    if granularity == "tensor":
        return [(kind, one.sum(axis=0, keepdims=True)) for kind, one in counts.items()]
    groups = layer["num_key_value_heads"]
    return [(kind, one.reshape(groups, -1, one.shape[-1]).sum(axis=1)) for kind, one in counts.items()]


def _layer_scales(layer: dict[str, Any], solved: dict, statistics: Statistics, options: PolicyOptions) -> LayerScales:
    index, target = layer["index"], layer["target"]
    q = solved[index, "q"]
    if options.granularity == "head":
        q = np.repeat(q, layer["num_heads"] // len(q))
    return LayerScales(index, layer["module"], solved[target, "k"], solved[target, "v"], q)


def _check_finite(population: Population, owners: list[tuple[int, str]]) -> None:
    bad = population.counts[:, ~np.isfinite(population.values)].any(axis=1)
    if bad.any():
        index, kind = owners[int(bad.argmax())]
        raise UsageError(f"{kind.upper()} of layer {index} was infinite or NaN somewhere: no scale can hold that")


def _check(index: int, kind: str, scales: np.ndarray) -> None:
    wrong = ~(np.isfinite(scales) & (scales >= _SMALLEST) & (scales <= _LARGEST))
    if wrong.any():
        raise UsageError(f"the {kind} scale of layer {index} would be {scales[wrong][0]:g}, which no engine can use: look at its statistics")
