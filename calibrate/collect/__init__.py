"""Runs a model over batches and returns what its attention layers cached."""

from calibrate.collect.collector import CollectRun, collect, prepare
from calibrate.collect.state import discard_states
from calibrate.collect.team import Team, joined

__all__ = ["CollectRun", "Team", "collect", "discard_states", "joined", "prepare"]
