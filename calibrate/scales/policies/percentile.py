import numpy as np

from calibrate.scales.error import Population
from calibrate.scales.formats import NumberFormat
from calibrate.scales.policies.base import PolicyOptions, float32_at_least


def percentile(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """margin·(percentile of |x|)/max, exact from the counts: clips what lies above. Zeros count. It loses to `mse` wherever it clips."""
    cumulative = np.cumsum(population.counts, axis=1)
    rank = np.ceil(cumulative[:, -1] * (options.percentile / 100.0)).astype(np.int64).clip(1)
    at = np.array([np.searchsorted(row, wanted) for row, wanted in zip(cumulative, rank, strict=True)])
    chosen = population.values[at]
    return float32_at_least(options.margin * np.where(chosen > 0, chosen, population.amax) / fmt.max)
