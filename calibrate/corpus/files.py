"""Local files → raw rows with their place. Nothing is converted or cached.

`datasets` serves the hub (hub.py). Local files are read by the parsers beneath it (pyarrow, json, csv), one row at a time: its builders
write lock files to the cache folder, need a writable home, infer one schema for all rows, and lose the line number an error has to name.
"""

import csv
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from calibrate.errors import UsageError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_TABLE_NAMES = ("data", "rows", "examples", "train")  # {"data": [row, ...]} is a table, {"messages": [...]} is one row
_PARQUET_ROWS = 256  # rows decoded at once: only those that are drawn should cost memory

Numbered = Iterator[tuple[int, Any]]  # 1-based line or row number, raw row


@dataclass(frozen=True)
class LocalFile:
    """A file and the short name its samples carry."""

    path: Path
    label: str

    @property
    def kind(self) -> str:
        """Its format as a suffix, compression left away: ".jsonl" for "a.jsonl.gz"."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] in COMPRESSIONS:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""


def list_files(root: Path) -> list[LocalFile]:
    """The data files at `root`: itself, or every one below it in sorted order, hidden ones and links that lead out of it left away.

    Raises:
        UsageError: not a file of a known format, or a folder that has none.
    """
    if not root.is_dir():
        file = LocalFile(root, root.name)
        if file.kind not in KINDS:
            raise UsageError(f"{root} is of no known format: give one of {_formats()}, or a folder of them")
        if not root.is_file():
            raise UsageError(f"{root} is not a regular file")
        return [file]
    found = sorted(_walk(root), key=lambda file: file.label)
    if not found:
        raise UsageError(f"{root} holds no data files: put some of {_formats()} there")
    return found


def _walk(root: Path) -> Iterator[LocalFile]:
    def fail(error: OSError) -> None:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error

    inside = root.resolve()
    for folder, names, files in os.walk(root, onerror=fail):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            file = LocalFile(path, path.relative_to(root).as_posix())
            if not name.startswith(".") and file.kind in KINDS and path.resolve().is_relative_to(inside) and path.is_file():
                yield file


def _formats() -> str:
    return " ".join(KINDS) + " (text formats also compressed: " + " ".join(COMPRESSIONS) + ")"


def read_rows(file: LocalFile) -> Numbered:
    """Rows of a tabular file, each normally a dict, with their 1-based line (JSON lines) or row number.

    Raises:
        UsageError: unreadable, corrupt, not UTF-8 or not of its format; the message names the file and the line.
    """
    with _readable(file.path):
        yield from KINDS[file.kind](file.path)


def read_text(file: LocalFile, limit: int) -> str:
    """The first `limit` bytes of a text file as one document. Raises UsageError as `read_rows`."""
    with _readable(file.path), _open(file.path) as stream:
        raw = stream.read(limit)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and len(raw) == limit:  # the limit cut a character
            return raw[: error.start].decode("utf-8-sig")
        raise UsageError(f"{file.path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{path} is not a readable Parquet file: {_one_line(error)}") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UsageError(f"{path} is cut short or damaged: {_one_line(error)}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or _one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _open(path: Path) -> BinaryIO:
    compression = _compression(path)
    if compression is None:
        return path.open("rb")
    try:
        return LocalFileSystem().open(str(path.absolute()), "rb", compression=compression)
    except ValueError as error:  # fsspec knows .zst only where a zstd library is
        raise UsageError(f"{path} needs a decompressor that is not installed ({error}): decompress it, or pip install zstandard") from error


def _compression(path: Path) -> str | None:
    return {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}.get(path.suffix.lower())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with _open(path) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{path}:{number}: not UTF-8 text (byte {error.start} of the line): save the file as UTF-8") from error


def _json_lines(path: Path) -> Numbered:
    for number, line in _lines(path):
        if line.strip():
            yield number, _parse(line, f"{path}:{number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise UsageError(f"{where}: broken JSON: {reason}") from error


def _json(path: Path) -> Numbered:
    """A list of rows, one object that holds such a list, one row, or JSON lines in a .json file."""
    lines = list(islice((pair for pair in _lines(path) if pair[1].strip()), 2))
    if len(lines) == 2 and _is_object(lines[0][1]):
        yield from _json_lines(path)
    elif lines:
        yield from enumerate(_table(_parse_whole(path)), 1)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (json.JSONDecodeError, RecursionError):
        return False  # no whole value: the file is one value over many lines, or broken, which its reader says


def _parse_whole(path: Path) -> Any:
    try:
        return json.loads("".join(line for _, line in _lines(path)))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: broken JSON: nested too deeply") from error


def _table(value: Any) -> list:
    if isinstance(value, dict) and len(value) == 1:
        name, held = next(iter(value.items()))
        if name in _TABLE_NAMES and isinstance(held, list):
            return held
    return value if isinstance(value, list) else [value]


def _delimited(delimiter: str) -> Callable[[Path], Numbered]:
    def read(path: Path) -> Numbered:
        csv.field_size_limit(2**31 - 1)  # a document may be longer than the default 128 KiB
        # Record numbers, not lines: a quoted field may span lines. The header is not counted.
        reader = csv.DictReader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
        number = 0
        try:
            for number, row in enumerate(reader, 1):
                if None in row:
                    raise UsageError(f"{path}:{reader.line_num}: more fields than the header's {len(reader.fieldnames or ())}")
                yield number, row
        except csv.Error as error:
            raise UsageError(f"{path}:{reader.reader.line_num}: broken CSV in row {number + 1}: {error}") from error

    return read


def _parquet(path: Path) -> Numbered:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row


KINDS: dict[str, Callable[[Path], Numbered] | None] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    **dict.fromkeys((".txt", ".md")),  # None: one document a file
}
