"""Known answers and coverage of the intervals."""

import math

import numpy as np
import pytest

from calibrate.evaluate.bootstrap import _student, bootstrap


def mean(drawn):
    return drawn[:, 0] / drawn[:, 1]


def with_counts(values):
    return np.stack([np.asarray(values, dtype=np.float64), np.ones(len(values))], axis=1)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (200, 1.972)])
def test_student_quantiles(freedom, expected):
    assert -_student(-1.959964, freedom) == pytest.approx(expected, rel=0.01)


def test_the_interval_of_a_mean_is_the_textbook_one():
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap(with_counts(values), mean, resamples=20_000)
    error = values.std(ddof=1) / math.sqrt(400)
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - 1.966 * error, abs=0.05 * error)
    assert interval.high == pytest.approx(values.mean() + 1.966 * error, abs=0.05 * error)


def test_few_documents_widen_it_to_students_t():
    values = [1.0, 2.0, 4.0, 4.5, 6.0, 7.0, 7.5, 9.0]
    interval = bootstrap(with_counts(values), mean, resamples=40_000)
    half = 2.365 * np.std(values, ddof=1) / math.sqrt(8)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.1)


@pytest.mark.parametrize("documents", [8, 25])
def test_coverage(documents):
    """A ratio of sums over documents of unequal length: 95% intervals hold the truth in about 95% of 400 samples."""
    generator = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        tokens = generator.integers(50, 200, documents).astype(np.float64)
        sums = np.stack([tokens * 0.3 + generator.normal(0, 1, documents) * np.sqrt(tokens), tokens], axis=1)
        interval = bootstrap(sums, mean, seed=trial, resamples=1000)
        held += interval.low <= 0.3 <= interval.high
    assert 0.91 <= held / 400 <= 0.985


def test_pairing_takes_out_what_documents_share():
    generator = np.random.default_rng(2)
    base = generator.normal(0, 10, 50)
    other = base + 0.5 + generator.normal(0, 0.1, 50)
    interval = bootstrap(with_counts(other - base), mean)
    assert 0.4 < interval.low < 0.5 < interval.high < 0.6


def test_one_document_gives_its_value_and_the_seed_decides():
    one = bootstrap(np.array([[3.0, 2.0]]), mean)
    assert (one.value, one.low, one.high) == (1.5, 1.5, 1.5)
    values = with_counts(np.random.default_rng(3).normal(size=20))
    assert bootstrap(values, mean, seed=4) == bootstrap(values, mean, seed=4)
    assert bootstrap(values, mean, seed=4) != bootstrap(values, mean, seed=5)


def test_many_documents_fit_in_memory():
    interval = bootstrap(np.ones((50_000, 2)), mean, resamples=1000)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)
