"""Evidence about a checkpoint, kept inside it: which checkpoint a result is about, what verify found, and everything that was gathered."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from calibrate.artefact import sha256_file
from calibrate.checkpoint import place_above
from calibrate.engines.readback import Readback
from calibrate.errors import UsageError
from calibrate.evaluate.results import FOLDER, CompareResult, Data, NeedleResult, ReasoningResult, Subject, load, save
from calibrate.evaluate.spectrum_result import SpectrumResult
from calibrate.model import SourceCheckpoint
from calibrate.model.source import SCALES_FILE
from calibrate.progress import note

PROVENANCE = "kv_calibration/provenance.json"
READBACK_FILE = "readback.json"
ENGINES = ("vllm", "transformers")
KINDS: dict[str, type[Data]] = {"compare": CompareResult, "niah": NeedleResult, "reasoning": ReasoningResult, "formats": SpectrumResult}


class ReadbackResult(Data):
    """`kv-calibrate verify`, with the checkpoint that it was about."""

    schema_version: Literal["kv-calibrate/readback-evidence/1"] = "kv-calibrate/readback-evidence/1"
    subject: Subject
    readback: dict[str, Any]  # Readback.as_dict()


@dataclass(frozen=True)
class Evidence:
    """What lies in a checkpoint's evidence folder.

    Attributes:
        results: file name → result, of every file that could be read.
        faults: file name → why it could not.
    """

    results: dict[str, Data]
    faults: dict[str, str]

    @property
    def names(self) -> list[str]:
        return sorted([*self.results, *self.faults])

    def name_of(self, kind: str, engines: tuple[str, ...]) -> str | None:
        """The file of this kind: "readback", or "compare", "niah", "reasoning", "formats" by the first of `engines` that has one."""
        names = [READBACK_FILE] if kind == "readback" else [f"{kind}-{engine}.json" for engine in engines]
        return next((name for name in names if name in self.results or name in self.faults), None)


def check_evidence_place(checkpoint: Path) -> None:
    """Raise UsageError where evidence could not be kept in the checkpoint: said before anything is computed."""
    folder, reason = place_above(checkpoint / FOLDER / "evidence")
    if reason:
        raise UsageError(f"{folder} cannot be written to, and evidence is kept there: copy the checkpoint, or make it writable")


def read_provenance(checkpoint: Path) -> dict[str, Any]:
    """kv_calibration/provenance.json. Raises UsageError where it is missing or damaged: the folder is then no checkpoint of ours."""
    path = checkpoint / PROVENANCE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{checkpoint} has no {PROVENANCE}: it is not a checkpoint that kv-calibrate wrote") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("scales"), str) or not isinstance(value.get("files"), dict):
        raise UsageError(f"{path} is damaged: it names no scales digest or no files")
    try:
        weights = [row["sha256"] for run in value["runs"] for row in run["model"]["weights"]]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: its runs do not name the weights that were calibrated") from error
    if not all(isinstance(digest, str) for digest in weights):
        raise UsageError(f"{path} is damaged: its runs do not name the weights that were calibrated")
    return value


def check_target(checkpoint: Path, path: Path | None) -> None:
    """Raise UsageError where a report or verdict would overwrite the checkpoint: in it only kv_calibration/*.html, .md and .xml may be written."""
    if path is None or not path.resolve().is_relative_to(checkpoint.resolve()):
        return
    if path.resolve().parent != (checkpoint / PROVENANCE).resolve().parent or path.suffix not in (".html", ".md", ".xml"):
        raise UsageError(f"{path} lies in the checkpoint and could overwrite its files: give a path elsewhere")


def subject_of(checkpoint: Path) -> Subject:
    """The identity that evidence carries. Raises UsageError where the folder is no calibrated checkpoint, or a damaged one."""
    provenance = read_provenance(checkpoint)
    scales = checkpoint / SCALES_FILE
    if not scales.is_file():
        raise UsageError(f"{checkpoint} has no {SCALES_FILE}")
    source = SourceCheckpoint.open(checkpoint, trust_remote_code=True)  # opening reads headers; it runs no code of the checkpoint
    return Subject(scales_digest=provenance["scales"], kv_scales_sha256=sha256_file(scales), weights_fingerprint=source.fingerprint)


def save_readback(checkpoint: Path, readback: Readback) -> Path | None:
    """Keep what verify found as evidence; None, with a note, for a checkpoint that another tool wrote."""
    if not (checkpoint / PROVENANCE).is_file():
        note(f"{checkpoint} was not written by kv-calibrate: this read-back is not kept as evidence")
        return None
    path = checkpoint / FOLDER / READBACK_FILE
    save(ReadbackResult(subject=subject_of(checkpoint), readback=readback.as_dict()), path)
    return path


def forget_readback(checkpoint: Path) -> None:
    """Drop an earlier read-back before vLLM is asked again: should it refuse this time, an old yes must not stand."""
    (checkpoint / FOLDER / READBACK_FILE).unlink(missing_ok=True)


def gather(checkpoint: Path) -> Evidence:
    """Read the whole evidence folder; a file that cannot be read is named with its reason."""
    kinds = {READBACK_FILE: ReadbackResult} | {f"{kind}-{engine}.json": model for kind, model in KINDS.items() for engine in ENGINES}
    results: dict[str, Data] = {}
    faults: dict[str, str] = {}
    for name, model in kinds.items():
        path = checkpoint / FOLDER / name
        if not path.exists():
            continue
        try:
            results[name] = load(model, path)
        except UsageError as error:
            faults[name] = str(error)
    return Evidence(results, faults)
