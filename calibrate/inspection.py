"""What scales do to what was seen: the rows of `kv-calibrate inspect`, as data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import read_header
from calibrate.checkpoint.write import FOLDER
from calibrate.errors import UsageError
from calibrate.scales import FORMATS, PolicyOptions, Population, Scales, report, solve
from calibrate.statistics import Statistics

_GROWTH = 1.1
_UNDERFLOW = 0.01
_SNR_LOSS_DB = 0.5


@dataclass(frozen=True)
class Row:
    """One kind (K, V, Q) of one layer.

    Attributes:
        amax: largest magnitude seen. amax_growth: the same after a quarter, half and all of the documents.
        scale: the scale (the largest, where there is one a head). saturated, underflow: fractions at that scale.
        snr_db, unit_snr_db: signal to noise at the scale and at 1.0. unit_saturated: fraction that scale 1.0 saturates.
    """

    layer: int
    module: str
    kind: str
    amax: float
    amax_growth: tuple[float, float, float]
    scale: float
    saturated: float
    underflow: float
    snr_db: float
    unit_snr_db: float
    unit_saturated: float


@dataclass(frozen=True)
class Inspection:
    """All rows, the origin of the scales, and what deserves a look."""

    path: str
    options: dict[str, Any]
    counted: dict[str, int]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: Path, options: PolicyOptions) -> Inspection:
    """Inspect a calibrated checkpoint, or a statistics file (its scales are then solved with `options`).

    Raises:
        UsageError: it is neither, or a checkpoint of another tool, which holds no statistics.
    """
    if path.is_dir():
        folder = path / FOLDER
        if not folder.is_dir():
            raise UsageError(f"{path} has no {FOLDER} folder: it was not calibrated by kv-calibrate, or the folder was removed")
        statistics, scales = Statistics.load(folder / "statistics.safetensors"), Scales.load(folder / "scales.safetensors")
    elif str(read_header(path).get("schema", "")).startswith("kv-calibrate/scales/"):
        raise UsageError(f"{path} holds scales without what they were solved from: inspect the statistics file or the checkpoint")
    else:
        statistics = Statistics.load(path)
        scales = solve(statistics, options)
    return Inspection(str(path), scales.options.model_dump(), statistics.counted, tuple(rows(statistics, scales)), _warnings(statistics, scales))


def rows(statistics: Statistics, scales: Scales) -> list[Row]:
    """One row for each layer and kind that was observed; a KV-shared reader has only its Q."""
    values = statistics.values()
    result = []
    for layer in scales.layers:
        solved = dict(layer.items())
        for kind, seen in statistics.layers[layer.index].items():
            result.append(_row(layer.index, layer.module, kind, seen.counts, seen.part_amax, solved[kind], values, scales))
    return result


def _row(index: int, module: str, kind: str, counts: np.ndarray, part_amax: np.ndarray, scale: np.ndarray, values: np.ndarray, scales: Scales) -> Row:
    fmt = FORMATS[scales.options.number_format]
    population = Population.of(counts, values)
    heads = np.broadcast_to(scale, len(counts)) if len(scale) == 1 else scale
    own, unit = report(population, heads, fmt), report(population, np.ones(len(counts), dtype=np.float32), fmt)
    running = np.maximum.accumulate(part_amax.max(axis=1))  # [4]
    total, nonzero = counts.sum(), counts[:, 1:].sum()
    energy = population.energy.sum()
    return Row(
        layer=index,
        module=module,
        kind=kind,
        amax=float(population.amax.max()),
        amax_growth=(float(values[running[0]]), float(values[running[1]]), float(values[running[3]])),
        scale=float(scale.max()),
        saturated=_share(own.saturated * counts.sum(axis=1), total),
        underflow=_share(own.underflow * counts[:, 1:].sum(axis=1), nonzero),
        snr_db=_snr(energy, own.squared_error.sum()),
        unit_snr_db=_snr(energy, unit.squared_error.sum()),
        unit_saturated=_share(unit.saturated * counts.sum(axis=1), total),
    )


def _share(parts: np.ndarray, whole: int) -> float:
    return float(parts.sum() / whole) if whole else 0.0


def _snr(energy: float, error: float) -> float:
    return float(10 * np.log10(energy / error)) if error > 0 and energy > 0 else float("inf")


def _warnings(statistics: Statistics, scales: Scales) -> tuple[str, ...]:
    found = list(scales.warnings)
    for row in rows(statistics, scales):
        name = f"{row.kind.upper()} of layer {row.layer}"
        before, after = row.amax_growth[1], row.amax_growth[2]
        headroom = row.scale * FORMATS[scales.options.number_format].max / row.amax if row.amax else float("inf")
        if before and after / before > _GROWTH and headroom < (after / before) ** 2:
            found.append(
                f"{name}: amax grew by {after / before - 1:.0%} in the second half of the corpus and headroom is {headroom:.2f}×: use more text"
            )
        if row.saturated > 0:
            found.append(f"{name}: {row.saturated:.2g} of its elements saturate at scale {row.scale:.4g}")
        if row.underflow > _UNDERFLOW:
            found.append(f"{name}: {row.underflow:.1%} of its non-zero elements become zero at scale {row.scale:.4g}")
        if row.snr_db < row.unit_snr_db - _SNR_LOSS_DB:
            found.append(f"{name}: {row.snr_db:.1f} dB at its scale, {row.unit_snr_db:.1f} dB at 1.0")
    return tuple(found)


def summary(inspection: Inspection) -> dict[str, Any]:
    """The few figures of a run's summary table, by kind: ranges over layers."""
    result: dict[str, Any] = {}
    for kind in ("k", "v", "q"):
        of_kind = [row for row in inspection.rows if row.kind == kind]
        if of_kind:
            result[kind] = {
                "layers": len(of_kind),
                "amax": (min(row.amax for row in of_kind), max(row.amax for row in of_kind)),
                "scale": (min(row.scale for row in of_kind), max(row.scale for row in of_kind)),
                "snr_db": (min(row.snr_db for row in of_kind), float(np.mean([row.snr_db for row in of_kind]))),
                "unit_snr_db": (min(row.unit_snr_db for row in of_kind), float(np.mean([row.unit_snr_db for row in of_kind]))),
                "saturated": max(row.saturated for row in of_kind),
                "unit_saturated": max(row.unit_saturated for row in of_kind),
            }
    return result
