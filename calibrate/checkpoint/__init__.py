"""Writes scales into a checkpoint, in the form that engines load."""

from calibrate.checkpoint.place import check_creatable, place_above
from calibrate.checkpoint.write import Written, check_layers, check_writable, scale_tensors, write_checkpoint

__all__ = ["Written", "check_creatable", "check_layers", "check_writable", "place_above", "scale_tensors", "write_checkpoint"]
