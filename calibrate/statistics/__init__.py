"""Exact code histograms and moments of K, V and Q, their merge, and the `Statistics` artefact."""

from calibrate.statistics.artefact import KINDS, PARTS, Observed, Statistics, merge, pack_layers, unpack_layers
from calibrate.statistics.codes import CACHE_DTYPES, CODES, CacheDtype

__all__ = ["CACHE_DTYPES", "CODES", "KINDS", "PARTS", "CacheDtype", "Observed", "Statistics", "merge", "pack_layers", "unpack_layers"]
