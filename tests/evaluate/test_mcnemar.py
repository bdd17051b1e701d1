"""McNemar and Wilson against values worked out by hand."""

from itertools import product

import pytest

from calibrate.errors import UsageError
from calibrate.evaluate.mcnemar import compare_cells, mcnemar, wilson
from calibrate.evaluate.results import Cell


def _pairs(both: int, first: int, second: int, neither: int) -> tuple[list[bool], list[bool]]:
    rows = [(True, True)] * both + [(True, False)] * first + [(False, True)] * second + [(False, False)] * neither
    return [a for a, _ in rows], [b for _, b in rows]


@pytest.mark.parametrize(
    ("counts", "two_sided", "worse"),
    [
        ((10, 0, 0, 2), 1.0, 1.0),  # no difference at all
        ((3, 5, 0, 1), 2 / 32, 1 / 32),
        ((3, 0, 5, 1), 2 / 32, 1.0),
        ((0, 6, 2, 0), 2 * 37 / 256, 37 / 256),  # C(8,6) + C(8,7) + C(8,8) = 37
        ((0, 2, 2, 0), 1.0, 11 / 16),  # capped: twice the tail is above 1
        ((100, 10, 1, 40), 2 * 12 / 2048, 12 / 2048),
    ],
)
def test_mcnemar_known_values(counts, two_sided, worse):
    found = mcnemar(*_pairs(*counts))
    assert (found.both, found.first_only, found.second_only, found.neither) == counts
    assert found.two_sided == pytest.approx(two_sided, rel=1e-12)
    assert found.second_worse == pytest.approx(worse, rel=1e-12)


def test_mcnemar_equals_enumeration():
    """Over all fair coin rows of the differing cells, how many are at least as lopsided."""
    for first, second in product(range(5), repeat=2):
        n = first + second
        rows = [sum(row) for row in product((0, 1), repeat=n)]
        found = mcnemar(*_pairs(1, first, second, 1))
        assert found.second_worse == pytest.approx(sum(heads >= first for heads in rows) / 2**n)
        assert found.two_sided == pytest.approx(sum(abs(heads - n / 2) >= abs(first - n / 2) for heads in rows) / 2**n)


def test_mcnemar_is_exact_for_many():
    found = mcnemar(*_pairs(0, 3000, 2000, 0))
    assert 0 < found.two_sided < 1e-40


def test_mcnemar_refuses():
    for first, second in (([], []), ([True], [True, False])):
        with pytest.raises(UsageError):
            mcnemar(first, second)


def _cell(number: int, hit: bool, **changes) -> Cell:
    values = {"task": "single", "language": "en", "length": 512, "depth": 0.5, "needle": "a", "seed": number, "expected": ("x",), "output": ""}
    return Cell(hit=hit, **(values | changes))


def test_cells_are_paired_by_question_not_by_order():
    first = [_cell(0, True), _cell(1, True), _cell(2, False)]
    second = [_cell(2, False), _cell(1, False), _cell(0, True)]
    found = compare_cells(first, second)
    assert (found.both, found.first_only, found.second_only, found.neither) == (1, 1, 0, 1)


def test_cells_of_another_grid_are_refused():
    with pytest.raises(UsageError, match="not asked the same"):
        compare_cells([_cell(0, True)], [_cell(1, True)])
    with pytest.raises(UsageError, match="not asked the same"):
        compare_cells([_cell(0, True)], [_cell(0, True, length=1024)])
    with pytest.raises(UsageError, match="not asked the same"):
        compare_cells([_cell(0, True), _cell(0, True)], [_cell(0, True), _cell(0, True)])


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0)],
)
def test_wilson_known_values(hits, trials, low, high):
    found = wilson(hits, trials)
    assert found.value == hits / trials
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_wilson_refuses():
    for hits, trials in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(UsageError):
            wilson(hits, trials)
