"""Codes and metadata as bytes and back, by numpy: what a kernel would store."""

import numpy as np


def pack(codes: np.ndarray, bits: int) -> bytes:
    """Codes below 2^bits, lowest bits first, without gaps."""
    places = ((codes.reshape(-1, 1) >> np.arange(bits)) & 1).astype(np.uint8)
    return np.packbits(places.reshape(-1), bitorder="little").tobytes()


def unpack(data: bytes, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    places = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")[: int(np.prod(shape)) * bits]
    return (places.reshape(-1, bits) << np.arange(bits)).sum(axis=1).reshape(shape)


def pack_half(values: np.ndarray) -> bytes:
    """As fp16; the values must be exact in it."""
    stored = values.astype(np.float16)
    assert np.array_equal(stored.astype(np.float32), values.astype(np.float32)), "metadata that fp16 does not hold exactly"
    return stored.tobytes()


def unpack_half(data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, dtype=np.float16).astype(np.float32).reshape(shape)
