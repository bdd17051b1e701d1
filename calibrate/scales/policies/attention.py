import numpy as np

from calibrate.scales.error import Population
from calibrate.scales.formats import NumberFormat
from calibrate.scales.policies.base import PolicyOptions, floor_scale
from calibrate.scales.policies.mse import mse
from calibrate.statistics.phases import OCTAVE, PHASES


def attention(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """The scale at which attention's output loses least, of the sixteen in the octave from margin·amax/max on.

    The error is measured in the collection pass on some rows (`collect.phases`), each kind by itself. Where there is no such table, and in E5M2,
    which rounds otherwise, it is `mse`. The first of equal minima (the smallest scale) is taken.
    """
    chosen = mse(population, fmt, options)
    if population.phases is None or fmt.name == "e5m2":
        return chosen
    rows = np.flatnonzero(population.phases.any(axis=1))
    for row, floor in zip(rows, floor_scale(population, fmt, options)[rows], strict=True):
        exponent = np.floor(np.log2(floor))
        grid = np.concatenate([OCTAVE * 2.0**exponent, OCTAVE * 2.0 ** (exponent + 1)])
        grid, errors = (array[grid >= floor][:PHASES] for array in (grid, np.tile(population.phases[row], 2)))
        chosen[row] = grid[errors.argmin()]
    return chosen
