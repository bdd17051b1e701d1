"""What the papers say of their methods, and independent float64 recomputations of them."""

import math

import numpy as np
import pytest
import torch

from calibrate.errors import UsageError
from calibrate.kvarn.hadamard import rotate
from calibrate.lowbit import FORMATS, Placement, make_format
from calibrate.lowbit.integer import transform
from calibrate.lowbit.lloydmax import lloyd_max, nearest
from calibrate.lowbit.turboquant import _levels
from calibrate.model import probe_layout
from tests.tiny import tiny_model

READY = [name for name in FORMATS if "+" not in name and name != "additive"]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(got: torch.Tensor, x: torch.Tensor) -> float:
    return float((got - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_lloyd_max_reaches_the_known_distortion(bits, distortion):
    """Max (1960), table I: mean squared error of the best quantizer of a standard Gaussian."""
    x = gaussian(1_000_000).double()
    levels = lloyd_max(bits)
    assert float((levels[nearest(x, levels)] - x).square().mean()) == pytest.approx(distortion, rel=0.01)
    assert torch.allclose(levels, -levels.flip(0))
    if bits == 1:
        assert float(levels[1]) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-9)


def test_lloyd_max_is_nearest():
    levels, x = lloyd_max(3), gaussian(1000).double()
    assert torch.equal(nearest(x, levels), (x[:, None] - levels).abs().argmin(dim=1))


@pytest.mark.parametrize("name", READY)
def test_every_format_is_deterministic_finite_and_keeps_zero_and_shape(name):
    fmt, x = make_format(name), gaussian(2, 3, 128, 64) * 3
    for read in (fmt.key, fmt.value):
        got = read(x, 5, 128)
        assert got.shape == x.shape
        assert got.dtype == torch.float32
        assert torch.equal(got, read(x.clone(), 5, 128))
        assert error(got, x) < 0.7
        assert torch.isfinite(read(torch.zeros_like(x), 5, 0)).all()
        assert read(torch.zeros_like(x), 5, 0).abs().max() < 1e-6
        assert torch.isfinite(read(x * 1e5, 5, 0)).all()  # clamped, where metadata or FP8 end


@pytest.mark.parametrize("name", READY)
def test_heads_and_rows_do_not_mix(name):
    fmt, x = make_format(name), gaussian(2, 3, 128, 64)
    for read in (fmt.key, fmt.value):
        whole = read(x, 0, 0)
        assert torch.equal(read(x[1:, 2:], 0, 0), whole[1:, 2:])


@pytest.mark.parametrize(("coarse", "fine"), [("kivi_2bit", "kivi_4bit"), ("gear_2bit", "gear_4bit"), ("kvarn_k2v2_g128", "kvarn_k4v4_g128")])
def test_more_bits_err_less(coarse, fine):
    x = gaussian(1, 2, 256, 64)
    for kind in ("key", "value"):
        assert error(getattr(make_format(fine), kind)(x, 0, 0), x) < error(getattr(make_format(coarse), kind)(x, 0, 0), x) / 8


def slow_uniform(values: np.ndarray, bits: int) -> np.ndarray:
    """One group, fp16 metadata."""
    low, high = float(values.min()), float(values.max())
    scale, zero = float(np.float16((high - low) / (2**bits - 1))), float(np.float16(low))
    return np.clip(np.rint((values - zero) / scale), 0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_recomputed(bits):
    x = gaussian(1, 1, 128, 64)
    exact = x[0, 0].double().numpy()
    key, value = np.empty_like(exact), np.empty_like(exact)
    for start in range(0, 128, 32):
        for channel in range(64):
            key[start : start + 32, channel] = slow_uniform(exact[start : start + 32, channel], bits)
    for token in range(128):
        for start in (0, 32):
            value[token, start : start + 32] = slow_uniform(exact[token, start : start + 32], bits)
    fmt = make_format(f"kivi_{bits}bit")
    np.testing.assert_allclose(fmt.key(x, 0, 0)[0, 0].numpy(), key, atol=1e-5)
    np.testing.assert_allclose(fmt.value(x, 0, 0)[0, 0].numpy(), value, atol=1e-5)
    assert np.abs(fmt.value(x, 0, 0)[0, 0].numpy() - key).max() > 0.05  # the axes differ


def test_kivi_keys_survive_an_outlier_channel_and_values_do_not():
    """Why keys go per channel: an outlier costs its own channel alone."""
    x = gaussian(1, 1, 128, 64)
    x[..., 7] *= 100
    others = [channel for channel in range(32) if channel != 7]
    fmt = make_format("kivi_2bit")
    assert error(fmt.key(x, 0, 0)[..., others], x[..., others]) < 0.25
    assert error(fmt.value(x, 0, 0)[..., others], x[..., others]) > 0.9


@pytest.mark.parametrize(
    ("name", "dim", "message"),
    [
        ("kivi_2bit", 80, "32 channels of V, and the 80"),
        ("gear_2bit", 96, "64 channels of V, and the 96"),
        ("turboquant_3bit_nc", 96, "power of two"),
    ],
)
def test_heads_that_a_method_cannot_divide_are_refused_at_once(name, dim, message):
    model = tiny_model("llama", head_dim=dim, num_hidden_layers=6)
    with pytest.raises(UsageError, match=message):
        Placement(probe_layout(model), make_format(name), torch.bfloat16, model.config)


@pytest.mark.parametrize(("name", "bits", "share"), [("gear_4bit", 4, None), ("gear_2bit", 2, 64)])
@pytest.mark.parametrize("axis", [0, 1])
def test_gear_recomputed(name, bits, share, axis):
    """Outliers and codes by loops in float64; the low-rank part against the best there is, by SVD."""
    x = gaussian(1, 1, 128, 64) * torch.randn(64, generator=torch.Generator().manual_seed(3)).exp()
    exact = x[0, 0].double().numpy()
    dense, mask = np.empty_like(exact), np.zeros(exact.shape, dtype=bool)
    for number in range(exact.shape[1 - axis]):
        vector = exact[:, number] if axis == 0 else exact[number]
        outliers = [int(vector.argmin()), int(vector.argmax())]  # 2% of 64 and of 128, halved and rounded: one at either end
        filled = vector.copy()
        filled[outliers] = vector.mean()
        width = share or len(filled)
        coded = np.concatenate([slow_uniform(filled[start : start + width], bits) for start in range(0, len(filled), width)])
        (dense[:, number] if axis == 0 else dense[number])[:] = coded
        (mask[:, number] if axis == 0 else mask[number])[outliers] = True
    left = np.where(mask, 0.0, exact - dense)
    best = float((np.linalg.svd(left, compute_uv=False)[4:] ** 2).sum())
    fmt = make_format(name)
    parts = fmt.parts(x, axis - 2)
    np.testing.assert_array_equal(parts.outliers[0, 0].numpy(), mask)
    np.testing.assert_allclose(parts.dense[0, 0].numpy(), dense, atol=1e-5)
    found = float(((left - parts.low_rank[0, 0].double().numpy()) ** 2).sum())
    assert best <= found <= 1.1 * best
    assert found < (left**2).sum()
    total = (fmt.key if axis == 0 else fmt.value)(x, 0, 0)[0, 0].numpy()
    np.testing.assert_allclose(total[mask], exact[mask], rtol=1e-3)  # outliers are kept, in fp16


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_turboquants_levels_are_lloyd_max_to_a_thousandth(bits, dim):
    assert torch.allclose(_levels(bits, dim, torch.device("cpu")), (lloyd_max(bits) / dim**0.5).float(), rtol=8e-4, atol=0)


def slow_turboquant_key(vector: np.ndarray, bits: int) -> np.ndarray:
    dim = len(vector)
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / math.sqrt(dim)
    norm = float(np.linalg.norm(vector))
    levels = _levels(bits, dim, torch.device("cpu")).double().numpy()
    found = np.array([levels[np.abs(levels - value).argmin()] for value in hadamard @ vector / norm])
    return float(np.float16(norm)) * (hadamard @ (found / np.linalg.norm(found)))


@pytest.mark.parametrize(("name", "bits", "value_bits"), [("turboquant_4bit_nc", 4, 4), ("turboquant_3bit_nc", 3, 3)])
def test_turboquant_recomputed(name, bits, value_bits):
    x = gaussian(1, 1, 24, 64) * 5
    fmt = make_format(name)
    for got, vector in zip(fmt.key(x, 0, 0)[0, 0], x[0, 0].double().numpy(), strict=True):
        np.testing.assert_allclose(got.numpy(), slow_turboquant_key(vector, bits), atol=1e-4)
        assert float(got.norm()) == pytest.approx(np.linalg.norm(vector), rel=1e-3)  # norm correction
    for got, vector in zip(fmt.value(x, 0, 0)[0, 0], x[0, 0].double().numpy(), strict=True):
        low, scale = vector.min(), (vector.max() - vector.min()) / (2**value_bits - 1)
        codes = np.floor((vector - low) / scale + 0.5)
        np.testing.assert_allclose(got.numpy(), codes * float(np.float16(scale)) + float(np.float16(low)), atol=1e-4)


def test_turboquant_saturates_its_fp8_keys():
    got = make_format("turboquant_k8v4").key(torch.tensor([1.0, 460.0, -1e6, 0.3]).view(1, 1, 1, 4), 0, 0)
    assert got.view(-1).tolist() == [1.0, 448.0, -448.0, 0.3125]


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_papers_values_have_lloyd_max_distortion(bits, distortion):
    """A random rotation makes any vector look Gaussian: even one-hot ones."""
    x = torch.eye(128)[None, None].expand(1, 2, -1, -1) * 7
    assert error(make_format(f"turboquant_paper_{bits}bit").value(x, 0, 0), x) == pytest.approx(distortion, rel=0.1)


def test_the_papers_keys_have_unbiased_scores():
    """QJL: the mean error of q·k over many pairs is nothing beside its spread, while the coarse part alone shrinks scores."""
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 1, 1, 4096, 128, generator=generator)
    q = q + k  # correlated, so that a bias shows
    scores = (q * k).sum(dim=-1)
    found = (q * make_format("turboquant_paper_2bit").key(k, 0, 0)).sum(dim=-1)
    assert float((found / scores).mean()) == pytest.approx(1.0, abs=0.02)
    coarse = (q * make_format("turboquant_paper_2bit").value(k, 0, 0)).sum(dim=-1)
    assert float((coarse / scores).mean()) < 0.95


def test_int4_transform_undoes_itself_and_keeps_scores():
    for dim in (64, 96, 128):
        q, k = torch.randn(2, 1, 2, 8, dim, generator=torch.Generator().manual_seed(1))
        assert torch.allclose(transform(transform(k), inverse=True), k, atol=1e-5)
        block = dim & -dim
        assert torch.allclose(transform(q) @ transform(k).mT / block, q @ k.mT, atol=1e-4)


def test_int8_rounds_halves_away_from_zero():
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, -2.5, 0.49]).view(1, 1, 1, 6)
    assert make_format("int8_per_token_head").key(x, 0, 0).view(-1).tolist() == [127.0, 1.0, -1.0, 2.0, -3.0, 0.0]


@pytest.mark.parametrize("name", ["kvarn_k4v4_g128", "int4_per_token_head", "turboquant_4bit_nc", "turboquant_paper_4bit"])
def test_scores_need_no_rotated_query(name):
    """What is read is in the original basis: q·k̂ is what an engine gets from a rotated q and the k̂ it holds."""
    fmt = make_format(name)
    q, k = torch.randn(2, 1, 2, 128, 64, generator=torch.Generator().manual_seed(2))
    read = fmt.key(k, 0, 0)
    assert torch.allclose(q @ read.mT, rotate(q) @ rotate(read).mT, atol=1e-4)
    assert error(q @ read.mT, q @ k.mT) < 0.08
    assert error(q @ rotate(read).mT, q @ k.mT) > 0.5  # left in the rotated basis it would be noise
