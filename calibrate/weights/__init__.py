"""Quantized weights: made by llmcompressor in an environment of its own, or converted, bit for bit, into the form whose KV scales vLLM loads."""

from calibrate.weights.carry import carrier, check_carrier, discard_carrier
from calibrate.weights.convert import Converted, check_convertible, convert_checkpoint
from calibrate.weights.quantize import Quantized, check_quantizable, quantize_checkpoint
from calibrate.weights.schemes import SCHEMES

__all__ = [
    "SCHEMES",
    "Converted",
    "Quantized",
    "carrier",
    "check_carrier",
    "check_convertible",
    "check_quantizable",
    "convert_checkpoint",
    "discard_carrier",
    "quantize_checkpoint",
]
