"""All that the rules look at, read once. What cannot be read becomes a fault that the rules report; it does not end the gate."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from calibrate.checkpoint.write import FOLDER, scale_tensors
from calibrate.engines.names import split_scale_name
from calibrate.errors import UsageError
from calibrate.evaluate.evidence import Evidence, gather, read_provenance, subject_of
from calibrate.evaluate.results import Subject
from calibrate.model import SourceCheckpoint
from calibrate.model.source import SCALES_FILE
from calibrate.scales import Scales
from calibrate.statistics import Statistics

T = TypeVar("T")


@dataclass(frozen=True)
class Found(Generic[T]):
    """A value, or the reason why there is none."""

    value: T | None
    fault: str = ""


@dataclass(frozen=True)
class Material:
    """A checkpoint as the gate sees it.

    Attributes:
        tensors: scale name → values as the file has them (float32, or what else is stored), and each one's stored type.
        expected: scale name → values that kv_calibration/scales.safetensors gives for it.
    """

    checkpoint: Path
    provenance: dict[str, Any]
    source: Found[SourceCheckpoint]
    subject: Found[Subject]
    tensors: Found[dict[str, tuple[str, np.ndarray]]]
    scales: Found[Scales]
    expected: Found[dict[str, np.ndarray]]
    statistics: Found[Statistics]
    evidence: Evidence


def read_material(checkpoint: Path) -> Material:
    """Read everything. Raises UsageError where the folder is no checkpoint that kv-calibrate wrote."""
    if not checkpoint.is_dir():
        raise UsageError(f"no checkpoint folder at {checkpoint}")
    provenance = read_provenance(checkpoint)
    source = attempt(lambda: SourceCheckpoint.open(checkpoint, trust_remote_code=True))
    scales = attempt(lambda: Scales.load(checkpoint / FOLDER / "scales.safetensors"))
    return Material(
        checkpoint=checkpoint,
        provenance=provenance,
        source=source,
        subject=attempt(lambda: subject_of(checkpoint)),
        tensors=attempt(lambda: _stored_scales(checkpoint / SCALES_FILE)),
        scales=scales,
        expected=_expected(source, scales),
        statistics=attempt(lambda: Statistics.load(checkpoint / FOLDER / "statistics.safetensors")),
        evidence=gather(checkpoint),
    )


def attempt(read: Callable[[], T]) -> Found[T]:
    try:
        return Found(read())
    except UsageError as error:
        return Found(None, str(error))


def _expected(source: Found[SourceCheckpoint], scales: Found[Scales]) -> Found[dict[str, np.ndarray]]:
    if source.value is None or scales.value is None:
        return Found(None, source.fault or scales.fault)
    return attempt(lambda: scale_tensors(source.value, scales.value))


def _stored_scales(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    if not path.is_file():
        raise UsageError(f"no {path.name} in {path.parent}")
    try:
        with safe_open(path, framework="pt") as file:  # "np" cannot read bf16, which is to be reported
            names = [name for name in file.keys() if split_scale_name(name)]  # noqa: SIM118 (safe_open is no dict)
            return {name: (file.get_slice(name).get_dtype(), file.get_tensor(name).float().numpy().reshape(-1)) for name in names}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
