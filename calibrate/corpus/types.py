"""The values that a corpus is made of."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Document:
    """One document before the tokenizer: plain text or a chat, never both."""

    source: str
    text: str | None = None
    messages: tuple[dict, ...] | None = None

    @property
    def characters(self) -> int:
        """Its size, for bounding memory."""
        return len(self.text) if self.text is not None else sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Rows:
    """One document after the tokenizer: `chunks` are its rows, int32 [length] each, in their order in the document."""

    source: str
    chunks: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Sample:
    """One row: a document or a chunk of one.

    tokens: int32 [length], 1 <= length <= sequence_length.
    document: index of its document in the drawn order, over the whole corpus.
    source: where it comes from ("train.jsonl:17"), for messages.
    """

    tokens: np.ndarray
    document: int
    source: str


@dataclass(frozen=True)
class Corpus:
    """Everything that calibration reads.

    documents: how many documents the samples come from; `Sample.document` is below it.
    digest: hex SHA-256 over tokens, lengths and document indices. Equal digests mean equal calibration input.
    description: JSON-able provenance.
    """

    samples: tuple[Sample, ...]
    documents: int
    digest: str
    description: dict


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together; all come from one quarter of the documents.

    input_ids: int64 [rows, length], padded on the right.
    lengths: int64 [rows], true tokens of each row.
    samples: int64 [rows], index of each row's sample in `Corpus.samples`.
    part: 0..3, the quarter.
    """

    input_ids: np.ndarray
    lengths: np.ndarray
    samples: np.ndarray
    part: int
