"""Opening what is to be exported: a folder that kv-calibrate wrote, with everything in it that must agree."""

from pathlib import Path

import numpy as np

from calibrate.artefact import read_tensors
from calibrate.checkpoint.exports.base import Given
from calibrate.checkpoint.exports.modelopt import modelopt_tensors
from calibrate.checkpoint.write import ENGINE_SCALES, FOLDER, check_same_weights, scale_tensors
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.model.source import SCALES_FILE
from calibrate.scales import Scales
from calibrate.statistics import Statistics


def open_given(source: SourceCheckpoint, scales: Scales | None = None, statistics: Statistics | None = None) -> Given:
    """What to export: `scales` that were solved for `source`, or None for those in the folder itself, which kv-calibrate wrote.

    Raises:
        UsageError: no folder of ours, a file in it that contradicts another, scales of other weights or other statistics.
    """
    if scales is None:
        scales, statistics = _kept(source)
    check_same_weights(source, scales)
    if statistics is not None and statistics.digest() != scales.statistics_digest:
        raise UsageError(f"the scales of {source.path} were not solved from these statistics: their digests differ")
    return Given(source, scales, statistics)


def _kept(source: SourceCheckpoint) -> tuple[Scales, Statistics | None]:
    folder: Path = source.path / FOLDER
    if not folder.is_dir():
        raise UsageError(f"{source.path} has no {FOLDER} folder: it was not written by kv-calibrate; export a scales file with --model {source.path}")
    scales = Scales.load(folder / "scales.safetensors")
    held, _ = read_tensors(source.path / SCALES_FILE, ENGINE_SCALES)
    if not any(_same(held, tensors(source, scales)) for tensors in (scale_tensors, modelopt_tensors)):
        raise UsageError(f"{source.path / SCALES_FILE} holds other scales than {FOLDER}/scales.safetensors: write the checkpoint again")
    kept = folder / "statistics.safetensors"
    return scales, Statistics.load(kept) if kept.is_file() else None


def _same(held: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return held.keys() == wanted.keys() and all(np.array_equal(held[name], wanted[name]) for name in held)
