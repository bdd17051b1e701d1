"""Tables of measured policies: sums of documents in, paired differences out."""

import json

import numpy as np
import pytest

from benchmarks.quality.run import sums_of
from benchmarks.quality.scoring import Reference, Scores
from benchmarks.quality.table import joined, table

DOCUMENTS, TOKENS = 6, 50


def row(factor: float, shift: float = 0.0) -> dict:
    base = np.linspace(4, 6, DOCUMENTS)
    columns = {"tokens": [TOKENS] * DOCUMENTS, "nll": (100 + base * shift).tolist(), "abs_delta_logprob": (factor * base).tolist()}
    return {"prediction": "expected", "texts": {"code": columns | {"kl": (factor * base / 10).tolist(), "top1_agree": [45] * DOCUMENTS}}}


def result(rows: dict) -> dict:
    texts = {"code": {"description": {"digest": "d"}, "tokens": [TOKENS] * DOCUMENTS, "reference_nll": [100.0] * DOCUMENTS}}
    return {"model": "m", "granularity": "tensor", "engine": {"backend": "FLASH_ATTN", "flash": 3}, "texts": texts, "rows": rows}


def test_rows_are_ordered_and_paired():
    lines = table(result({"amax": row(1.0), "mse": row(0.9, 0.1), "broken": {"prediction": "", "error": "ValueError: no"}}), "code", ["amax"])
    assert lines[0].startswith(f"16-bit perplexity {np.exp(2):.4f}, {DOCUMENTS * TOKENS} tokens of {DOCUMENTS} documents")
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["mse", "amax", "broken"]
    assert "**-10.0% (-10.0% to -10.0%)**" in lines[4]
    assert "90.00%" in lines[4]
    assert "+0.0100" in lines[4]
    assert "ValueError: no" in lines[-1]


def test_files_of_one_setting_are_joined_and_others_refused(tmp_path):
    first, second, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    first.write_text(json.dumps(result({"amax": row(1.0)})))
    second.write_text(json.dumps(result({"mse": row(0.9)})))
    (found,) = joined([first, second]).values()
    assert list(found["rows"]) == ["amax", "mse"]
    moved = result({"mse": row(0.9)})
    moved["texts"]["code"]["description"]["digest"] = "e"
    other.write_text(json.dumps(moved))
    with pytest.raises(SystemExit, match="other rows"):
        joined([first, other])


def test_sums_are_taken_over_the_rows_of_each_document():
    lengths = np.array([3, 2, 4])
    ids = np.arange(6, dtype=np.int32)[:, None]
    reference = Reference(lengths, np.full(6, -1.0, np.float32), ids, np.zeros((6, 1), np.float32), np.zeros(6, np.float32))
    logprob = np.float32([-1.5, -1, -2, -1, -1, 0])
    scores = Scores(lengths, logprob, np.arange(6, dtype=np.float32), np.array([0, 1, 2, 9, 4, 5], np.int32))
    sums = sums_of(scores, reference, [7, 3, 7])
    assert sums["tokens"] == [1, 5]  # document 3 is row 1, document 7 rows 0 and 2
    assert sums["nll"] == [2.0, 4.5]
    assert sums["abs_delta_logprob"] == [1.0, 1.5]
    assert sums["kl"] == [2.0, 13.0]
    assert sums["top1_agree"] == [1, 4]
    with pytest.raises(ValueError, match="not finite"):
        sums_of(Scores(lengths, logprob / 0, scores.kl, scores.top1), reference, [7, 3, 7])
