"""Each policy against its definition, computed the slow way."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from calibrate.scales import FORMATS, POLICIES, PolicyOptions, Population, report
from calibrate.scales.policies.base import floor_scale
from calibrate.statistics import CACHE_DTYPES
from tests.planted import observed_of
from tests.scales.test_error import MAX, by_hand

BFLOAT16 = CACHE_DTYPES["bfloat16"].decode()


def rows(seed: int, count: int = 3) -> torch.Tensor:
    """Rows of different shape: normal, heavy tail, one outlier; [rows, tokens, 8] in bf16."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, 60, 8)) * 10.0 ** rng.uniform(-4, 3, size=(count, 1, 1))
    values[1 % count] *= np.exp(rng.normal(size=(60, 8)))
    values[2 % count, 0, 0] *= 50
    return torch.from_numpy(values).to(torch.bfloat16)


def population(x: torch.Tensor) -> Population:
    return Population.of(observed_of(x.float().numpy(), kind="q").counts, BFLOAT16)


def solved(x: torch.Tensor, **options) -> np.ndarray:
    chosen = PolicyOptions(**{"margin": 1.0, **options})
    return POLICIES[chosen.policy](population(x), FORMATS[chosen.number_format], chosen)


def is_bfloat16(values: np.ndarray) -> bool:
    return bool((torch.from_numpy(values).to(torch.bfloat16).double().numpy() == values).all())


@pytest.mark.parametrize(
    ("fmt", "margin", "octaves", "seed"), [("e4m3", 1.0, 2, 0), ("e4m3", 1.3, 1, 1), ("e4m3fnuz", 1.0, 2, 2), ("e5m2", 1.0, 1, 3)]
)
def test_mse_is_the_least_error_over_every_bfloat16_of_its_range(fmt, margin, octaves, seed):
    x = rows(seed)
    got = solved(x, policy="mse", number_format=fmt, margin=margin, search_octaves=octaves)
    assert is_bfloat16(got)
    for row, scale in zip(x, got, strict=True):
        floor = margin * row.abs().max().item() / MAX[fmt]
        candidates = BFLOAT16[(floor <= BFLOAT16) & (floor * 2**octaves >= BFLOAT16)]
        errors = [by_hand(row, candidate, fmt)["squared_error"] for candidate in candidates]
        assert floor <= scale <= floor * 2**octaves
        assert by_hand(row, scale, fmt)["squared_error"] == pytest.approx(min(errors), rel=1e-12)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("policy", ["amax", "mse", "pow2"])
def test_nothing_saturates_at_the_fp32_scale_of_a_policy_that_covers_amax(policy, fmt):
    # every mantissa that bf16 has, as the only value: rounding amax/max to fp32 must never put amax above max
    values = torch.from_numpy(BFLOAT16[0x3F00:0x4080]).to(torch.bfloat16).view(-1, 1, 1)
    for margin in (1.0, 1.1):
        scales = solved(values, policy=policy, number_format=fmt, margin=margin).astype(np.float32)
        assert report(population(values), scales, FORMATS[fmt]).saturated.max() == 0


def test_amax_is_amax_over_max_with_margin():
    x = rows(5)
    for fmt, maximum in MAX.items():
        want = 1.5 * x.float().abs().amax(dim=(1, 2)).double().numpy() / maximum
        got = solved(x, policy="amax", number_format=fmt, margin=1.5)
        assert np.allclose(got, want, rtol=2**-23)
        assert (got >= want).all()


def test_pow2_is_the_next_power_of_two():
    exact = torch.tensor([448.0, 449.0, 447.0, 448 * 2.0**-20, 0.3]).to(torch.bfloat16).view(-1, 1, 1)
    got = solved(exact, policy="pow2")
    # bf16 rounds 449 and 447 to 448
    assert got.tolist() == [1.0, 1.0, 1.0, 2.0**-20, 2.0**-10]
    values = rows(6)
    floor = values.float().abs().amax(dim=(1, 2)).double().numpy() / 448
    got = solved(values, policy="pow2")
    assert (np.log2(got) % 1 == 0).all()
    assert ((got >= floor) & (got / 2 < floor)).all()


@pytest.mark.parametrize("percent", [50.5, 90.0, 99.0, 99.99, 100.0])
def test_percentile_is_the_sorted_element_at_its_rank(percent):
    x = rows(7)
    got = solved(x, policy="percentile", percentile=percent, margin=1.25)
    for row, scale in zip(x, got, strict=True):
        ordered = np.sort(row.float().abs().flatten().numpy())
        rank = max(int(np.ceil(len(ordered) * (percent / 100))), 1)
        assert scale == pytest.approx(1.25 * ordered[rank - 1] / 448, rel=2**-23)


def test_a_percentile_that_falls_on_zeros_uses_amax():
    x = torch.zeros(1, 100, 1, dtype=torch.bfloat16)
    x[0, 0, 0] = 4.0
    assert solved(x, policy="percentile", percentile=90.0)[0] == pytest.approx(4 / 448, rel=2**-23)


def test_rows_are_solved_as_if_alone():
    x = rows(8)
    together = solved(x, policy="mse")
    assert [solved(x[index : index + 1], policy="mse")[0] for index in range(3)] == together.tolist()


def test_the_floor_is_representable_and_not_below_what_was_asked():
    x = rows(9)
    floor = floor_scale(population(x), FORMATS["e4m3"], PolicyOptions(margin=1.7))
    assert (floor.astype(np.float32) == floor).all()
    assert (floor >= 1.7 * x.double().abs().amax(dim=(1, 2)).numpy() / 448).all()


@pytest.mark.parametrize(
    "options",
    [
        {"margin": 0.99},
        {"margin": float("nan")},
        {"margin": float("inf")},
        {"percentile": 50},
        {"percentile": 100.1},
        {"search_octaves": 0},
        {"search_octaves": 9},
        {"policy": "best"},
        {"number_format": "int8"},
        {"granularity": "channel"},
        {"typo": 1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValidationError):
        PolicyOptions(**options)
