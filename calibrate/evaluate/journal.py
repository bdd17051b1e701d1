"""What is done so far, one line an answer, so that a killed run goes on where it was. Bound to a plan: another plan's lines do not count."""

import json
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from calibrate.errors import UsageError

Record = TypeVar("Record", bound=BaseModel)


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: str = "kv-calibrate/journal/2"
    plan: str


class Journal(Generic[Record]):
    """A JSONL file: a head that names the plan, then records with their numbers. A line that a kill cut short is dropped.

    Two runs at once may write the same numbers into it; each number counts once, and only as far as none is missing.

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
        lines = [self._head.model_dump_json() + "\n", *_lines(records, 0)]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error
        return records

    def add(self, records: list[Record], first: int) -> None:
        """Append records, the first of which answers question number `first`, and hand them to the system.

        Raises:
            UsageError: that fails, as on a full disk.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(_lines(records, first)))
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
            numbered = {int(each["number"]): self._kind.model_validate(each["record"]) for each in map(json.loads, lines[1:])}
        except (ValueError, KeyError, TypeError) as error:  # pydantic's ValidationError is a ValueError
            raise UsageError(f"{self.path} is damaged: delete it, and the run starts over ({type(error).__name__})") from error
        complete = 0
        while complete in numbered:
            complete += 1
        return [numbered[number] for number in range(complete)]


def _lines(records: list[Record], first: int) -> list[str]:
    return [f'{{"number": {number}, "record": {record.model_dump_json()}}}\n' for number, record in enumerate(records, first)]
