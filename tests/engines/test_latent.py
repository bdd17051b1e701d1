"""Multi-head latent attention: one scale over latent and rotary key, solved from a planted maximum, and where real vLLM holds it."""

import json
import shutil

import numpy as np
import pytest
import torch

from benchmarks.mla_names import FAMILIES, try_names
from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.exports import FORMATS, ExportOptions, open_given
from calibrate.collect import collect
from calibrate.engines import load_scales, verify_checkpoint
from calibrate.errors import HostError, UsageError
from calibrate.families.tiny import tiny_checkpoint, tiny_config
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return SourceCheckpoint.open(tiny_checkpoint(tmp_path_factory.mktemp("mla") / "source", tiny_config("deepseek_v3", FAMILIES["deepseek_v3"])))


@pytest.fixture(scope="module")
def statistics(source):
    return collect(collect_run(source.path, rows_corpus([40, 33, 17])))


def _cached(path, rows) -> dict[int, dict[str, float]]:
    """Largest bf16 magnitudes of latent and rotary key by layer, as a plain DynamicCache of transformers holds them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    largest: dict[int, dict[str, float]] = {}
    for sample in rows.samples:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None], past_key_values=cache, use_cache=True)
        for index, layer in enumerate(cache.layers):
            for kind, tensor in (("k", layer.keys), ("v", layer.values)):
                row = largest.setdefault(index, {})
                row[kind] = max(row.get(kind, 0.0), float(tensor.to(torch.bfloat16).abs().max()))
    return largest


def test_the_scale_is_that_of_the_larger_of_latent_and_rope(source, statistics):
    scales = solve(statistics, PolicyOptions(policy="amax", margin=1.0))
    cached = _cached(source.path, rows_corpus([40, 33, 17]))
    assert all(row["k"] != row["v"] for row in cached.values()), "parts that are alike prove nothing"
    for layer in scales.layers:
        np.testing.assert_allclose(layer.k, max(cached[layer.index].values()) / 448, rtol=2**-23)  # the last bit of a float32
        np.testing.assert_array_equal(layer.v, layer.k)


@pytest.mark.parametrize(("part", "factor"), [("latent", 64.0), ("rope", 4096.0)])
def test_a_planted_maximum_is_found_whichever_part_holds_it(tmp_path, part, factor):
    """The latent's norm, or the rotary rows of the projection, times a power of two: the scale must follow by just that."""
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint(tmp_path / part, tiny_config("deepseek_v3", FAMILIES["deepseek_v3"]))
    before = solve(collect(collect_run(path, rows_corpus([30]))), PolicyOptions(policy="amax", margin=1.0))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn." + ("kv_a_layernorm.weight" if part == "latent" else "kv_a_proj_with_mqa.weight")
    tensors[name][0 if part == "latent" else FAMILIES["deepseek_v3"]["kv_lora_rank"] :] *= factor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    after = collect(collect_run(path, rows_corpus([30])))
    solved = solve(after, PolicyOptions(policy="amax", margin=1.0)).layers[0]
    seen = after.layers[0]["k" if part == "latent" else "v"]
    amax = float(after.values()[seen.counts.any(axis=0)].max())
    np.testing.assert_array_equal(solved.k, np.float32(amax / 448))
    np.testing.assert_array_equal(solved.v, solved.k)
    assert solved.k[0] > 4 * before.layers[0].k[0]


def test_run_and_write_refuse_by_name_and_say_what_works(source, statistics, tmp_path):
    scales = solve(statistics, PolicyOptions())
    line = r"deepseek_v3 uses multi-head latent attention.*`export --format modelopt` writes what its Transformers backend loads"
    with pytest.raises(UsageError, match=line):
        write_checkpoint(source, scales, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_vllm_holds_what_export_wrote(source, statistics, tmp_path):
    scales = solve(statistics, PolicyOptions())
    exported = FORMATS["modelopt"].export(open_given(source, scales, statistics), tmp_path / "modelopt", ExportOptions(), force=False)
    assert "--model-impl transformers" in exported.notes[0]
    assert json.loads((exported.path / "kv_calibration" / "serve.json").read_text())["vllm"] == {"model_impl": "transformers"}
    untold = shutil.copytree(exported.path, tmp_path / "untold")
    (untold / "kv_calibration" / "serve.json").unlink()  # vLLM's own model code, as it would be without being told
    readback, dropped = load_scales([exported.path, untold])
    assert readback.ok, (readback.error, readback.failures)
    assert len(readback.rows) == 2 * len(scales.layers)
    with pytest.raises(HostError, match="CPU backend runs no FP8 cache of multi-head latent attention"):
        verify_checkpoint(exported.path)
    assert {row.reason for row in dropped.failures} == {"not loaded (stayed 1.0)"}
    assert len(dropped.failures) == len(dropped.rows)


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_vllms_own_model_code_still_takes_no_name(tmp_path):
    """It fails on the day that vLLM's own code holds scales of latent attention: then `write` can write them, and no backend need be named."""
    names = ("{m}.k_scale", "{m}.k_proj.k_scale", "{m}.mla_attn.mla_attn.k_scale", "{m}.attn.k_scale")
    trials = try_names(["deepseek_v3"], ["compressed-tensors", "modelopt"], ["auto"], names, tmp_path)
    assert len(trials) == 8
    assert {trial.outcome for trial in trials} == {"dropped"}
