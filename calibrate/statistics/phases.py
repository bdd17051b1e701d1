"""Phase tables: how much of attention's output FP8 loses, by where the scale lies in its octave.

Above its subnormals E4M3's relative error repeats with every factor of two, so sixteen places of one octave stand for all scales.
"""

import numpy as np

from calibrate.statistics.exactsum import to_integers

PHASES = 16
OCTAVE = np.round(128 * 2.0 ** (np.arange(PHASES) / PHASES)) / 128  # scales in [1, 2), bfloat16 numbers
ROWS, ROW_TOKENS, QUERIES = 4, 2048, 32  # of the corpus, of a row at most, and of a row's queries
UNIT_BITS = 40  # tables are summed in units of 2^-40: values far below 1 keep their digits


def phase_table(limbs: np.ndarray) -> np.ndarray:
    """Σ‖ô − o‖² over the queries looked at, with one kind in FP8 at each scale of `OCTAVE`.

    Args:
        limbs: int64 [4, kv_heads, PHASES].

    Returns:
        float64 [kv_heads, PHASES]; zeros where nothing was looked at.
    """
    return (to_integers(limbs) / (1 << (80 + UNIT_BITS))).astype(np.float64)
