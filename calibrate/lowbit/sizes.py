"""Bytes of one token of one head in each format, payload and metadata: the only place where they are written down."""

from math import ceil

FP32, FP16 = 4, 2


def per_tensor(dim: int, size: float) -> float:
    """`size` bytes a channel and nothing else a token."""
    return dim * size


def eight_bit_per_token(dim: int) -> float:
    """int8 or fp8 and a float32 scale."""
    return dim + FP32


def int4_per_token(dim: int) -> float:
    """Two channels a byte and a float32 scale, in whose low bits the zero point hides."""
    return dim // 2 + FP32


def kivi(dim: int, bits: int, group: int) -> float:
    """Codes, and a scale and a zero in fp16 for each `group` values, along tokens (K) or channels (V)."""
    return dim * bits / 8 + dim / group * 2 * FP16


def turboquant_key(dim: int, bits: int) -> float:
    """fp8 for 8 bits; else codes and the norm in fp16."""
    return dim if bits == 8 else ceil(dim * bits / 8) + FP16


def turboquant_value(dim: int, bits: int) -> float:
    """Codes, scale and zero in fp16."""
    return ceil(dim * bits / 8) + 2 * FP16


def turboquant_slot(key: float, value: float) -> float:
    """vLLM keeps a token's K and V of a head in one slot of an even number of bytes."""
    return key + value + (key + value) % 2


def kvarn_key(dim: int, bits: int, group: int) -> float:
    """Of a tile of `group` tokens, K keeps scale and zero a channel and a scale a token, in fp16."""
    return dim * bits / 8 + (2 * dim / group + 1) * FP16


def kvarn_value(dim: int, bits: int, group: int) -> float:
    """V keeps a scale a channel, scale and zero a token, in fp16."""
    return dim * bits / 8 + (dim / group + 2) * FP16


def gear(dim: int, bits: int, *, vectors: int, length: int, share: int | None, kept: int, group: int, rank: int) -> float:
    """Of a tile of `group` tokens: codes, a scale and a zero in fp16 for each `share` values of a vector, `kept` outliers a vector, two fp16 factors.

    An outlier takes its value in fp16 and its place in the vector, a byte where the vector has no more than 256.
    """
    scales = vectors * (length / (share or length)) * 2 * FP16
    sparse = vectors * kept * (FP16 + ceil((length - 1).bit_length() / 8))
    factors = (group + dim) * rank * FP16
    return dim * bits / 8 + (scales + sparse + factors) / group


def additive_key(dim: int, group: int, stages: int) -> float:
    """A code of one byte for each stage and group of channels, and the norm in fp16."""
    return dim / group * stages + FP16


def turboquant_paper(dim: int, bits: int, norms: int) -> float:
    """Codes (for keys one of the bits is the residual's sign), and `norms` in fp16."""
    return ceil(dim * bits / 8) + norms * FP16
