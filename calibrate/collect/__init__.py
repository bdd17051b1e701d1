"""Runs a model over batches and returns what its attention layers cached."""

from calibrate.collect.collector import CollectRun, collect, prepare

__all__ = ["CollectRun", "collect", "prepare"]
