"""How a checkpoint says that it brings KVarN tables: a key beside compressed-tensors' own, which vLLM and transformers pass over."""

from pathlib import Path
from typing import Any

from calibrate.errors import UsageError
from calibrate.kvarn import KVarNTables
from calibrate.kvarn.tables import SCHEMA
from calibrate.model import SourceCheckpoint

TABLES_FILE = "kv_calibration/kvarn_tables.safetensors"  # in a subfolder: vLLM loads every safetensors file of the top level
_KEY = "kvarn"


def with_tables(quantization: dict[str, Any], written: bool) -> dict[str, Any]:
    """A quantization_config that names the tables, or one that no longer does."""
    rest = {name: value for name, value in quantization.items() if name != _KEY}
    return rest | {_KEY: {"schema": SCHEMA, "tables": TABLES_FILE}} if written else rest


def read_tables(checkpoint: Path) -> KVarNTables | None:
    """The tables that a checkpoint's config names, None where it names none.

    Raises:
        UsageError: the file is missing, damaged, or not where this project puts it.
    """
    reference = SourceCheckpoint.open(checkpoint, trust_remote_code=True).quantization.get(_KEY)
    if reference is None:
        return None
    if not isinstance(reference, dict) or reference.get("tables") != TABLES_FILE:
        raise UsageError(f"{checkpoint}/config.json: quantization_config.{_KEY} does not name {TABLES_FILE}")
    return KVarNTables.load(checkpoint / TABLES_FILE)
