"""Which layers keep 16 bits: known layouts, readers of another's cache, and what is refused in one line."""

import pytest

from calibrate.errors import UsageError
from calibrate.model import probe_layout
from calibrate.model.skip import parse_skip_layers, skipped_layers
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def shared():
    """gemma3n: layers 0 to 5, even ones sliding; 4 reads layer 2's cache and 5 layer 3's."""
    return probe_layout(tiny_model("gemma3n_text")).as_dict()["layers"]


@pytest.fixture(scope="module")
def plain():
    return probe_layout(tiny_model("llama")).as_dict()["layers"]


@pytest.mark.parametrize(
    ("asked", "skipped"),
    [
        ((), ()),
        ((0,), (0,)),
        ((1, 0), (0, 1)),
        ((2,), (2, 4)),
        ((4,), (2, 4)),
        (("sliding_window",), (0, 2, 4)),
        (("sliding_window", 5), (0, 2, 3, 4, 5)),
    ],
)
def test_a_reader_goes_with_the_layer_whose_cache_it_reads(shared, asked, skipped):
    assert [layer["target"] for layer in shared] == [0, 1, 2, 3, 2, 3]
    assert skipped_layers(shared, asked) == skipped


def test_what_a_user_writes():
    assert parse_skip_layers("0, 11,sliding_window") == (0, 11, "sliding_window")
    assert parse_skip_layers("none") == ()
    for text in ("", "first", "-1", "1;2", "none,1", "²", "9" * 5000):
        with pytest.raises(UsageError, match=r"--skip-layers .*: give layer indices and sliding_window, as 0,1,sliding_window, or none"):
            parse_skip_layers(text)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((7,), r"names layer 7, but the model's attention layers are 0–2"),
        (("sliding_window",), r"none of the model's 3 attention layers has a sliding window: give --skip-layers none"),
        ((0, 1, 2), r"names all 3 attention layers: nothing would be left in FP8"),
    ],
)
def test_what_the_model_lacks_is_one_clear_line(plain, asked, line):
    with pytest.raises(UsageError, match=line):
        skipped_layers(plain, asked)


def test_a_hybrid_names_the_layers_that_it_has():
    layers = probe_layout(tiny_model("nemotron_h")).as_dict()["layers"]
    indices = [layer["index"] for layer in layers]
    assert skipped_layers(layers, indices[:1]) == (indices[0],)
    with pytest.raises(UsageError, match=f"names layer 0, but the model's attention layers are {', '.join(map(str, indices))}"):
        skipped_layers(layers, (0,))
