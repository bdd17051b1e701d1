import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.corpus import draw
from calibrate.corpus.draw import cut, first_chunks_first, shuffled, take_turns
from calibrate.corpus.load import apportion, interleave, number
from calibrate.corpus.types import Document, Rows


def lengths(chunks):
    return [len(chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("tokens", "sequence_length", "expected"),
    [
        (100, 40, [40, 40, 20]),
        (95, 40, [40, 40]),  # the tail of 15 is dropped
        (96, 40, [40, 40, 16]),
        (15, 40, [15]),  # short, but all there is
        (40, 40, [40]),
        (21, 10, [10, 10]),
        (20, 10, [10, 10]),  # a full chunk is no tail, however short
    ],
)
def test_cut(tokens, sequence_length, expected):
    chunks = cut(np.arange(tokens), sequence_length)
    assert lengths(chunks) == expected
    assert np.array_equal(np.concatenate(chunks), np.arange(sum(expected)))


def rows(*counts):
    return [Rows(f"d{index}", tuple(np.array([index, chunk]) for chunk in range(count))) for index, count in enumerate(counts)]


def test_first_chunks_first():
    # 3+1+2 chunks, 5 wanted: every first, both seconds, and of the thirds none is left to take
    assert [len(document.chunks) for document in first_chunks_first(rows(3, 1, 2), 5)] == [2, 1, 2]
    assert [len(document.chunks) for document in first_chunks_first(rows(3, 1, 2), 4)] == [2, 1, 1]
    assert [document.source for document in first_chunks_first(rows(3, 1, 2), 2)] == ["d0", "d1"]


def test_numbering():
    samples = number(rows(2, 1, 3))
    assert [(sample.document, sample.tokens.tolist()) for sample in samples] == [
        (0, [0, 0]),
        (1, [1, 0]),
        (2, [2, 0]),
        (0, [0, 1]),
        (2, [2, 1]),
        (2, [2, 2]),
    ]


def test_interleaving_mixes_sources_and_keeps_one():
    one, two = rows(*[1] * 40), [Rows("other", (np.array([9]),))] * 40
    assert interleave([one], 0) == one
    mixed = interleave([one, two], 0)
    assert mixed == interleave([one, two], 0)
    assert mixed != interleave([one, two], 1)
    for quarter in range(4):
        assert {document.source == "other" for document in mixed[20 * quarter : 20 * quarter + 20]} == {True, False}


def documents(count, size=1):
    return [Document(str(index), text="x" * size) for index in range(count)]


def test_shuffle_is_a_seeded_permutation():
    def order(seed):
        return [document.source for document in shuffled(documents(50), np.random.Generator(np.random.PCG64(seed)))]

    assert sorted(order(0), key=int) == [str(index) for index in range(50)]
    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize(("name", "limit", "size"), [("BUFFER_DOCUMENTS", 10, 1), ("BUFFER_CHARACTERS", 50, 5)])
def test_shuffle_reads_no_further_than_its_buffer(monkeypatch, name, limit, size):
    monkeypatch.setattr(draw, name, limit)
    source = iter(documents(100, size))
    next(shuffled(source, np.random.Generator(np.random.PCG64(0))))
    assert next(source).source == "10"


def named(name, count):
    return iter([Document(f"{name}{number}", text="x") for number in range(count)])


def test_files_take_turns():
    streams = (named(name, count) for name, count in (("a", 3), ("b", 1), ("c", 2)))
    assert [document.source for document in take_turns(streams)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_more_files_than_are_open(monkeypatch):
    monkeypatch.setattr(draw, "OPEN_FILES", 2)
    streams = (named(name, 2) for name in "abc")
    assert [document.source for document in take_turns(streams)] == ["a0", "b0", "a1", "b1", "c0", "c1"]


def test_apportion_known():
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(64, [0.7, 0.3]) == [45, 19]  # 44.8, 19.2
    assert apportion(1, [0.1, 0.9]) == [0, 1]
    assert apportion(7, [2, 1]) == [5, 2]  # 4.67, 2.33


@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_apportion_properties(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * weight / sum(weights)) < 1 + 1e-6 for share, weight in zip(shares, weights, strict=True))
