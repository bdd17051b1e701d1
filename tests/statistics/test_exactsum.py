"""The order-independent sums, against Python's exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibrate.statistics.exactsum import LIMBS, carry, to_integers, to_limbs
from calibrate.statistics.moments import mean_and_variance

UNIT = Fraction(1, 1 << 80)
numbers = st.floats(-(2.0**99), 2.0**99, allow_nan=False)
# what float32 products of real activations look like, and the ends of the range, in one list
lists = st.lists(numbers | st.floats(-1e-20, 1e-20) | st.floats(-100, 100, width=16), min_size=1, max_size=12)


def limbs_of(values: list[float]) -> torch.Tensor:
    return carry(to_limbs(torch.tensor(values, dtype=torch.float64)).sum(dim=1, keepdim=True))


@given(lists)
@example([-1e-30])
@example([-(2.0**-80), 2.0**-80])
@example([2.0**99, -(2.0**99), 5e-324])
@settings(max_examples=200, deadline=None)
def test_a_sum_equals_the_sum_of_python_fractions_cut_at_2_to_the_minus_80(values):
    exact = sum(round(Fraction(value) / UNIT) for value in values)
    assert to_integers(limbs_of(values).numpy())[0] == exact


@given(lists, st.randoms(use_true_random=False), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_any_order_and_any_split_give_the_same_limbs(values, random, cut):
    shuffled = random.sample(values, len(values))
    parts = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    total = torch.zeros((LIMBS, 1), dtype=torch.int64)
    for part in parts:
        carry(total.add_(limbs_of(part)))
    assert torch.equal(total, limbs_of(values))


@given(lists)
@settings(max_examples=100, deadline=None)
def test_the_canonical_form_has_all_limbs_but_the_last_in_range_and_is_a_fixed_point(values):
    limbs = limbs_of(values)
    assert bool(((limbs[:-1] >= 0) & (limbs[:-1] < 1 << 40)).all())
    assert torch.equal(carry(limbs.clone()), limbs)
    assert np.array_equal(carry(limbs.numpy().copy()), limbs.numpy())  # NumPy and torch carry alike


@pytest.mark.parametrize("value", [2.0**100, -(2.0**100), float("inf"), float("nan")])
def test_what_does_not_fit_is_refused(value):
    with pytest.raises(OverflowError, match="exceeds 2"):
        to_limbs(torch.tensor([1.0, value], dtype=torch.float64))


def test_mean_and_variance_lose_nothing_to_cancellation():
    values = [1e6 + offset for offset in (-3.0, 1.0, 1.5, 4.25)]
    exact_mean = sum(Fraction(value) for value in values) / 4
    exact_variance = sum((Fraction(value) - exact_mean) ** 2 for value in values) / 4
    first = limbs_of(values).numpy().reshape(LIMBS, 1, 1)
    second = limbs_of([value**2 for value in values]).numpy().reshape(LIMBS, 1, 1)  # squares of these are exact in float64
    mean, variance = mean_and_variance(first, second, 4)
    assert mean[0, 0] == float(exact_mean)
    assert variance[0, 0] == float(exact_variance)
