"""From a stream of documents to the rows that are taken: seeded, and no more read or tokenized than needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from calibrate.corpus.encode import Encoder
from calibrate.corpus.types import Document, Rows

MINIMUM_TAIL = 16  # a shorter last chunk has too little context to show typical K and V
OPEN_FILES = 16
BUFFER_DOCUMENTS = 10_000
BUFFER_CHARACTERS = 64_000_000


def take_turns(streams: Iterator[Iterator[Document]]) -> Iterator[Document]:
    """One document from each of the first OPEN_FILES streams in turn; the next stream takes the place of one that ended."""
    running = deque(islice(streams, OPEN_FILES))
    while running:
        stream = running.popleft()
        document = next(stream, None)
        if document is not None:
            yield document
            running.append(stream)
        else:
            running.extend(islice(streams, 1))


def shuffled(documents: Iterable[Document], generator: np.random.Generator) -> Iterator[Document]:
    """A seeded shuffle through a buffer that is bounded in documents and in characters, so that streams of any size fit."""
    buffer: list[Document] = []
    characters = 0
    for document in documents:
        buffer.append(document)
        characters += document.characters
        while len(buffer) >= BUFFER_DOCUMENTS or characters >= BUFFER_CHARACTERS:
            drawn = _pick(buffer, generator)
            characters -= drawn.characters
            yield drawn
    while buffer:
        yield _pick(buffer, generator)


def _pick(buffer: list[Document], generator: np.random.Generator) -> Document:
    index = int(generator.integers(len(buffer)))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


def cut(tokens: np.ndarray, sequence_length: int) -> tuple[np.ndarray, ...]:
    """Consecutive chunks of at most `sequence_length`; a last one below MINIMUM_TAIL is dropped unless it is the only one."""
    chunks = [tokens[start : start + sequence_length] for start in range(0, len(tokens), sequence_length)]
    if len(chunks) > 1 and len(chunks[-1]) < min(MINIMUM_TAIL, sequence_length):
        chunks.pop()
    return tuple(chunks)


def first_chunks_first(documents: list[Rows], rows: int) -> list[Rows]:
    """At most `rows` chunks over all documents: every first chunk, then second chunks, and so on in drawn order."""
    order = sorted((place, index) for index, document in enumerate(documents) for place in range(len(document.chunks)))
    kept = [0] * len(documents)
    for _, index in order[:rows]:
        kept[index] += 1
    return [Rows(document.source, document.chunks[:count]) for document, count in zip(documents, kept, strict=True) if count]


@dataclass(frozen=True)
class _Held:
    document: Document
    tokens: np.ndarray
    whole: bool


class TextSource:
    """Documents drawn so far, and the stream of the others."""

    def __init__(self, documents: Iterator[Document], encoder: Encoder, sequence_length: int, describe: Callable[[], dict]) -> None:
        self._documents, self._encoder, self._length = documents, encoder, sequence_length
        self._held: list[_Held] = []
        self.describe = describe

    def take(self, rows: int) -> list[Rows]:
        """At most `rows` rows; fewer only when the source has no more. Equal calls give equal rows."""
        while len(self._held) < rows and self._draw():
            pass
        held = self._held[:rows]
        if len(held) < rows:
            held = [self._whole(each, rows) for each in held]
        return first_chunks_first([Rows(each.document.source, cut(each.tokens, self._length)) for each in held], rows)

    def count_tokens(self, at_least: int) -> int:
        """Tokens of the documents drawn, drawing until there are `at_least` so many or no more documents."""
        total = sum(len(each.tokens) for each in self._held)
        while total < at_least and self._draw():
            total += len(self._held[-1].tokens)
        return total

    def _draw(self) -> bool:
        """Hold one more document that has tokens; False at the end."""
        for document in self._documents:
            tokens, whole = self._encoder.encode(document, self._length)
            if len(tokens):
                self._held.append(_Held(document, tokens, whole))
                return True
        return False

    def _whole(self, held: _Held, rows: int) -> _Held:
        """The document with enough tokens for `rows` rows of it."""
        return held if held.whole else _Held(held.document, *self._encoder.encode(held.document, self._length * rows))
