"""Checkpoints that `write` made of many architectures: real vLLM, one child for all, finds every scale under the name that was chosen."""

import importlib.util
import json
import os

import pytest

from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.write import Written
from calibrate.collect import collect
from calibrate.engines import Readback, load_scales, verify_checkpoint
from calibrate.families.tiny import tiny_checkpoint as save_tiny
from calibrate.families.tiny import tiny_config
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, Scales, solve
from tests.conftest import collect_run, rows_corpus
from tests.engines.architectures import MIXED, NEED_TORCHVISION, VISION_LANGUAGE, vision_language_checkpoint
from tests.tiny import tiny_checkpoint

# model type → the tensor of layer 1 (of an attention layer in hybrids) that vLLM must find
TEXT = {
    "llama": "model.layers.1.self_attn.k_scale",
    "qwen2": "model.layers.1.self_attn.k_scale",
    "qwen3": "model.layers.1.self_attn.k_scale",
    "qwen3_moe": "model.layers.1.self_attn.k_scale",
    "mistral": "model.layers.1.self_attn.k_scale",
    "mixtral": "model.layers.1.self_attn.k_scale",
    "gemma2": "model.layers.1.self_attn.k_scale",
    "gemma3_text": "model.layers.1.self_attn.k_scale",
    "gemma3n_text": "model.layers.5.self_attn.k_scale",  # a reader of layer 3's cache
    "gemma4_text": "model.layers.5.self_attn.k_scale",  # the same, with heads of another size than its sliding layers'
    "phi3": "model.layers.1.self_attn.k_scale",
    "gpt2": "transformer.h.1.attn.attn.k_scale",
    "gptj": "transformer.h.1.attn.attn.k_scale",
    "gpt_neox": "gpt_neox.layers.1.attention.k_scale",
    "opt": "model.decoder.layers.1.self_attn.k_scale",
    "falcon": "transformer.h.1.self_attention.k_scale",
    "gpt_oss": "model.layers.1.self_attn.k_scale",
    "qwen3_next": "model.layers.3.self_attn.k_scale",
    "nemotron_h": "backbone.layers.1.mixer.k_scale",
    "falcon_h1": "model.layers.1.self_attn.k_scale",
    "granitemoehybrid": "model.layers.1.self_attn.k_scale",
    "cohere2": "model.layers.1.self_attn.k_scale",
    "granite": "model.layers.1.self_attn.k_scale",
    "olmo2": "model.layers.1.self_attn.k_scale",
    "exaone4": "model.layers.1.self_attn.k_scale",
    "glm4": "model.layers.1.self_attn.k_scale",
    "stablelm": "model.layers.1.self_attn.k_scale",
    "starcoder2": "model.layers.1.self_attn.k_scale",
}
PER_HEAD = (
    "llama",
    "qwen3",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "phi3",
    "gpt2",
    "falcon",
    "gpt_oss",
    "qwen3_next",
    "nemotron_h",
    "mixtral",
)
SKIPPED = "gemma3n_text, sliding layers in 16 bits"
TORCHVISION = importlib.util.find_spec("torchvision") is not None
NAMES = [*TEXT, *(f"{name}, per head" for name in PER_HEAD), *VISION_LANGUAGE, *MIXED, SKIPPED]


def _written(folder, name: str) -> Written:
    model_type, _, what = name.partition(", ")
    source = folder / f"{name}-source"
    if model_type in VISION_LANGUAGE:
        vision_language_checkpoint(source, model_type)
    elif model_type in MIXED:
        save_tiny(source, tiny_config(model_type, MIXED[model_type]))
    else:
        tiny_checkpoint(source, model_type)
    statistics = collect(collect_run(source, rows_corpus([14, 15], vocab=240)))
    scales = solve(statistics, PolicyOptions(granularity="head" if what == "per head" else "tensor"))
    skip = ("sliding_window",) if name == SKIPPED else ()
    return write_checkpoint(SourceCheckpoint.open(source), scales, folder / name, skip_layers=skip)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Written]:
    folder = tmp_path_factory.mktemp("architectures")
    return {name: _written(folder, name) for name in NAMES}


