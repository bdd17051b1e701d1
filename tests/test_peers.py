"""llm-compressor as a check of our amax: the documented script on a tiny model, with ranges that are known beforehand."""

import sys

import numpy as np
import pytest
import torch

from benchmarks.peers.llmcompressor_amax import Row, Run, compared, measure, our_ranges, padded, their_ranges
from calibrate.errors import CheckFailed, HostError
from calibrate.model import SourceCheckpoint
from calibrate.weights.process import SETTING, find_python
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

PAD, LOUD = 0, 5
BATCHES, LENGTH = 8, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny float32 llama in which two tokens use a channel that K of the first layer hears loudest: padding almost nothing else, LOUD a little."""
    path = tmp_path_factory.mktemp("peers") / "llama"
    network = tiny_model("llama")
    with torch.no_grad():
        embedding, key = network.model.embed_tokens.weight, network.model.layers[0].self_attn.k_proj.weight
        embedding[:, 0] = 0
        key[:, 0] = key.abs().max()
        embedding[LOUD, 0] = 0.35 * embedding[LOUD].norm()
        embedding[PAD, 0] = 1.0  # the rest of its row is zero
        key[:, 0] *= 12
    network.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows():
    """Random rows without the two tokens, but for one LOUD in the first: after it, a moving average forgets."""
    rng = np.random.default_rng(0)
    drawn = [rng.integers(8, VOCAB, LENGTH).astype(np.int32) for _ in range(BATCHES)]
    drawn[0][3] = LOUD
    return drawn


@pytest.fixture(scope="module")
def measured(model, rows) -> dict[tuple[str, str], Row]:
    try:
        find_python()
    except HostError as error:
        pytest.skip(str(error))
    found, versions = measure(model, rows, pad=PAD, batch_size=4, dtypes=("float32",))
    assert versions["llmcompressor"] == "0.14.0.1"
    return {(row.case, row.observer): row for row in found}


@pytest.mark.llmcompressor
def test_static_minmax_is_our_amax_rounded_to_bfloat16(measured):
    row = measured["whole rows", "static_minmax"]
    assert row.of == 6
    assert row.equal >= 5  # float32 forwards of two programs: a value on a rounding boundary may fall on either side
    assert row.steps <= 1
    assert 1 - 2**-8 <= row.least <= row.most <= 1 + 2**-8


@pytest.mark.llmcompressor
def test_its_defaults_forget_the_loud_token(measured):
    """The average starts at the first batch and takes a hundredth of each later one: below the maximum everywhere. The last batch never heard it."""
    average, last = measured["whole rows", "default"], measured["whole rows", "memoryless_minmax"]
    assert last.least < 0.5
    assert 0.5 < average.least < 0.95
    assert average.most < 1 - 2**-8
    assert average.equal == 0


@pytest.mark.llmcompressor
def test_it_counts_padding_and_we_do_not(measured):
    assert measured["right-padded, 4 rows", "static_minmax"].most > 2


def test_our_amax_does_not_see_padding(model, rows):
    source = SourceCheckpoint.open(model)
    cut = [row[: 6 + 2 * number] for number, row in enumerate(rows)]
    alone, together = our_ranges(source, cut, padded(cut, 1, PAD), "float32"), our_ranges(source, cut, padded(cut, 4, PAD), "float32")
    loud = our_ranges(source, [np.append(row, PAD) for row in cut], padded([np.append(row, PAD) for row in cut], 1, PAD), "float32")
    for name, of in alone.items():
        assert together[name] == pytest.approx(of, rel=2**-7)  # matmuls of other shapes round differently
    assert loud["model.layers.0.self_attn"]["k"] > 2 * alone["model.layers.0.self_attn"]["k"]  # the control: as text it counts


def test_a_comparison_over_other_layers_is_refused():
    ours = {"a": {"k": 1.0, "v": 2.0}}
    row = compared("case", None, "float32", ours, {"a": {"k": 1.0, "v": 2.0 * (1 + 2**-7)}})
    assert (row.equal, row.of, row.steps, row.observer) == (1, 2, 1, "default")
    with pytest.raises(CheckFailed, match="the peer calibrated"):
        compared("case", None, "float32", ours, {"b": {"k": 1.0, "v": 2.0}})


def test_where_llmcompressor_fails_its_last_line_is_quoted(model, rows, monkeypatch):
    monkeypatch.setenv(SETTING, sys.executable)  # an environment without llmcompressor
    with pytest.raises(CheckFailed, match=r"llmcompressor_child could not calibrate .*PackageNotFoundError: .*llmcompressor$") as caught:
        their_ranges(model, [Run(None, "float32", padded(rows, 4, PAD))])
    assert "\n" not in str(caught.value)
