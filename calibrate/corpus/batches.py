"""Samples → padded batches, little padding, same plan every time."""

import numpy as np

from calibrate.corpus.types import Batch, Corpus, Sample
from calibrate.errors import UsageError

PARTS = 4


def part_of(sample: Sample, documents: int) -> int:
    """Which quarter of the documents, in drawn order, the sample comes from: 0..3."""
    return PARTS * sample.document // documents


def plan_batches(corpus: Corpus, tokens_per_batch: int, pad_token_id: int) -> tuple[Batch, ...]:
    """Cut the corpus into batches of at most `tokens_per_batch` tokens, padding counted.

    Each sample is in exactly one batch; a batch never holds two quarters of the documents. Within a quarter rows go by length, so padding
    is small. A row longer than the budget is a batch of its own.

    Raises:
        UsageError: `tokens_per_batch` is below 1.
    """
    if tokens_per_batch < 1:
        raise UsageError(f"tokens per batch is {tokens_per_batch}: it must be at least 1")
    quarters: list[list[int]] = [[] for _ in range(PARTS)]
    for index, sample in enumerate(corpus.samples):
        quarters[part_of(sample, corpus.documents)].append(index)
    return tuple(_pad(corpus, rows, pad_token_id, part) for part, indices in enumerate(quarters) for rows in _fill(corpus, indices, tokens_per_batch))


def _fill(corpus: Corpus, indices: list[int], budget: int) -> list[list[int]]:
    """Groups of sample indices, shortest rows first (ties by index), each group within the budget or of one row."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda index: (len(corpus.samples[index].tokens), index)):
        width = len(corpus.samples[index].tokens)  # ascending, so this row is its group's longest
        if groups and (len(groups[-1]) + 1) * width <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _pad(corpus: Corpus, rows: list[int], pad_token_id: int, part: int) -> Batch:
    lengths = np.array([len(corpus.samples[index].tokens) for index in rows], dtype=np.int64)
    input_ids = np.full((len(rows), lengths.max()), pad_token_id, dtype=np.int64)  # [rows, length]
    for row, index in enumerate(rows):
        input_ids[row, : lengths[row]] = corpus.samples[index].tokens
    return Batch(input_ids=input_ids, lengths=lengths, samples=np.array(rows, dtype=np.int64), part=part)
