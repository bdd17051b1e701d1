"""Confidence intervals by bootstrap over documents: whole documents are drawn, because the tokens of one are not independent."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from calibrate.evaluate.results import Interval

RESAMPLES = 4000
LEVEL = 0.95
_CHUNK = 1 << 24  # elements of a block of resampling weights


def bootstrap(
    sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> Interval:
    """The interval of a statistic of sums over documents. Columns of one row belong together, so that differences and ratios are paired.

    The percentile interval is expanded for few documents, as T. Hesterberg proposes ("What teachers should know about the bootstrap", 2015):
    with n documents the plain one is too narrow by about √((n − 1)/n) and by the normal's thinner tails. One document gives no interval: its
    value alone, low = high.

    Args:
        sums: per document, float64 [documents, columns].
        statistic: of resampled sums, [resamples, columns] → [resamples].
    """
    return bootstrap_each(sums, lambda drawn: statistic(drawn)[:, None], seed=seed, resamples=resamples, level=level)[0]


def bootstrap_each(
    sums: np.ndarray, statistics: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> list[Interval]:
    """The same for several statistics of the same draws: [resamples, columns] → [resamples, statistics]."""
    documents = len(sums)
    values = statistics(sums.sum(axis=0, keepdims=True))[0].tolist()
    if documents < 2:
        return [Interval(value=value, low=value, high=value) for value in values]
    generator = np.random.Generator(np.random.PCG64(seed))
    share = np.full(documents, 1 / documents)
    step = max(1, _CHUNK // documents)
    drawn = [generator.multinomial(documents, share, size=min(step, resamples - start)) @ sums for start in range(0, resamples, step)]
    tail = _expanded_tail((1 - level) / 2, documents)
    lows, highs = np.quantile(statistics(np.concatenate(drawn)), [tail, 1 - tail], axis=0).tolist()
    return [Interval(value=value, low=min(low, value), high=max(high, value)) for value, low, high in zip(values, lows, highs, strict=True)]


def _expanded_tail(tail: float, documents: int) -> float:
    normal = NormalDist()
    return normal.cdf(math.sqrt(documents / (documents - 1)) * _student(normal.inv_cdf(tail), documents - 1))


def _student(z: float, freedom: int) -> float:
    """Student's t quantile from the normal one: exact for 1 and 2 degrees of freedom, else Cornish-Fisher (better than 1% from 3 on)."""
    p = NormalDist().cdf(z)
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
