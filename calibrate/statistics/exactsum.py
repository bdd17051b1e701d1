"""Sums of float64 numbers that do not depend on the order of addition.

A float64 is cut, exactly, into four integer limbs of 40 bits with weights 2^-80, 2^-40, 1 and 2^40; what lies below 2^-80 is rounded away,
number by number. Integer addition is associative, so any split, merge, order or resumed run of the same numbers gives the same bits, which a
floating-point running mean (Welford, Chan) cannot promise. The idea is that of the long accumulator of U. Kulisch.
"""

from typing import TypeVar

import numpy as np
import torch

Limbs = TypeVar("Limbs", torch.Tensor, np.ndarray)

LIMBS = 4
_BITS = 40
_BASE = 1 << _BITS
_LIMIT = 2.0**100


def to_limbs(values: torch.Tensor) -> torch.Tensor:
    """Cut float64 [...] into int64 [4, ...], limb 0 the least; each limb has its number's sign and is at most 2^40 but for the last.

    Raises:
        OverflowError: a value is not finite or is beyond 2^100.
    """
    check_within(within(values))
    return cut(values)


def check_within(all_within: torch.Tensor | bool | int) -> None:
    """Raise OverflowError unless `within` said yes."""
    if not bool(all_within):
        raise OverflowError("a sum is not finite or exceeds 2^100")


def within(values: torch.Tensor) -> torch.Tensor:
    """Whether all can be cut, as a tensor: whoever asks a GPU waits for it."""
    return (values.abs() < _LIMIT).all()


def cut(values: torch.Tensor) -> torch.Tensor:
    """`to_limbs` of values that are known to be within 2^100."""
    limbs = []
    rest = values.abs() * 2.0**-_BITS  # of the magnitude: next to -1e-30 the fraction of a floor would be 1 - 1e-30, which is not a float64
    for _ in range(LIMBS - 1):
        whole = torch.floor(rest)
        limbs.append(whole)
        rest = (rest - whole) * _BASE  # exact: a float64 minus its floor, times a power of two
    limbs.append(torch.round(rest))
    return (torch.stack(limbs[::-1]) * values.sign()).to(torch.int64)


def carry(limbs: Limbs) -> Limbs:
    """Bring int64 [4, ...] to its one canonical form (all limbs but the last in [0, 2^40)), in place; a torch tensor or a NumPy array."""
    for index in range(LIMBS - 1):
        over = limbs[index] >> _BITS
        limbs[index] -= over << _BITS
        limbs[index + 1] += over
    return limbs


def to_integers(limbs: np.ndarray) -> np.ndarray:
    """The exact sums in units of 2^-80, as Python integers: int64 [4, ...] → object [...]."""
    total = limbs[-1].astype(object)
    for limb in limbs[-2::-1]:
        total = total * _BASE + limb.astype(object)
    return total
