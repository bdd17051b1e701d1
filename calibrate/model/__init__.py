"""Checkpoints and models: checks, loading, and what a model caches."""

from calibrate.model.layout import AttentionLayer, CacheLayout, probe_layout
from calibrate.model.load import cache_dtype_of, choose_device, compute_dtype, load_model, load_tokenizer
from calibrate.model.source import SourceCheckpoint, resolve_model

__all__ = [
    "AttentionLayer",
    "CacheLayout",
    "SourceCheckpoint",
    "cache_dtype_of",
    "choose_device",
    "compute_dtype",
    "load_model",
    "load_tokenizer",
    "probe_layout",
    "resolve_model",
]
