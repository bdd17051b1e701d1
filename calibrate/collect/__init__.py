"""Runs a model over batches and returns what its attention layers cached."""

from calibrate.collect.collector import CollectRun, collect, prepare
from calibrate.collect.state import discard_states, layers_folder
from calibrate.collect.streaming import collect_streamed, plan_streaming
from calibrate.collect.team import Team, joined

__all__ = ["CollectRun", "Team", "collect", "collect_streamed", "discard_states", "joined", "layers_folder", "plan_streaming", "prepare"]
