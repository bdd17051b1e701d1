"""What is done so far, one line an answer, so that a killed run goes on where it was. Bound to a plan: another plan's lines do not count."""

from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from calibrate.errors import UsageError

Record = TypeVar("Record", bound=BaseModel)


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: str = "kv-calibrate/journal/1"
    plan: str


class Journal(Generic[Record]):
    """A JSONL file: a head that names the plan, then records. A line that a kill cut short is dropped.

    Args:
        result: the file that the records will end up in; the journal is its hidden sibling.
        variant: whose records these are.
        plan: digest of all that fixes them.
    """

    def __init__(self, result: Path, variant: str, plan: str, kind: type[Record]) -> None:
        self.path = result.with_name(f".{result.stem}.{quote(variant, safe='')}.jsonl")
        self._head, self._kind = _Head(plan=plan), kind

    def open(self) -> list[Record]:
        """The records so far, in order; the file is left ready for more. Raises UsageError where it cannot be written."""
        records = self._read()
        lines = [line.model_dump_json() + "\n" for line in (self._head, *records)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error
        return records

    def add(self, records: list[Record]) -> None:
        """Append records and hand them to the system. Raises UsageError where that fails, as on a full disk."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(record.model_dump_json() + "\n" for record in records))
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error

    def discard(self) -> None:
        """The result is safe: the journal is of no more use."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[Record]:
        if not self.path.is_file():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is cut short
        if not lines or lines[0].decode("utf-8", errors="replace") != self._head.model_dump_json():
            return []
        try:
            return [self._kind.model_validate_json(line) for line in lines[1:]]
        except ValidationError as error:
            raise UsageError(f"{self.path} is damaged: delete it, and the run starts over ({error.errors()[0]['msg']})") from error
