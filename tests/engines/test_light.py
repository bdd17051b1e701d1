"""vLLM's real weight loader on good and broken checkpoints, all in one child. What vLLM takes silently must fail here."""

import numpy as np
import pytest

from calibrate.engines import load_scales

from .tiny import calibrated, rewrite_scales, scales_for

pytestmark = pytest.mark.vllm

LAYER = "model.layers.1.self_attn"


def without_layer(folder, scales):
    rewrite_scales(folder, {name: value for name, value in scales.items() if not name.startswith(LAYER)})


def with_value(value):
    def spoil(folder, scales):
        rewrite_scales(folder, scales | {f"{LAYER}.k_scale": np.array([value], np.float32)})

    return spoil


# name: (what happens to the finished file, whether the original scales or the file are the truth, reason, number of failing rows)
DEFECTS = {
    "layer removed": (without_layer, "original", "not loaded (stayed 1.0)", 3),
    "layer removed, the file as truth": (without_layer, "file", "vLLM layer without scales in the file", 3),
    "wrong": (with_value(0.25), "original", "differs", 1),
    "one bit off": (lambda folder, scales: with_value(np.nextafter(scales[f"{LAYER}.k_scale"][0], 9))(folder, scales), "original", "differs", 1),
    "NaN": (with_value(np.nan), "original", "not finite in the engine", 1),
    "NaN, the file as truth": (with_value(np.nan), "file", "not finite in the file", 1),
    "zero": (with_value(0.0), "original", "not positive in the engine", 1),
    "zero, the file as truth": (with_value(0.0), "file", "not positive in the file", 1),
}


@pytest.fixture(scope="module")
def readbacks(llama, tmp_path_factory):
    """Every checkpoint of this module, loaded in one child: name → Readback."""
    root = tmp_path_factory.mktemp("light")
    tensor, head = scales_for("tensor"), scales_for("attn_head")
    jobs = {
        "per tensor": (calibrated(llama, root / "tensor", tensor, "tensor"), None),
        "per head": (calibrated(llama, root / "head", head, "attn_head"), None),
        "unlisted": (calibrated(llama, root / "unlisted", tensor, "tensor", listed=False), None),
        "unknown": (calibrated(llama, root / "unknown", tensor | {"model.layers.9.self_attn.k_scale": np.ones(1, np.float32)}, "tensor"), None),
    }
    for number, (name, (spoil, truth, _, _)) in enumerate(DEFECTS.items()):
        folder = calibrated(llama, root / f"defect{number}", tensor, "tensor")
        spoil(folder, tensor)
        jobs[name] = (folder, tensor if truth == "original" else None)
    folders, truths = zip(*jobs.values(), strict=True)
    return dict(zip(jobs, load_scales(folders, expected=truths), strict=True))


@pytest.mark.parametrize("name", ["per tensor", "per head"])
def test_good_checkpoints_read_back_exactly(readbacks, name):
    readback = readbacks[name]
    assert readback.ok, readback.error or readback.failures
    assert len(readback.rows) == 9
    assert {len(row.loaded) for row in readback.rows} == {1 if name == "per tensor" else 2}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_fails_and_names_its_layer(readbacks, name):
    _, _, reason, count = DEFECTS[name]
    readback = readbacks[name]
    assert readback.error == ""  # vLLM itself saw nothing wrong
    assert [(row.layer.removesuffix(".attn"), row.reason) for row in readback.failures] == [(LAYER, reason)] * count


def test_shard_that_the_index_does_not_list_fails(readbacks):
    readback = readbacks["unlisted"]
    assert readback.error == ""
    assert {row.reason for row in readback.failures} == {"not loaded (stayed 1.0)"}
    assert len(readback.failures) == 9


def test_layer_that_vllm_does_not_have_is_its_refusal(readbacks):
    assert not readbacks["unknown"].ok
    assert readbacks["unknown"].error
