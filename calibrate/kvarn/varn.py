"""VarN, the variance normalization of KVarN (arXiv 2606.03458): scales of rows and columns under which a tile's variances are alike."""

from dataclasses import dataclass

import torch

ITERATIONS = 8
STD_RANGE = (1e-3, 1e3)
LOG_RANGE = (-0.3, 10.0)  # of a log-scale. e^-0.3 = 0.741: rows and columns with less deviation than that are all scaled alike
FLOOR = 2.718281828459045 ** LOG_RANGE[0]


@dataclass(frozen=True)
class Balance:
    """What VarN found for tiles [..., rows, columns]: tile / columns / rows is balanced.

    Attributes:
        columns: [..., 1, columns]. rows: [..., rows, 1]. Both positive, in the tile's type.
        imbalance: of the balanced tile, [...]; 2 is perfect.
    """

    columns: torch.Tensor
    rows: torch.Tensor
    imbalance: torch.Tensor


def imbalance(tile: torch.Tensor) -> torch.Tensor:
    """Largest over smallest standard deviation of the columns plus the same of the rows, of [..., rows, columns]: [...]."""
    total = torch.zeros(tile.shape[:-2], dtype=tile.dtype, device=tile.device)
    for axis in (-2, -1):
        std = tile.std(dim=axis)
        total = total + std.amax(dim=-1) / std.amin(dim=-1).clamp_min(1e-8)
    return total


def varn(tile: torch.Tensor, iterations: int = ITERATIONS) -> Balance:
    """Alternate between columns and rows, `iterations` times, and keep the round with the smallest imbalance, for each tile of [..., rows, columns].

    Standard deviations are unbiased. The arithmetic is of the tile's type: float32 in use.
    """
    logs = {-2: tile.new_zeros(*tile.shape[:-2], 1, tile.shape[-1]), -1: tile.new_zeros(*tile.shape[:-1], 1)}
    best = {axis: log.clone() for axis, log in logs.items()}
    least = tile.new_full(tile.shape[:-2], torch.inf)
    current = tile
    for _ in range(iterations):
        for axis, log in logs.items():  # along −2 lie a column's values, along −1 a row's
            spread = current.std(dim=axis, keepdim=True).clamp(*STD_RANGE)
            logs[axis] = (log + spread.log()).clamp(*LOG_RANGE)
            current = tile / logs[-2].exp() / logs[-1].exp()
        found = imbalance(current)
        better = (found < least)[..., None, None]
        best = {axis: torch.where(better, logs[axis], best[axis]) for axis in logs}
        least = torch.minimum(found, least)
    return Balance(best[-2].exp(), best[-1].exp(), least)
