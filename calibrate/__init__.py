"""kv-calibrate: FP8 KV-cache scales that are measured, written, loaded and proven."""

__version__ = "0.1.0"
