"""Low-bit KV formats below FP8: what each stores, what comes back of it, what it costs, and a cache that runs them."""

from calibrate.lowbit.additive import Codebooks
from calibrate.lowbit.additive_fit import Samples, fit_codebooks
from calibrate.lowbit.base import LowBitFormat, Window
from calibrate.lowbit.cache import LowBitCache, Placement
from calibrate.lowbit.formats import FORMATS, Offline, make_format
from calibrate.lowbit.rope import rope_frequencies

__all__ = [
    "FORMATS",
    "Codebooks",
    "LowBitCache",
    "LowBitFormat",
    "Offline",
    "Placement",
    "Samples",
    "Window",
    "fit_codebooks",
    "make_format",
    "rope_frequencies",
]
