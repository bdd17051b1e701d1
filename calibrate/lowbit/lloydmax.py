"""Lloyd-Max levels of a Gaussian: the scalar quantizer with the least squared error."""

from functools import lru_cache
from itertools import pairwise
from math import erf, exp, inf, pi, sqrt

import torch

_ROUNDS = 4000


def _mass(low: float, high: float) -> tuple[float, float]:
    """Probability of N(0, 1) between two bounds, and the integral of x over it."""
    density = [0.0 if abs(bound) == inf else exp(-bound * bound / 2) / sqrt(2 * pi) for bound in (low, high)]
    return (erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2, density[0] - density[1]


@lru_cache(maxsize=8)
def lloyd_max(bits: int) -> torch.Tensor:
    """The 2^bits levels for N(0, 1), ascending and symmetric: float64. Each lies at the mean of what is nearest to it."""
    count = 2**bits
    levels = [-2.5 + 5 * (number + 0.5) / count for number in range(count)]
    for _ in range(_ROUNDS):
        bounds = [-inf, *((a + b) / 2 for a, b in pairwise(levels)), inf]
        parts = [_mass(low, high) for low, high in pairwise(bounds)]
        found = [moment / mass for mass, moment in parts]
        moved = max(abs(a - b) for a, b in zip(levels, found, strict=True))
        levels = found
        if moved < 1e-12:
            break
    return torch.tensor(levels, dtype=torch.float64)


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Index of the nearest of ascending `levels`, int64 of the shape of `values`. On a boundary the upper one, as vLLM's kernel."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, right=True)
