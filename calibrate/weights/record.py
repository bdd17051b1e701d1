"""The file in a quantized or converted checkpoint that says what it was made of, and how."""

import json
from pathlib import Path
from typing import Any

from calibrate.artefact import write_json

WEIGHTS_FILE = "weights_provenance.json"
SCHEMA = "kv-calibrate/weights/1"


def write_record(folder: Path, made: dict[str, Any], found: dict[str, Any]) -> None:
    """Write `made` (what decides the result: compared to tell whether a folder can be used again) and `found` (what is told besides)."""
    write_json(folder / WEIGHTS_FILE, {"schema": SCHEMA, "made": made, **found})


def made_of(folder: Path) -> dict[str, Any] | None:
    """What a folder was made of, None where there is no such folder, or no record in it."""
    try:
        record = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("made") if isinstance(record, dict) and record.get("schema") == SCHEMA else None
