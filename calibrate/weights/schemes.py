"""What `--scheme` and `--weights` name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """A way to quantize weights. `says`: what it is, in llmcompressor's names. `needs_rows`: whether it is calibrated on text."""

    says: str
    needs_rows: bool


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme("FP8_DYNAMIC: E4M3 weights, a scale a channel; activations E4M3, a scale a token", needs_rows=False),
    "w8a8": Scheme("W8A8 by SmoothQuant (0.8) and GPTQ: int8 weights, a scale a channel; activations int8, a scale a token", needs_rows=True),
    "awq": Scheme("W4A16_ASYM after AWQ: int4 weights in groups, with zero points", needs_rows=True),
    "gptq": Scheme("W4A16 by GPTQ: int4 weights in groups, symmetric", needs_rows=True),
    "w4a16": Scheme("W4A16 by rounding to the nearest: int4 weights in groups, symmetric", needs_rows=False),
    "nvfp4": Scheme("NVFP4: E2M1 weights and activations in groups of 16", needs_rows=True),
}
