"""A source's name → the source."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from calibrate.corpus.builtin import RandomTokens, standard_library, topics
from calibrate.corpus.columns import Columns, Wanted, table_documents
from calibrate.corpus.draw import TextSource, shuffled, take_turns
from calibrate.corpus.encode import CHARACTERS_A_TOKEN, Encoder
from calibrate.corpus.files import COMPRESSIONS, KINDS, LocalFile, list_files, read_rows, read_text
from calibrate.corpus.hub import hub_rows, parse_hub_id, resolve_revision
from calibrate.corpus.options import SourceSpec
from calibrate.corpus.types import Document, Rows
from calibrate.errors import UsageError

MIX_KINDS = (".yaml", ".yml")
_BUILTIN = {"builtin": topics, "builtin:code": standard_library}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+(:[^@:/]+)?(@[^/]+)?")


class Source(Protocol):
    """Where rows come from. `take` is repeatable; `count_tokens` draws until there are so many or no more."""

    def take(self, rows: int) -> list[Rows]: ...
    def count_tokens(self, at_least: int) -> int: ...
    def describe(self) -> dict: ...


@dataclass(frozen=True)
class Setting:
    """What all sources of a corpus share."""

    encoder: Encoder
    special_ids: list[int]
    vocab_size: int
    samples: int
    sequence_length: int
    split: str


def open_source(spec: SourceSpec, base: Path | None, setting: Setting, seed: list[int]) -> Source:
    """The source that `spec.data` names; relative paths start at `base`. `seed` drives its order.

    Raises:
        UsageError: there is no such source, or it cannot be read.
    """
    if spec.data == "random":
        return RandomTokens(vocab_size=setting.vocab_size, special_ids=setting.special_ids, sequence_length=setting.sequence_length, seed=seed)
    generator = np.random.Generator(np.random.PCG64(seed))
    if spec.data.startswith("builtin"):
        if spec.data not in _BUILTIN:
            raise UsageError(f"there is no built-in corpus '{spec.data}'; there are: {', '.join((*_BUILTIN, 'random'))}")
        return TextSource(shuffled(_BUILTIN[spec.data](), generator), setting.encoder, setting.sequence_length, dict)
    if spec.data.startswith("hub:"):
        return _hub_source(spec, spec.data.removeprefix("hub:"), setting, generator)
    path = (base or Path()) / spec.data
    if _exists(path):
        return _local_source(spec, path, setting, generator)
    if _looks_like_hub_id(spec.data, path):
        return _hub_source(spec, spec.data, setting, generator)
    raise UsageError(f"no such file or folder: {path} (a hub dataset is written hub:org/name)")


def is_mix(data: str) -> bool:
    """Whether `data` names a mix file."""
    return Path(data).suffix.lower() in MIX_KINDS and not data.startswith("hub:")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # no right to enter its folder, or a name too long
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _looks_like_hub_id(data: str, path: Path) -> bool:
    """org/name, and not a mistyped path: neither a data file's name nor inside a folder that is there."""
    file_like = Path(data).suffix.lower() in (*KINDS, *COMPRESSIONS, *MIX_KINDS)
    return _HUB_ID.fullmatch(data) is not None and not file_like and not path.parent.exists()


def _hub_source(spec: SourceSpec, name: str, setting: Setting, generator: np.random.Generator) -> TextSource:
    hub = parse_hub_id(name)
    revision = resolve_revision(hub)
    found: dict[str, None] = {}
    rows = hub_rows(hub, revision, spec.split or setting.split, int(generator.integers(2**31)))
    documents = table_documents(rows, f"hub:{hub.name}", f"hub:{hub.name}", _wanted(spec, setting), lambda columns: _remember(found, columns))
    return TextSource(documents, setting.encoder, setting.sequence_length, lambda: {"revision": revision, "columns": sorted(found)})


def _local_source(spec: SourceSpec, path: Path, setting: Setting, generator: np.random.Generator) -> TextSource:
    files = list_files(path)
    if path.is_file() and path.stat().st_size == 0:
        raise UsageError(f"{path} is empty: give a corpus with text")
    found: dict[str, None] = {}
    order = generator.permutation(len(files))
    streams = (_file_documents(files[index], spec, setting, found) for index in order)
    documents = shuffled(take_turns(streams), generator)
    return TextSource(documents, setting.encoder, setting.sequence_length, lambda: {"files": len(files), "columns": sorted(found)})


def _file_documents(file: LocalFile, spec: SourceSpec, setting: Setting, found: dict[str, None]) -> Iterator[Document]:
    if KINDS[file.kind] is not None:
        wanted = _wanted(spec, setting)
        yield from table_documents(read_rows(file), str(file.path), file.label, wanted, lambda columns: _remember(found, columns))
        return
    text = read_text(file, setting.samples * setting.sequence_length * CHARACTERS_A_TOKEN)
    if text.strip():
        yield Document(file.label, text=text)


def _wanted(spec: SourceSpec, setting: Setting) -> Wanted:
    return Wanted(spec.text_column, spec.chat_column, setting.encoder.has_template)


def _remember(found: dict[str, None], columns: Columns) -> None:
    found[str(columns)] = None
