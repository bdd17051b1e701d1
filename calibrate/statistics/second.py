"""Second moments: counts, means and covariances per KV head from exact sums of products."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from calibrate.statistics.exactsum import to_integers

SKIPPED_TOKENS = 128  # at the start of each document: KVarN keeps them in 16 bits, and attention sinks stand there
_UNITS = 1 << 80


@dataclass(frozen=True)
class Second:
    """Moments of one kind in one layer.

    Attributes:
        tokens: vectors summed in each head, int64 [kv_heads] (for Q: tokens times query heads of the group).
        mean: float64 [kv_heads, head_dim].
        covariance: population covariance about the mean, float64 [kv_heads, head_dim, head_dim].
    """

    tokens: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    @property
    def second_moment(self) -> np.ndarray:
        """E[x xᵀ], float64 [kv_heads, head_dim, head_dim]."""
        return self.covariance + self.mean[:, :, None] * self.mean[:, None, :]


def packed_length(channels: int) -> int:
    """Numbers in the upper triangle of the (1 + channels)² matrix."""
    return (channels + 1) * (channels + 2) // 2


def channels_of(length: int) -> int:
    """The inverse of `packed_length`. Raises ValueError where there is none."""
    channels = int((2 * length) ** 0.5) - 1
    if packed_length(channels) != length:
        raise ValueError(f"{length} numbers are no triangle of sums")
    return channels


def second_moments(limbs: np.ndarray) -> Second:
    """Turn limbs of Σ [1, x] [1, x]ᵀ, int64 [4, kv_heads, packed], into moments.

    E[xy] − E[x]E[y] is taken in exact arithmetic before it is rounded, so that a channel with a large mean and a small spread loses nothing.

    Raises:
        ValueError: no token was summed.
    """
    exact = to_integers(limbs)
    heads, channels = exact.shape[0], channels_of(exact.shape[1])
    rows, columns = np.triu_indices(channels + 1)
    tokens, mean, covariance = [], np.empty((heads, channels)), np.empty((heads, channels, channels))
    for head, sums in enumerate(exact):
        count = int(sums[0]) // _UNITS
        if not count:
            raise ValueError("no token was summed")
        tokens.append(count)
        first = sums[1 : channels + 1]  # of the row of ones
        mean[head] = [float(Fraction(total, _UNITS * count)) for total in first]
        for row, column, total in zip(rows[channels + 1 :], columns[channels + 1 :], sums[channels + 1 :], strict=True):
            scaled = total * count * _UNITS - first[row - 1] * first[column - 1]  # of units 2^-160, times count²
            covariance[head, row - 1, column - 1] = covariance[head, column - 1, row - 1] = scaled / (_UNITS * count) / (_UNITS * count)
    return Second(np.array(tokens, dtype=np.int64), mean, covariance)
