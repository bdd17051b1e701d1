"""Statistics of paired hits: the exact McNemar test and Wilson's interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, sqrt

from calibrate.errors import UsageError
from calibrate.evaluate.results import Cell, Interval

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class McNemar:
    """Paired hits of two variants over the same cells.

    Attributes:
        both, first_only, second_only, neither: numbers of cells.
        two_sided: probability of a difference at least so large in either direction, if the two were equally good.
        second_worse: probability of at least so many cells that only the first hits: small means that the second is worse.
    """

    both: int
    first_only: int
    second_only: int
    neither: int
    two_sided: float
    second_worse: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """The exact (binomial) test: among the cells where the two differ, either is as likely to be the one that hits.

    Raises:
        UsageError: not as many of the one as of the other, or none.
    """
    if len(first) != len(second) or not first:
        raise UsageError(f"paired cells are wanted: {len(first)} of the one variant, {len(second)} of the other")
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for a, b in zip(first, second, strict=True):
        counts[bool(a), bool(b)] += 1
    only_first, only_second = counts[True, False], counts[False, True]
    differing = only_first + only_second
    two_sided = min(Fraction(1), 2 * _tail(max(only_first, only_second), differing))
    return McNemar(counts[True, True], only_first, only_second, counts[False, False], float(two_sided), float(_tail(only_first, differing)))


def _tail(at_least: int, trials: int) -> Fraction:
    """P(X ≥ at_least) of a fair coin."""
    return Fraction(sum(comb(trials, heads) for heads in range(at_least, trials + 1)), 2**trials)


def compare_cells(first: Sequence[Cell], second: Sequence[Cell]) -> McNemar:
    """McNemar over needle cells, paired by what was asked. Raises UsageError where the two were not asked the same."""
    hits = [{_asked(cell): cell.hit for cell in cells} for cells in (first, second)]
    if hits[0].keys() != hits[1].keys() or len(hits[0]) != len(first) or len(hits[1]) != len(second):
        raise UsageError("two variants were not asked the same needle questions: run niah with both at once")
    return mcnemar(list(hits[0].values()), [hits[1][asked] for asked in hits[0]])


def _asked(cell: Cell) -> tuple:
    return cell.task, cell.language, cell.length, cell.depth, cell.needle, cell.seed, cell.expected


def wilson(hits: int, trials: int) -> Interval:
    """A share with Wilson's 95% interval, which stays within 0 … 1 and is honest for few trials. Raises UsageError without trials."""
    if trials < 1 or not 0 <= hits <= trials:
        raise UsageError(f"{hits} hits of {trials} trials have no recall")
    share, z2 = hits / trials, _Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Interval(value=share, low=max(0.0, centre - half) if hits else 0.0, high=min(1.0, centre + half) if hits < trials else 1.0)
