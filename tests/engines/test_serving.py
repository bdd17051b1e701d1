"""Layers left in 16 bits, from the command line to both engines; what serve.json may say; and read-backs that contradict the checkpoint."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from calibrate.artefact import SERVE_FILE
from calibrate.checkpoint import write_checkpoint
from calibrate.cli import main
from calibrate.collect import collect
from calibrate.engines import unlisted
from calibrate.engines.serving import Serving, misplaced, other_heads, serving
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.errors import UsageError
from calibrate.evaluate.kvformats import SIXTEEN_BIT
from calibrate.evaluate.planning import model_memory, sequence_bytes
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, Scales, solve
from tests.conftest import collect_run, rows_corpus
from tests.engines.architectures import vision_language_checkpoint
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny llama of three layers."""
    return tiny_checkpoint(tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture(scope="module")
def skipping(plain, tmp_path_factory):
    """Its layer 1 in 16 bits."""
    scales = solve(collect(collect_run(plain, rows_corpus([40, 33, 17]))), PolicyOptions())
    return write_checkpoint(SourceCheckpoint.open(plain), scales, tmp_path_factory.mktemp("skip") / "skipping", skip_layers=(1,))


def test_what_is_written_says_how_to_serve_it(skipping):
    assert skipping.serve == {"kv_cache_dtype_skip_layers": [1]}
    assert json.loads((skipping.path / SERVE_FILE).read_text()) == {"schema": "kv-calibrate/serve/1", "vllm": skipping.serve}
    assert "`vllm serve <this folder> --kv-cache-dtype-skip-layers 1`" in (skipping.path / "README.md").read_text()
    provenance = json.loads((skipping.path / "kv_calibration" / "provenance.json").read_text())
    assert provenance["serve"] == skipping.serve
    assert SERVE_FILE in provenance["files"]
    assert len(skipping.tensors) == 9  # scales for all layers all the same
    assert serving(skipping.path).arguments() == {"kv_cache_dtype_skip_layers": ["1"]}


def test_the_command_writes_and_refuses(skipping, plain, tmp_path):
    kept = skipping.path / "kv_calibration" / "scales.safetensors"
    said = CliRunner().invoke(main, ["write", str(kept), "--model", str(plain), "-o", str(tmp_path / "out"), "--skip-layers", "0,2"])
    assert said.exit_code == 0, said.output
    assert "--kv-cache-dtype-skip-layers 0 2" in " ".join(said.stdout.split())
    for asked, line in (("9", "names layer 9"), ("sliding_window", "has a sliding window"), ("x", "give layer indices")):
        refused = CliRunner().invoke(main, ["write", str(kept), "--model", str(plain), "-o", str(tmp_path / "never"), "--skip-layers", asked])
        assert refused.exit_code == 2
        assert line in " ".join(refused.stderr.split())
    assert not (tmp_path / "never").exists()


def test_the_run_refuses_before_it_calibrates(plain, tmp_path):
    words = ["run", str(plain), "-o", str(tmp_path / "never"), "--data", "random", "--samples", "4", "--sequence-length", "16", "--no-verify"]
    refused = CliRunner().invoke(main, [*words, "--skip-layers", "9"])
    assert refused.exit_code == 2
    assert "names layer 9" in " ".join(refused.stderr.split())
    assert not list(tmp_path.iterdir())


def test_the_emulated_cache_leaves_the_layer_alone(skipping):
    """K and V of layer 1 are rounded to bf16 alone and its Q is untouched; without the serve file it is quantized, and the scores move."""
    engine = TransformersEngine(SourceCheckpoint.open(skipping.path))
    scales = Scales.load(skipping.path / "kv_calibration" / "scales.safetensors")
    with engine.session(Variant("calibrated", scales)) as session:
        quantizer = session._quantizer
        values = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(0)) * 3
        wide = values.to(torch.bfloat16).float()
        assert torch.equal(quantizer(1, "k", values), wide)
        assert torch.equal(quantizer(1, "q", values), values)
        assert not torch.equal(quantizer(0, "k", values), wide)
        assert session.info().kv_cache_dtype == "fp8_e4m3, 16 bits in layers 1"
        some = session.score([[5, 6, 7, 8, 9, 10, 11, 12]])[0].logprob
    (skipping.path / SERVE_FILE).rename(skipping.path / "kv_calibration" / "aside")
    try:
        with engine.session(Variant("calibrated", scales)) as session:
            assert session.info().kv_cache_dtype == "fp8_e4m3"
            assert not np.array_equal(session.score([[5, 6, 7, 8, 9, 10, 11, 12]])[0].logprob, some)
    finally:
        (skipping.path / "kv_calibration" / "aside").rename(skipping.path / SERVE_FILE)


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_vllm_keeps_the_layer_in_16_bits_and_runs(skipping, tmp_path):
    scales = Scales.load(skipping.path / "kv_calibration" / "scales.safetensors")
    engine = VllmEngine(source=SourceCheckpoint.open(skipping.path), folder=tmp_path, overlay=lambda variant, place: skipping.path, max_model_len=64)
    with engine.session(Variant("calibrated", scales)) as session:
        assert session.info().kv_cache_dtype == "fp8_e4m3, 16 bits in layers 1"
        assert len(session.generate([[5, 6, 7]], 3, [])[0]) == 3


