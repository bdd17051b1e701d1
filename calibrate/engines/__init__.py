"""Asks an engine what it really holds: vLLM's read-back of a checkpoint's KV scales."""

from calibrate.engines.light import load_scales
from calibrate.engines.readback import LayerReadback, Readback
from calibrate.engines.registry import unlisted
from calibrate.engines.verify import verify_checkpoint

__all__ = ["LayerReadback", "Readback", "load_scales", "unlisted", "verify_checkpoint"]
