"""Per-channel mean and variance from exact sums."""

from fractions import Fraction

import numpy as np

from calibrate.statistics.exactsum import to_integers

_UNITS = 1 << 80


def mean_and_variance(first: np.ndarray, second: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and (population) variance of each channel.

    Args:
        first: limbs of Σx, int64 [4, heads, head_dim].
        second: limbs of Σx², int64 [4, heads, head_dim].
        tokens: number of tokens summed, at least 1.

    Returns:
        mean, variance: float64 [heads, head_dim]. The subtraction E[x²] − E[x]² is done in exact arithmetic, so a channel with a large
        mean and a small spread (Qwen2's K biases) loses nothing to cancellation.
    """
    sums, squares = to_integers(first), to_integers(second)
    mean = np.empty(sums.shape, dtype=np.float64)
    variance = np.empty(sums.shape, dtype=np.float64)
    for where in np.ndindex(sums.shape):
        total, total_squares = Fraction(sums[where], _UNITS), Fraction(squares[where], _UNITS)
        mean[where] = float(total / tokens)
        variance[where] = float(max(Fraction(0), total_squares / tokens - (total / tokens) ** 2))
    return mean, variance