def test_plan_counts_the_layers_that_stay_wide(skipping, plain):
    told, whole, asked = model_memory(skipping.path), model_memory(plain), model_memory(plain, skip_layers=(1,))
    assert told.sixteen_bit == asked.sixteen_bit == (1,)
    sixteen, eight = (sequence_bytes(whole, name, 64) for name in (SIXTEEN_BIT, "fp8"))
    assert sequence_bytes(told, "fp8", 64) == pytest.approx(eight + (sixteen - eight) / 3)
    assert model_memory(skipping.path, skip_layers=()).sixteen_bit == ()
    with pytest.raises(UsageError, match="names layer 7"):
        model_memory(plain, skip_layers=(7,))


def test_plan_knows_vision_language_models(tmp_path):
    memory = model_memory(vision_language_checkpoint(tmp_path / "vlm", "qwen2_5_vl"))
    assert len(memory.layers) == 2


@pytest.mark.parametrize(
    "said", [[], {}, {"vllm": {"kv_cache_dtype_skip_layers": ["1"]}}, {"vllm": {"trust_remote_code": True}}, {"vllm": {"model_impl": "x"}}]
)
def test_a_damaged_serve_file_is_one_line(tmp_path, said):
    (tmp_path / "kv_calibration").mkdir()
    (tmp_path / SERVE_FILE).write_text(json.dumps(said))
    with pytest.raises(UsageError, match=r"serve\.json is damaged"):
        serving(tmp_path)


def _record(module: str, **facts) -> dict:
    return {"module": module, "caches": True, "kv_cache_dtype": "fp8", "num_kv_heads": 2} | facts


def test_a_layer_in_the_wrong_type_is_a_contradiction():
    told = Serving(kv_cache_dtype_skip_layers=(1,))
    good = [[_record("model.layers.0.attn"), _record("model.layers.1.attn", kv_cache_dtype="auto")]]
    assert misplaced(good, told, "fp8") == ""
    assert "layers.1.attn keeps a cache of type auto, it is to keep FP8" in misplaced(good, Serving(), "fp8")
    assert "layers.0.attn keeps a cache of type fp8, it is to keep 16 bits" in misplaced(good, Serving(kv_cache_dtype_skip_layers=(0, 1)), "fp8")


def test_another_number_of_heads_is_a_contradiction():
    layers = [{"index": 0, "num_key_value_heads": 2}]
    assert other_heads([[_record("layers.0.attn")]], layers) == ""
    assert other_heads([[_record("layers.0.attn", num_kv_heads=1)]] * 2, layers) == ""
    assert other_heads([[_record("layers.0.attn", num_kv_heads=1)]] * 4, layers) == ""  # replicated
    assert "caches 4 KV heads, 2 were observed" in other_heads([[_record("layers.0.attn", num_kv_heads=4)]], layers)


def test_scales_per_head_need_layers_of_equal_heads(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", "gemma4_text", num_global_key_value_heads=1, attention_k_eq_v=True)
    words = ["run", str(source), "-o", str(tmp_path / "out"), "--data", "random", "--samples", "4", "--sequence-length", "14", "--no-verify"]
    refused = CliRunner().invoke(main, [*words, "--granularity", "head"])
    assert refused.exit_code == 2
    assert "only where all layers have as many heads; this model's have 1 (4 query heads), 2 (4 query heads)" in " ".join(refused.stderr.split())
    done = CliRunner().invoke(main, [*words, "--granularity", "tensor"])
    assert done.exit_code == 0, done.output


@pytest.mark.vllm
def test_architectures_that_vllm_does_not_list_are_told():
    assert unlisted({"architectures": ["LlamaForCausalLM"]}) == ""
    assert "lists no CodeGenForCausalLM" in unlisted({"architectures": ["CodeGenForCausalLM"]})
    assert "lists no MptForCausalLM" in unlisted({"architectures": ["MptForCausalLM"]})  # until vLLM 0.28
