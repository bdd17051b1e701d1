import numpy as np

from calibrate.scales.error import Population, squared_errors
from calibrate.scales.formats import NumberFormat
from calibrate.scales.policies.base import PolicyOptions, floor_scale

_STEPS = 128  # per octave: exactly the positive bfloat16 numbers, so that loaders which keep scales in bf16 change nothing


def mse(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """The scale with the least Σ(x − x̂)², the error being exact, among all bfloat16 numbers from margin·amax/max to 2^search_octaves times that.

    Where the scale falls within its octave decides which magnitudes meet the coarse end of the FP8 spacing; that is worth up to 1 dB. Never
    below the floor, because what saturates costs far more than it saves. The first of equal minima (the smallest scale) is taken.
    """
    floor = floor_scale(population, fmt, options)
    ceiling = floor * 2.0**options.search_octaves
    best = np.full(len(floor), np.inf)
    chosen = _next_bfloat16(floor)
    first, last = (int(np.floor(np.log2(edge))) for edge in (floor.min(), ceiling.max()))
    for octave in range(first, last + 1):
        grid = np.ldexp(1.0 + np.arange(_STEPS) / _STEPS, octave)
        rows = np.flatnonzero((floor <= grid[-1]) & (ceiling >= grid[0]))
        if not len(rows):
            continue
        errors = squared_errors(Population.of(population.counts[rows], population.values), grid, fmt)
        errors[(grid < floor[rows, None]) | (grid > ceiling[rows, None])] = np.inf
        at = errors.argmin(axis=1)
        least = errors[np.arange(len(rows)), at]
        better = least < best[rows]
        chosen[rows[better]] = grid[at[better]]
        best[rows[better]] = least[better]
    return chosen


def _next_bfloat16(values: np.ndarray) -> np.ndarray:
    """The smallest bfloat16 numbers that are at least `values`."""
    exponent = np.floor(np.log2(values))
    return np.ceil(values / 2.0**exponent * _STEPS) / _STEPS * 2.0**exponent
