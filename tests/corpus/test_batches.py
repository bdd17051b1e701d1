import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.corpus import Corpus, Sample, plan_batches
from calibrate.errors import UsageError


def corpus_of(rows):
    """A corpus of (length, document) rows with distinguishable tokens."""
    samples = tuple(Sample(np.arange(length, dtype=np.int32) + 1000 * index, document, "x") for index, (length, document) in enumerate(rows))
    return Corpus(samples, max(document for _, document in rows) + 1, "", {})


def test_known_plan():
    # Documents 0..7, so quarters are {0,1} {2,3} {4,5} {6,7}; the last row is a second chunk of document 0.
    corpus = corpus_of([(5, 0), (3, 1), (4, 2), (4, 3), (9, 4), (1, 5), (2, 6), (2, 7), (3, 0)])
    batches = plan_batches(corpus, tokens_per_batch=8, pad_token_id=77)
    assert [(batch.part, batch.samples.tolist(), batch.lengths.tolist()) for batch in batches] == [
        (0, [1, 8], [3, 3]),
        (0, [0], [5]),
        (1, [2, 3], [4, 4]),
        (2, [5], [1]),
        (2, [4], [9]),  # longer than the budget, alone
        (3, [6, 7], [2, 2]),
    ]


def test_pads_on_the_right():
    (batch,) = plan_batches(Corpus(corpus_of([(2, 0), (4, 0)]).samples, 1, "", {}), 100, pad_token_id=77)
    assert batch.input_ids.tolist() == [[0, 1, 77, 77], [1000, 1001, 1002, 1003]]
    assert {array.dtype for array in (batch.input_ids, batch.lengths, batch.samples)} == {np.dtype(np.int64)}


def test_fewer_than_four_documents_leave_quarters_empty():
    assert [batch.part for batch in plan_batches(corpus_of([(2, 0), (2, 1)]), 100, 0)] == [0, 2]


def test_budget_below_one():
    with pytest.raises(UsageError, match="at least 1"):
        plan_batches(corpus_of([(1, 0)]), 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=40),
    budget=st.integers(1, 300),
)
def test_properties(rows, budget):
    corpus = corpus_of(rows)
    batches = plan_batches(corpus, budget, pad_token_id=-1)
    seen = np.concatenate([batch.samples for batch in batches])
    assert sorted(seen.tolist()) == list(range(len(rows)))
    for batch in batches:
        assert batch.input_ids.shape == (len(batch.samples), batch.lengths.max())
        assert len(batch.samples) == 1 or batch.input_ids.size <= budget
        assert {4 * corpus.samples[index].document // corpus.documents for index in batch.samples} == {batch.part}
        for row, length, index in zip(batch.input_ids, batch.lengths, batch.samples, strict=True):
            assert np.array_equal(row[:length], corpus.samples[index].tokens)
            assert (row[length:] == -1).all()
    assert [batch.part for batch in batches] == sorted(batch.part for batch in batches)
    again = plan_batches(corpus, budget, pad_token_id=-1)
    assert all(np.array_equal(one.input_ids, two.input_ids) for one, two in zip(batches, again, strict=True))
