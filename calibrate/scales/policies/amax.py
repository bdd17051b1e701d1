import numpy as np

from calibrate.scales.error import Population
from calibrate.scales.formats import NumberFormat
from calibrate.scales.policies.base import PolicyOptions, floor_scale


def amax(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """margin·amax/max: the rule of llm-compressor, ModelOpt and Quark, with room for text that was not seen."""
    return floor_scale(population, fmt, options)
