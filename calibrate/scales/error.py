"""The exact quantization error at any scale, from code counts alone."""

from dataclasses import dataclass

import numpy as np
import torch

from calibrate.scales.formats import NumberFormat


@dataclass(frozen=True)
class Population:
    """Counted magnitudes of one or several tensors that share the codes they use.

    Attributes:
        values: finite magnitudes that occur, ascending, float64 [codes].
        counts: how often each occurs in each row, int64 [rows, codes].
    """

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, values: np.ndarray) -> "Population":
        """From full code counts [rows, 32768] and the magnitude of each code [32768]: drops the codes that never occur."""
        used = np.flatnonzero(counts.any(axis=0))
        return cls(values[used], counts[:, used])

    @property
    def amax(self) -> np.ndarray:
        """Largest magnitude of each row, float64 [rows]; 0 for a row of zeros."""
        return np.where(self.counts > 0, self.values, 0.0).max(axis=1, initial=0.0)

    @property
    def energy(self) -> np.ndarray:
        """Σx² of each row, float64 [rows]."""
        return self.counts @ np.square(self.values)


@dataclass(frozen=True)
class ErrorReport:
    """What a scale does to each row of a population: float64 [rows] each.

    Attributes:
        squared_error: Σ(x − x̂)². snr_db: 10·log10(Σx² / Σ(x − x̂)²); infinite where there is no error.
        saturated: fraction of elements that the clamp cuts. underflow: fraction of non-zero elements that become zero.
    """

    squared_error: np.ndarray
    snr_db: np.ndarray
    saturated: np.ndarray
    underflow: np.ndarray


def quantized(values: np.ndarray, scales: np.ndarray, fmt: NumberFormat) -> np.ndarray:
    """x̂ for every magnitude at every scale, as kernels compute it: fp32 division, clamp, cast, and scale again. float64 [scales, codes]."""
    x = torch.from_numpy(values).to(torch.float32)
    s = torch.from_numpy(np.array(scales, dtype=np.float32))[:, None]
    return fmt.round_trip(x / s).to(torch.float64).mul_(s.to(torch.float64)).numpy()


def squared_errors(population: Population, scales: np.ndarray, fmt: NumberFormat) -> np.ndarray:
    """Σ(x − x̂)² of every row at every scale: float64 [rows, scales]."""
    wrong = quantized(population.values, scales, fmt)
    wrong -= population.values
    wrong *= wrong  # in place: fresh pages for tables of this size cost more than the arithmetic
    return population.counts.astype(np.float64) @ wrong.T


def report(population: Population, scales: np.ndarray, fmt: NumberFormat) -> ErrorReport:
    """The error of each row at its own scale (`scales`: float32 [rows])."""
    approximate = quantized(population.values, scales, fmt)  # [rows, codes]
    counts, values = population.counts, population.values
    squared = (counts * np.square(approximate - values)).sum(axis=1)
    clipped = (values[None, :].astype(np.float32) / np.asarray(scales, dtype=np.float32)[:, None]) > fmt.max
    total = np.maximum(counts.sum(axis=1), 1)
    nonzero = np.maximum(counts[:, values > 0].sum(axis=1), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        snr = np.where(squared > 0, 10 * np.log10(population.energy / squared), np.inf)
    return ErrorReport(
        squared_error=squared,
        snr_db=snr,
        saturated=(counts * clipped).sum(axis=1) / total,
        underflow=(counts * ((approximate == 0) & (values > 0))).sum(axis=1) / nonzero,
    )
