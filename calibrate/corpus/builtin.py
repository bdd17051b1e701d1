"""Text that every machine has, and tokens that are no text at all."""

import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from calibrate.corpus.types import Document, Rows
from calibrate.errors import UsageError


def topics() -> Iterator[Document]:
    """CPython's language reference as `help()` shows it: English prose with code and grammar, PSF licence."""
    pages = import_module("pydoc_data.topics").topics
    for name in sorted(pages):
        yield Document(f"builtin:{name}", text=pages[name])


def standard_library() -> Iterator[Document]:
    """The source of the standard library's top-level modules, PSF licence.

    Raises:
        UsageError: this Python came without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise UsageError(f"builtin:code needs the sources of Python's standard library, and {folder} has none: give another --data")
    for file in files:
        yield Document(f"builtin:code:{file.name}", text=file.read_text(encoding="utf-8"))


class RandomTokens:
    """Uniformly random token ids below `vocab_size`, special ones excluded: what calibration without text looks like."""

    def __init__(self, *, vocab_size: int, special_ids: list[int], sequence_length: int, seed: list[int]) -> None:
        special = np.array(sorted(token for token in special_ids if token < vocab_size), dtype=np.int64)
        self._allowed = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), special)
        self._length, self._seed = sequence_length, seed
        if not len(self._allowed):
            raise UsageError("every token of the vocabulary is special: random tokens cannot be drawn")

    def take(self, rows: int) -> list[Rows]:
        """`rows` documents of one full row each; more rows begin with the same ones."""
        generator = np.random.Generator(np.random.PCG64(self._seed))
        tokens = self._allowed[generator.integers(len(self._allowed), size=(rows, self._length))].astype(np.int32)
        return [Rows(f"random:{number}", (row,)) for number, row in enumerate(tokens, 1)]

    def count_tokens(self, at_least: int) -> int:
        """There is no end of them."""
        return at_least

    def describe(self) -> dict:
        return {}
