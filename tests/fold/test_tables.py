"""The tables are the error that a real cast makes, and choices made on them find what is there to be found."""

import numpy as np
import pytest
import torch

from calibrate.fold.choose import choose
from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample
from calibrate.fold.tables import PHASES, TURNS, key_tables, rounded
from calibrate.model import AttentionLayer


def parts(heads: int = 2, groups: int = 1, dim: int = 8, rest: int = 0) -> Parts:
    layer = AttentionLayer(0, "layers.0.attn", 0, heads, groups, dim, dim)
    turning = dim - rest
    return Parts(layer, False, "", np.arange(turning // 2), np.arange(turning // 2, turning), np.arange(turning, dim))


def sample(k: torch.Tensor, q: torch.Tensor, looked: torch.Tensor | None = None) -> LayerSample:
    return LayerSample(k, q, torch.ones(k.shape[:2]) if looked is None else looked)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rounding_is_the_cast_of_every_bfloat16():
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    inside = codes[(codes.abs() >= 2.0**-6) & (codes.abs() <= 448)]
    assert len(inside) > 3000
    fine = torch.cat([inside, inside * 1.0371, normal(100_000) * 10])
    fine = fine[(fine.abs() >= 2.0**-6) & (fine.abs() <= 448)]
    assert torch.equal(rounded(fine), fine.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("phase", [0, 5, PHASES - 1])
def test_a_phase_is_a_scale(phase):
    """The table's error of a channel at phase j is that of a real cast with scale 2^(-j/PHASES), in any octave."""
    k, q, looked = normal(1, 500, 8) * 3, normal(1, 500, 8, seed=1), torch.rand(1, 500, generator=torch.Generator().manual_seed(2))
    table = key_tables(sample(k, q, looked), parts(rest=8), turns=False)[0].key[0, 0, phase]
    k, q, share = k[0, :250], q[0, :250], (looked[0, :250] / looked[0, :250].sum())[:, None]
    for octave in (-2, 0, 2):
        scale = 2.0 ** (octave - phase / PHASES) / 4
        wrong = (k / scale).to(torch.float8_e4m3fn).float() * scale - k
        spread = (share * (wrong - (share * wrong).sum(dim=0)).square()).sum(dim=0)
        np.testing.assert_allclose(table, (spread * q.square().mean(dim=0)).numpy(), rtol=2e-3)


def test_key_errors_are_logit_errors_without_their_mean():
    k, q = normal(1, 400, 8) + 2, normal(1, 400, 8, seed=1)
    half = key_tables(sample(k, q), parts(), turns=True)[0]
    k, q = k[0, :200], q[0, :200]
    turn = np.exp(0.5j * np.pi * 3 / TURNS)
    k, q = (torch.view_as_complex(torch.stack([x[:, :4], x[:, 4:]], dim=-1).contiguous()) * turn for x in (k, q))
    for side, of, other in (("key", k, q), ("query", q, k)):
        real, weights = torch.view_as_real(of), torch.view_as_real(other)
        wrong = (real * 2 ** (2 / PHASES)).to(torch.float8_e4m3fn).float() / 2 ** (2 / PHASES) - real
        error = wrong.var(dim=0, unbiased=False) if side == "key" else wrong.square().mean(dim=0)
        weight = weights.square().mean(dim=0) if side == "key" else weights.var(dim=0, unbiased=False)
        np.testing.assert_allclose(getattr(half, side)[0, 3, 2], (error * weight).sum(dim=-1).numpy(), rtol=0.05)


def test_nearly_constant_channels_are_put_on_numbers_of_the_format():
    """K that is a bias with a little noise: a multiplier brings it to where its error is the same for all tokens."""
    bias = torch.linspace(1, 3.9, 16) * torch.tensor([1, -1] * 8)
    k = torch.cat([bias * (1 + 0.01 * normal(1, 600, 16)), 0.1 * normal(1, 600, 16, seed=2)], dim=-1)
    fold, predicted = choose(sample(k, normal(1, 600, 32, seed=1)), parts(dim=32), ("k",))
    assert predicted.after["k"] < 0.5 * predicted.before["k"]
    assert (abs(fold.pairs) >= 2**-0.5 - 1e-9).all()
    assert (abs(fold.pairs) < 2**0.5).all()
    assert fold.moved["pairs"] > 0


def test_what_both_sides_prefer_is_spread_over_two_channels():
    """K and Q along the same channel of a pair: an eighth of a turn halves the error, which is known in closed form."""
    k, q = (0.02 * normal(1, 4000, 2, seed=seed) for seed in (0, 1))
    k[..., 0], q[..., 0] = normal(1, 4000, seed=2), normal(1, 4000, seed=3)
    fold, predicted = choose(sample(k, q), parts(dim=2), ("turn",))
    assert predicted.after["k"] / predicted.before["k"] == pytest.approx(0.5, abs=0.05)
    assert abs(np.angle(fold.pairs[0, 0])) == pytest.approx(np.pi / 4, abs=0.1)


def test_pairs_that_turn_all_the_time_are_not_rotated():
    fold, _ = choose(sample(normal(1, 4000, 8), normal(1, 4000, 8, seed=1)), parts(), ("turn",))
    assert fold.moved["pairs"] == 0


def test_a_prediction_is_no_luck():
    """Of Gaussian channels there is nothing to gain; what a choice seems to gain on its own tokens is not counted."""
    gaussian = sample(normal(1, 1000, 8), normal(1, 1000, 8, seed=1))
    _, predicted = choose(gaussian, parts(), ("turn", "k"))
    for kind in "kq":
        assert predicted.after[kind] / predicted.before[kind] > 0.96


def test_channels_outside_rope_have_multipliers_of_their_own():
    fold, _ = choose(sample(normal(1, 500, 8) * 0.01 + 1.07, normal(1, 500, 8, seed=1)), parts(rest=4), ("turn", "k"))
    assert fold.pairs.shape == (1, 2)
    assert fold.rest.shape == (1, 4)
    assert fold.moved["rest"] > 0
    assert np.isrealobj(fold.rest)
