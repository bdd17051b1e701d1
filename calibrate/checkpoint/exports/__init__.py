"""Calibrated scales in the forms that other engines read: one file a form, one line in `FORMATS`."""

from calibrate.checkpoint.exports.base import Exported, Exporter, ExportOptions, Given, Loss
from calibrate.checkpoint.exports.given import open_given
from calibrate.checkpoint.exports.modelopt import Modelopt
from calibrate.checkpoint.exports.sglang_json import SglangJson

FORMATS: dict[str, Exporter] = {"sglang-json": SglangJson(), "modelopt": Modelopt()}

__all__ = ["FORMATS", "ExportOptions", "Exported", "Exporter", "Given", "Loss", "open_given"]
