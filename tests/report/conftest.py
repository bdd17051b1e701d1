"""The gate's checkpoints serve the report too."""

from tests.gate.conftest import checkpoint, passing

__all__ = ["checkpoint", "passing"]
