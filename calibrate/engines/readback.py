"""What a read-back says: one row per layer, rank and kind, and the whole of it as data."""

import math
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "kv-calibrate/readback/1"


@dataclass(frozen=True)
class LayerReadback:
    """One scale of one layer on one rank.

    `expected` holds the float32 values that belong on this rank, `loaded` those vLLM holds (None where it has no such layer);
    both as Python floats, so they are exact. `reason` is "" exactly when `ok`.
    """

    layer: str
    rank: int
    kind: str
    expected: tuple[float, ...]
    loaded: tuple[float, ...] | None
    ok: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}_scale (rank {self.rank}): {self.reason or 'equal'}"


@dataclass(frozen=True)
class Readback:
    """The answer of one engine about one checkpoint. `error` is vLLM's own, where it would not load or run the checkpoint."""

    checkpoint: str
    engine: str
    kv_cache_dtype: str
    attention_backend: str
    tensor_parallel_size: int
    rows: tuple[LayerReadback, ...]
    notes: tuple[str, ...]
    seconds: float
    error: str = ""

    @property
    def failures(self) -> tuple[LayerReadback, ...]:
        return tuple(row for row in self.rows if not row.ok)

    @property
    def ok(self) -> bool:
        """True when vLLM loaded the checkpoint, there was something to compare, and every row is equal."""
        return not self.error and bool(self.rows) and not self.failures

    def as_dict(self) -> dict[str, Any]:
        """JSON-able and exact; NaN and infinity, which JSON lacks, become the strings "nan", "inf", "-inf"."""
        rows = [asdict(row) | {"expected": _exact(row.expected), "loaded": _exact(row.loaded)} for row in self.rows]
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        return {"schema": SCHEMA, **head, "notes": list(self.notes), "ok": self.ok, "rows": rows}


def _exact(values: tuple[float, ...] | None) -> list[float | str] | None:
    return None if values is None else [value if math.isfinite(value) else str(value) for value in values]
