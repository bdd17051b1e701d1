"""VarN against a slow float64 computation written out loop by loop, and what its clamp floor does."""

import math

import numpy as np
import pytest
import torch

from calibrate.kvarn.tile import quantize
from calibrate.kvarn.varn import FLOOR, imbalance, varn


def slow_varn(tile: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Column scales, row scales and imbalance of the best of eight rounds, one number at a time."""
    rows, columns = tile.shape
    log_c, log_r = [0.0] * columns, [0.0] * rows

    def balanced() -> list[list[float]]:
        return [[tile[r, c] / math.exp(log_c[c]) / math.exp(log_r[r]) for c in range(columns)] for r in range(rows)]

    def deviation(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))

    best = None
    for _ in range(8):
        current = balanced()
        for c in range(columns):
            spread = min(max(deviation([current[r][c] for r in range(rows)]), 1e-3), 1e3)
            log_c[c] = min(max(log_c[c] + math.log(spread), -0.3), 10.0)
        current = balanced()
        for r in range(rows):
            spread = min(max(deviation(current[r]), 1e-3), 1e3)
            log_r[r] = min(max(log_r[r] + math.log(spread), -0.3), 10.0)
        current = balanced()
        of_columns = [deviation([current[r][c] for r in range(rows)]) for c in range(columns)]
        of_rows = [deviation(current[r]) for r in range(rows)]
        imb = max(of_columns) / max(min(of_columns), 1e-8) + max(of_rows) / max(min(of_rows), 1e-8)
        if best is None or imb < best[2]:
            best = (np.exp(log_c), np.exp(log_r), imb)
    return best


def uneven(rows: int, columns: int, size: float, seed: int = 0, row_spread: float = 0.7) -> np.ndarray:
    """Gaussian, rows and columns of different deviation around `size`."""
    generator = np.random.default_rng(seed)
    spread = generator.normal(0, row_spread, (rows, 1)) + generator.normal(0, 0.7, (1, columns))
    return size * generator.standard_normal((rows, columns)) * np.exp(spread)


@pytest.mark.parametrize("size", [0.05, 0.7, 4.0, 300.0])
@pytest.mark.parametrize("shape", [(16, 24), (32, 16)])
def test_it_is_the_published_iteration(shape, size):
    tile = uneven(*shape, size)
    columns, rows, imb = slow_varn(tile)
    found = varn(torch.from_numpy(tile))
    np.testing.assert_allclose(found.columns[0].numpy(), columns, rtol=1e-10)
    np.testing.assert_allclose(found.rows[:, 0].numpy(), rows, rtol=1e-10)
    assert float(found.imbalance) == pytest.approx(imb, rel=1e-10)
    single = varn(torch.from_numpy(tile).to(torch.float32))  # what runs
    np.testing.assert_allclose(single.columns[0].numpy(), columns, rtol=1e-5)
    np.testing.assert_allclose(single.rows[:, 0].numpy(), rows, rtol=1e-5)


def test_tiles_do_not_know_of_each_other():
    tiles = torch.from_numpy(np.stack([uneven(16, 16, size, seed) for seed, size in enumerate((0.1, 3.0, 50.0))]))
    together = varn(tiles)
    for number, tile in enumerate(tiles):
        alone = varn(tile)
        assert torch.equal(together.columns[number], alone.columns)
        assert torch.equal(together.rows[number], alone.rows)


def test_the_best_round_is_kept_not_the_last():
    """One dead column: its scale hits the floor, and rounds go on changing the others."""
    tile = torch.from_numpy(uneven(16, 16, 2.0, 5))
    tile[:, 3] *= 1e-4
    found = varn(tile)
    rounds = [varn(tile, iterations) for iterations in range(1, 9)]
    assert float(found.imbalance) == min(float(each.imbalance) for each in rounds)
    balanced = tile / found.columns / found.rows
    assert float(imbalance(balanced)) == pytest.approx(float(found.imbalance), rel=1e-9)


def test_well_scaled_tiles_come_to_imbalance_two():
    """Deviations well above the floor: every row and column gets the same one. Below the floor nothing is balanced."""
    tile = torch.from_numpy(uneven(64, 128, 100.0, row_spread=0.05))
    assert float(imbalance(tile)) > 10
    assert float(varn(tile).imbalance) == pytest.approx(2.0, abs=1e-3)
    small = tile * 1e-4
    assert float(varn(small).imbalance) == pytest.approx(float(imbalance(small)), rel=1e-6)


def test_quiet_rows_stay_quiet_until_the_tile_is_huge():
    """Columns come first and bring the tile to deviation one, so that rows below 0.741 of that hit the floor, at any usual size.

    A column step divides by 1,000 at most: a tile larger than that leaves its rows room, and comes to imbalance 2.
    """
    found = [float(varn(torch.from_numpy(uneven(64, 128, size))).imbalance) for size in (10.0, 100.0, 10_000.0)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] > 3
    assert found[2] == pytest.approx(2.0, abs=1e-3)


def test_below_the_floor_it_scales_everything_alike():
    """The published clamp makes VarN a no-op on tiles whose deviations all lie below e^-0.3."""
    found = varn(torch.from_numpy(uneven(32, 32, 0.01)))
    assert torch.allclose(found.columns, torch.full_like(found.columns, FLOOR))
    assert torch.allclose(found.rows, torch.full_like(found.rows, FLOOR))


def test_a_prescale_repairs_small_tiles_at_two_bits():
    """The facts' known figure: synthetic tiles of RMS 0.25 err half as much where their size is raised above the floor first."""
    tile = torch.from_numpy(uneven(128, 64, 1.0)).to(torch.float32)
    tile *= 0.25 / tile.square().mean().sqrt()
    plain = quantize(tile, 2).dequantize()
    raised = quantize(tile * 16, 2).dequantize() / 16
    errors = [float((each - tile).square().sum() / tile.square().sum()) for each in (plain, raised)]
    assert errors[1] < 0.7 * errors[0]


def test_dead_and_constant_tiles_stay_finite():
    for tile in (torch.zeros(16, 16), torch.full((16, 16), 3.0), torch.eye(16) * 1e6):
        stored = quantize(tile, 2)
        assert torch.isfinite(stored.dequantize()).all()
        assert torch.isfinite(stored.scale).all()
    assert quantize(torch.zeros(16, 16), 2).dequantize().abs().max() == 0


def test_quantization_is_the_published_rounding():
    """Codes and metadata recomputed in numpy float64 from VarN's scales; x̂ = (q·S + Z)·columns with fp16 S, Z and columns."""
    tile = uneven(24, 16, 2.0, 9)
    columns, rows, _ = slow_varn(tile)
    balanced = tile / columns / rows[:, None]
    low, high = balanced.min(axis=1), balanced.max(axis=1)
    step = np.maximum((high - low) / 3, 1e-10)
    codes = np.clip(np.rint((balanced - low[:, None]) / step[:, None]), 0, 3)
    expected = (codes * np.float16(step * rows).astype(float)[:, None] + np.float16(low * rows).astype(float)[:, None]) * np.float16(columns).astype(
        float
    )
    stored = quantize(torch.from_numpy(tile), 2)
    np.testing.assert_array_equal(stored.codes.numpy(), codes)
    np.testing.assert_allclose(stored.dequantize(torch.float64).numpy(), expected, rtol=1e-5)
    single = quantize(torch.from_numpy(tile).to(torch.float32), 2)
    np.testing.assert_array_equal(single.codes.numpy(), codes)
