"""The error computed from counts, against element after element through torch's own casts."""

import numpy as np
import pytest
import torch

from calibrate.scales import FORMATS, Population, report, squared_errors
from calibrate.statistics import CACHE_DTYPES
from tests.planted import observed_of

SCALES = [2.0**-9, 0.0123, 0.11, 1.0, 3.7]
MAX = {"e4m3": 448.0, "e4m3fnuz": 224.0, "e5m2": 57344.0}
TORCH = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}


def elements(seed: int = 0) -> torch.Tensor:
    """[2 heads, tokens, head_dim] with zeros, subnormals of FP8, values beyond its range, both signs."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(2, 128, 16)) * 2.0 ** rng.integers(-14, 12, size=(2, 128, 16))
    values[:, :3] = 0.0
    return torch.from_numpy(values).to(torch.bfloat16)


def by_hand(x: torch.Tensor, scale: float, fmt: str) -> dict[str, float]:
    """One head, element by element."""
    divided = x.float().flatten() / torch.tensor(scale, dtype=torch.float32)
    cast = divided.clamp(-MAX[fmt], MAX[fmt]).to(TORCH[fmt])
    back = cast.to(torch.float64) * float(np.float32(scale))
    exact = x.double().flatten()
    nonzero = exact != 0
    return {
        "squared_error": float(((exact - back) ** 2).sum()),
        "energy": float((exact**2).sum()),
        "saturated": float((divided.abs() > MAX[fmt]).double().mean()),
        "underflow": float(((cast.float() == 0) & nonzero).sum() / nonzero.sum()),
    }


def population(x: torch.Tensor) -> Population:
    return Population.of(observed_of(x.float().numpy(), kind="q").counts, CACHE_DTYPES["bfloat16"].decode())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
def test_error_saturation_and_underflow_equal_those_of_every_element(fmt, scale):
    x = elements()
    got = report(population(x), np.full(2, scale, dtype=np.float32), FORMATS[fmt])
    for head in range(2):
        want = by_hand(x[head], scale, fmt)
        assert got.squared_error[head] == pytest.approx(want["squared_error"], rel=1e-12)
        assert got.snr_db[head] == pytest.approx(10 * np.log10(want["energy"] / want["squared_error"]), abs=1e-9)
        assert got.saturated[head] == pytest.approx(want["saturated"], abs=1e-15)
        assert got.underflow[head] == pytest.approx(want["underflow"], abs=1e-7)


@pytest.mark.parametrize("fmt", FORMATS)
def test_many_scales_at_once_give_each_scales_error(fmt):
    x = elements(1)
    got = squared_errors(population(x), np.array(SCALES), FORMATS[fmt])
    want = [[by_hand(x[head], scale, fmt)["squared_error"] for scale in SCALES] for head in range(2)]
    assert np.allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_clamp_comes_before_the_cast_so_nothing_becomes_nan_or_infinite(fmt):
    huge = torch.tensor([MAX[fmt], MAX[fmt] * 1.2, 1e9, -1e9, float("inf"), -float("inf")])
    assert FORMATS[fmt].round_trip(huge).abs().tolist() == [MAX[fmt]] * 6


@pytest.mark.parametrize("fmt", FORMATS)
def test_tiny_is_the_smallest_number_that_survives(fmt):
    tiny = FORMATS[fmt].tiny
    assert FORMATS[fmt].round_trip(torch.tensor([tiny, tiny / 2.001])).tolist() == [tiny, 0.0]


def test_a_population_of_zeros_has_no_error_and_no_fractions():
    got = report(population(torch.zeros(1, 4, 4)), np.ones(1, dtype=np.float32), FORMATS["e4m3"])
    assert (got.squared_error[0], got.snr_db[0], got.saturated[0], got.underflow[0]) == (0.0, np.inf, 0.0, 0.0)
