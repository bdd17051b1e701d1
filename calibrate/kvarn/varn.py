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


def deviation(tile: torch.Tensor, axis: int) -> torch.Tensor:
    """Unbiased standard deviation along `axis`, which is kept. Two passes: faster than torch's own on a CPU, and as exact."""
    return torch.linalg.vector_norm(tile - tile.mean(dim=axis, keepdim=True), dim=axis, keepdim=True) / (tile.shape[axis] - 1) ** 0.5


def imbalance(tile: torch.Tensor) -> torch.Tensor:
    """Largest over smallest standard deviation of the columns plus the same of the rows, of [..., rows, columns]: [...]."""
    return _imbalance(deviation(tile, -2), deviation(tile, -1))


def _imbalance(*deviations: torch.Tensor) -> torch.Tensor:
    return sum(each.amax(dim=(-2, -1)) / each.amin(dim=(-2, -1)).clamp_min(1e-8) for each in deviations)


def varn(tile: torch.Tensor, iterations: int = ITERATIONS) -> Balance:
    """Alternate between columns and rows, `iterations` times, and keep the round with the smallest imbalance, for each tile of [..., rows, columns].

    Standard deviations are unbiased. The arithmetic is of the tile's type: float32 in use.
    """
    columns, rows = tile.new_zeros(*tile.shape[:-2], 1, tile.shape[-1]), tile.new_zeros(*tile.shape[:-1], 1)  # logarithms
    best, least = (columns, rows), tile.new_full(tile.shape[:-2], torch.inf)
    of_columns = deviation(tile, -2)
    for _ in range(iterations):
        columns = _stepped(columns, of_columns)
        rows = _stepped(rows, deviation(tile / columns.exp() / rows.exp(), -1))
        current = tile / columns.exp() / rows.exp()
        of_columns = deviation(current, -2)
        found = _imbalance(of_columns, deviation(current, -1))
        better = (found < least)[..., None, None]
        best = (torch.where(better, columns, best[0]), torch.where(better, rows, best[1]))
        least = torch.minimum(found, least)
    return Balance(best[0].exp(), best[1].exp(), least)


def _stepped(logs: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    return (logs + deviations.clamp(*STD_RANGE).log()).clamp(*LOG_RANGE)
