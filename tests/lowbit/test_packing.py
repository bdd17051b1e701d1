"""Real bytes: what each format stores is packed, counted, unpacked by other code, and gives the values that the cache hands out."""

import numpy as np
import pytest
import torch

from calibrate.kvarn.tile import QuantizedTile
from calibrate.lowbit import make_format
from calibrate.lowbit.integer import transform
from tests.lowbit.packing import pack, pack_half, unpack, unpack_half

HEADS, TOKENS = 2, 128


def tile(dim: int, seed: int = 0, size: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, HEADS, TOKENS, dim, generator=generator) * size * torch.randn(dim, generator=generator).exp()


def test_packing_itself():
    for bits in (2, 3, 4):
        codes = np.random.default_rng(0).integers(0, 2**bits, (4, 32))
        data = pack(codes, bits)
        assert len(data) == codes.size * bits // 8
        assert np.array_equal(unpack(data, bits, codes.shape), codes)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi(bits, dim):
    fmt, x = make_format(f"kivi_{bits}bit"), tile(dim)
    for encode, read, size in ((fmt.encode_key, fmt.key, fmt.key_bytes), (fmt.encode_value, fmt.value, fmt.value_bytes)):
        stored = encode(x)
        parts = [pack(stored.codes.numpy(), bits), pack_half(stored.scale.numpy()), pack_half(stored.zero.numpy())]
        assert sum(map(len, parts)) == HEADS * TOKENS * size(dim)
        codes = unpack(parts[0], bits, stored.codes.shape).astype(np.float32)
        values = codes * unpack_half(parts[1], stored.scale.shape) + unpack_half(parts[2], stored.zero.shape)
        assert np.array_equal(values.reshape(x.shape), read(x, 0, 0).numpy())


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_int4(dim):
    fmt, x = make_format("int4_per_token_head"), tile(dim)
    stored = fmt.encode(x)
    parts = [pack(stored.codes.numpy(), 4), stored.packed.numpy().tobytes()]
    assert sum(map(len, parts)) == HEADS * TOKENS * fmt.key_bytes(dim)
    words = np.frombuffer(parts[1], dtype=np.uint32).reshape(stored.packed.shape)
    scale = (words & np.uint32(0xFFFFFFF0)).view(np.float32)
    transformed = (unpack(parts[0], 4, stored.codes.shape).astype(np.float32) - (words & 15).astype(np.float32)) * scale
    assert torch.equal(transform(torch.from_numpy(transformed), inverse=True), fmt.key(x, 0, 0))


@pytest.mark.parametrize("name", ["kvarn_k4v4_g128", "kvarn_k4v2_g64", "kvarn_k2v2_g128"])
@pytest.mark.parametrize("dim", [64, 128])
def test_kvarn(name, dim):
    fmt, x = make_format(name), tile(dim)
    for kind, bits, read, size in (("k", fmt.key_bits, fmt.key, fmt.key_bytes), ("v", fmt.value_bits, fmt.value, fmt.value_bytes)):
        stored = fmt.encode(x, kind, None)
        meta = [stored.scale.numpy(), stored.zero.numpy(), stored.columns.numpy()]
        parts = [pack(stored.codes.numpy(), bits), *map(pack_half, meta)]
        assert sum(map(len, parts)) == HEADS * TOKENS * size(dim)
        codes = torch.from_numpy(unpack(parts[0], bits, stored.codes.shape).astype(np.uint8))
        back = QuantizedTile(codes, *(torch.from_numpy(unpack_half(data, each.shape)).half() for data, each in zip(parts[1:], meta, strict=True)))
        assert torch.equal(fmt.decode(back, kind, None), read(x, 0, 0))


@pytest.mark.parametrize("name", ["turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
def test_turboquant_keys(name):
    fmt, x = make_format(name), tile(128)
    stored = fmt.encode_key(x)
    parts = [pack(stored.codes.numpy(), fmt.key_bits), pack_half(stored.norm.numpy())]
    assert sum(map(len, parts)) == HEADS * TOKENS * fmt.key_bytes(128)
    assert torch.equal(fmt.decode_key(stored), fmt.key(x, 0, 0))


@pytest.mark.parametrize(("name", "key", "value"), [("gear_4bit", 64 + 4 + 6 + 16, 64 + 4 + 6 + 16), ("gear_2bit", 32 + 8 + 6 + 16, 32 + 8 + 6 + 16)])
def test_gear(name, key, value):
    """At 128 channels: codes, fp16 scale and zero a vector or 64 values, one outlier at either end of each vector (3 bytes), rank 4 in fp16."""
    fmt, x = make_format(name), tile(128)
    assert (fmt.key_bytes(128), fmt.value_bytes(128)) == (key, value)
    for axis, read in ((-2, fmt.key), (-1, fmt.value)):
        parts = fmt.parts(x, axis)
        assert (parts.outliers.sum(dim=axis) == 2).all()
        assert torch.linalg.matrix_rank(parts.low_rank, rtol=1e-4).max() <= 4
        assert torch.equal(parts.total(), read(x, 0, 0))
        assert torch.equal(parts.kept, x.half().float())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8_e4m3", 256),
        ("int8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("kivi_4bit", 160),
        ("kivi_2bit", 96),
        ("gear_4bit", 180),
        ("gear_2bit", 124),
        ("turboquant_k8v4", 196),
        ("turboquant_3bit_nc", 102),
        ("turboquant_paper_3bit", 102),
        ("kvarn_k4v4_g128", 140),
        ("kvarn_k4v2_g128", 108),
        ("kvarn_k2v2_g128", 76),
        ("kvarn_k2v2_g64", 82),
    ],
)
def test_bytes_of_a_head_of_128(name, size):
    assert make_format(name).token_bytes(1, 128, 128) == size
    assert make_format(name).token_bytes(8, 128, 128) == 8 * size


def test_a_sequence_counts_what_stays_in_sixteen_bits():
    assert make_format("kvarn_k4v2_g128").sequence_bytes(1000, 1, 128, 128) == (128 + 104) * 512 + 768 * 108
    kivi = make_format("kivi_2bit")  # of 300 tokens K keeps 44 in 16 bits, V 128
    assert kivi.sequence_bytes(300, 2, 128, 128) == 2 * (256 * 48 + 172 * 48 + (44 + 128) * 256)
    assert make_format("fp8_e4m3").sequence_bytes(300, 1, 128, 128) == 300 * 256
    assert make_format("kvarn_k4v2_g128").sequence_bytes(100, 1, 128, 128) == 100 * 512  # nothing is quantized yet