@pytest.fixture(scope="module")
def readbacks(written) -> dict[str, Readback]:
    loadable = [name for name in NAMES if TORCHVISION or name not in NEED_TORCHVISION]
    return dict(zip(loadable, load_scales([written[name].path for name in loadable]), strict=True))


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_vllm_holds_every_scale_that_was_written(written, readbacks, name):
    if name not in readbacks:
        pytest.skip("vLLM's model file needs torchvision, which is not installed here")
    tensors, readback = written[name].tensors, readbacks[name]
    assert readback.ok, (readback.error, readback.failures[:3])
    assert len(readback.rows) == len(tensors)
    assert len({float(scale.max()) for scale in tensors.values()}) > len(tensors) // 3, "scales that are all alike prove nothing"


@pytest.mark.parametrize("name", TEXT)
def test_the_name_is_the_one_that_vllm_looks_up(written, name):
    assert TEXT[name] in written[name].tensors


def test_heads_and_sizes_that_differ_are_seen_as_they_are(written):
    kept = Scales.load(written["mimo_v2_flash"].path / "kv_calibration" / "scales.safetensors")
    shapes = [(one["num_key_value_heads"], one["head_dim"], one["value_head_dim"], one["sliding_window"]) for one in kept.layout["layers"]]
    assert shapes == [(1, 64, 32, None), (2, 64, 32, 16)] * 2


def test_a_reader_gets_its_targets_scales(written):
    for name in ("gemma3n_text", "gemma4_text", "gemma3n_text, per head"):
        tensors = written[name].tensors
        for reader, target in ((4, 2), (5, 3)):
            for kind in "kv":
                name_of = "model.layers.{}.self_attn.{}_scale".format
                assert (tensors[name_of(reader, kind)] == tensors[name_of(target, kind)]).all()
            assert (tensors[name_of(reader, "q")] != tensors[name_of(target, "q")]).any()


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_towers_are_neither_observed_nor_touched(written, name):
    one = written[name]
    layers = json.loads((one.path / "config.json").read_text())["text_config"]["num_hidden_layers"]
    assert len(one.tensors) == 3 * layers
    assert not [tensor for tensor in one.tensors if "vision" in tensor or "visual" in tensor or "audio" in tensor]
    source = one.path.with_name(f"{name}-source")
    weights = {path.stat().st_ino for path in source.glob("*.safetensors")}
    assert weights
    assert {path.stat().st_ino for path in one.path.glob("model-*.safetensors")} == weights  # links: not one byte of a tower was written
    assert os.stat(next(iter(one.path.glob("model-*.safetensors")))).st_nlink == 2


@pytest.mark.vllm
def test_skipped_layers_keep_16_bits_and_hold_their_scales_all_the_same(written, readbacks):
    assert written[SKIPPED].serve == {"kv_cache_dtype_skip_layers": [0, 2, 4]}
    assert len(readbacks[SKIPPED].rows) == 18
    assert readbacks[SKIPPED].ok


@pytest.mark.vllm
@pytest.mark.fp8_cpu
@pytest.mark.parametrize(("name", "note"), [(SKIPPED, "3 layers keep another cache dtype than fp8"), ("falcon_h1", "vLLM generated 4 tokens")])
def test_vllm_runs_shared_caches_with_16_bit_layers_and_a_hybrid(written, name, note):
    """The whole engine with an FP8 cache: readers of another's cache, sliding layers in 16 bits; recurrent layers beside attention."""
    readback = verify_checkpoint(written[name].path)
    assert readback.ok, (readback.error, readback.failures[:3])
    assert readback.kv_cache_dtype == "fp8"
    assert any(note in one for one in readback.notes), readback.notes
