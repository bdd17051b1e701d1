import numpy as np

from calibrate.scales.error import Population
from calibrate.scales.formats import NumberFormat
from calibrate.scales.policies.base import PolicyOptions, floor_scale


def pow2(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """The smallest power of two that is at least margin·amax/max: multiplying by it rounds nothing."""
    mantissa, exponent = np.frexp(floor_scale(population, fmt, options))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
