"""What lies on disk after a write, and that transformers loads exactly it."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from calibrate.artefact import sha256_file
from calibrate.checkpoint import check_writable
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, Scales, solve
from calibrate.statistics import Statistics
from tests.checkpoint.conftest import add_foreign_scales, read_weights, scales_for, snapshot
from tests.tiny import edit_config, tiny_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("sharded") / "llama", shard="100KB")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tied") / "llama", tie_word_embeddings=True)


@pytest.fixture
def copy(llama, tmp_path):
    """A llama that may be changed."""
    return shutil.copytree(llama, tmp_path / "source")


@pytest.mark.parametrize("kind", ["single", "sharded", "tied", "single with an index"])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_transformers_loads_the_same_weights_and_exactly_these_scales(kind, granularity, request, tmp_path, write, llama_statistics, llama, copy):
    if kind == "single with an index":
        with safe_open(copy / "model.safetensors", framework="np") as file:
            names = list(file.keys())
        (copy / INDEX).write_text(json.dumps({"metadata": {"note": "kept"}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    source = {"single": llama, "single with an index": copy}.get(kind) or request.getfixturevalue(kind)
    scales = scales_for(source, solve(llama_statistics, PolicyOptions(granularity=granularity)))
    written = write(source, tmp_path / "out", scales)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    original = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(name.endswith("q_scale") for name in report["unexpected_keys"])  # transformers has no place for Q's
    got, want = model.state_dict(), original.state_dict()
    assert all(torch.equal(got[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in want.items())
    for layer in scales.layers:
        for kind, solved in layer.items():
            assert np.array_equal(written.tensors[f"{layer.module}.{kind}_scale"], solved)
            if kind != "q":
                # in the model's own type, bf16, which holds every mse scale exactly
                assert got[f"{layer.module}.{kind}_scale"].float().flatten().tolist() == solved.tolist()
    with safe_open(tmp_path / "out" / "kv_scales.safetensors", framework="np") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {k: v.tolist() for k, v in written.tensors.items()}  # noqa: SIM118


def test_a_lone_model_file_is_linked_under_a_shards_name(tmp_path, write, llama):
    write(llama, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert set(index.values()) == {"model-00001-of-00001.safetensors", "kv_scales.safetensors"}


def test_under_its_own_name_transformers_would_not_see_the_scales(tmp_path, write, llama):
    """The reason for the other name: transformers prefers a lone model.safetensors to the index, and misses every scale."""
    write(llama, tmp_path / "out")
    (tmp_path / "out" / "model-00001-of-00001.safetensors").rename(tmp_path / "out" / "model.safetensors")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert any(name.endswith("k_scale") for name in report["missing_keys"])


def test_weights_are_the_same_inodes_and_everything_else_of_the_source_is_there(tmp_path, write, sharded):
    written = write(sharded, tmp_path / "out")
    ours = {"config.json", INDEX, "README.md", "kv_scales.safetensors", "kv_calibration"}
    for path in sharded.iterdir():
        if path.name not in ours:
            assert os.path.samefile(path, tmp_path / "out" / path.name)
    assert written.how == {"link": len([path for path in sharded.iterdir() if path.name not in ours])}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in sharded.iterdir()} | ours


def test_the_index_lists_every_tensor_and_its_true_total(tmp_path, write, sharded):
    write(sharded, tmp_path / "out")
    weights = read_weights(tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert sum(name.endswith("_scale") for name in weights) == 9


def test_only_the_kv_scheme_is_added_to_an_existing_compressed_tensors_config(tmp_path, write, copy):
    existing = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}, "input_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True},
        "version": "0.9",
    }
    edit_config(copy, quantization_config=existing)
    before = json.loads((copy / "config.json").read_text())
    write(copy, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    scheme = after["quantization_config"].pop("kv_cache_scheme")
    assert scheme == {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    del before["quantization_config"]["kv_cache_scheme"]
    assert after == before


def test_a_calibrated_checkpoint_is_calibrated_again(tmp_path, write, copy, llama_statistics, llama_scales):
    (copy / "README.md").write_bytes(b"---\nlicense: mit\n---\r\n# A card\r\nwith other line ends | and text")
    write(copy, tmp_path / "first")
    other = scales_for(tmp_path / "first", solve(llama_statistics, PolicyOptions(policy="amax", margin=2.0)))
    assert other.provenance[0]["model"] == scales_for(copy, llama_scales).provenance[0]["model"]  # the weights are the same ones
    written = write(tmp_path / "first", tmp_path / "second", other)
    got = read_weights(tmp_path / "second")
    assert all(np.array_equal(got[name].numpy(), array) for name, array in written.tensors.items())
    assert sum(name.endswith("_scale") for name in got) == 9
    card = (tmp_path / "second" / "README.md").read_bytes().decode()
    assert card.startswith("---\nlicense: mit\n---\r\n# A card\r\nwith other line ends | and text\n\n<!-- kv-calibrate:begin -->")
    assert card.count("kv-calibrate:begin") == card.count("## FP8 KV cache") == 1
    assert "amax, margin 2" in card
    assert os.path.samefile(copy / "model.safetensors", tmp_path / "second" / "model-00001-of-00001.safetensors")
    assert Scales.load(tmp_path / "second" / "kv_calibration" / "scales.safetensors").options.policy == "amax"


def test_another_tools_scales_inside_a_shard_are_taken_out_and_all_other_tensors_stay(tmp_path, write, copy):
    plain = SourceCheckpoint.open(copy).fingerprint
    names = add_foreign_scales(copy)
    assert SourceCheckpoint.open(copy).fingerprint == plain  # scales are no weights
    written = write(copy, tmp_path / "out")
    assert written.how["copy"] == 1
    with (
        safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", framework="pt") as new,
        safe_open(copy / "model.safetensors", framework="pt") as old,
    ):
        assert set(new.keys()) == set(old.keys()) - set(names)
        assert all(torch.equal(new.get_tensor(name).view(torch.int16), old.get_tensor(name).view(torch.int16)) for name in new.keys())  # noqa: SIM118
        assert new.metadata() == old.metadata()
    assert all(np.array_equal(read_weights(tmp_path / "out")[name].numpy(), array) for name, array in written.tensors.items())


def test_the_same_input_gives_the_same_bytes(tmp_path, write, llama, llama_statistics):
    one = snapshot(write(llama, tmp_path / "one", statistics=llama_statistics).path)
    two = snapshot(write(llama, tmp_path / "two", statistics=llama_statistics).path)
    assert one == two


def test_provenance_names_what_is_there(tmp_path, write, llama, llama_statistics, llama_scales):
    write(llama, tmp_path / "out", statistics=llama_statistics)
    provenance = json.loads((tmp_path / "out" / "kv_calibration" / "provenance.json").read_text())
    files = provenance["files"]
    assert {"config.json", INDEX, "kv_scales.safetensors", "README.md", "kv_calibration/scales.safetensors"} < set(files)
    assert all(sha256_file(tmp_path / "out" / name) == digest for name, digest in files.items())
    assert provenance["statistics"] == llama_statistics.digest()
    assert Statistics.load(tmp_path / "out" / "kv_calibration" / "statistics.safetensors").digest() == llama_statistics.digest()
    assert provenance["scales"] == llama_scales.digest()
    assert provenance["model"]["config_sha256"] == sha256_file(llama / "config.json")
    assert provenance["model"]["fingerprint"] == SourceCheckpoint.open(llama).fingerprint
    weights = provenance["runs"][0]["model"]["weights"]
    assert weights == [{"sha256": sha256_file(llama / "model.safetensors"), "bytes": (llama / "model.safetensors").stat().st_size}]


def test_a_local_path_is_not_published_in_the_card(tmp_path, write, llama, llama_scales):
    run = {**llama_scales.provenance[0], "corpus": {"sources": [{"data": "/home/someone/secret project/a|b.jsonl"}, {"data": "org/data"}]}}
    write(llama, tmp_path / "out", dataclasses.replace(llama_scales, provenance=(run,)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "someone" not in card
    assert "(a\\|b.jsonl, org/data)" in card


def test_scales_of_a_finetune_of_the_same_shapes_are_refused(tmp_path, write, llama_scales):
    other = tiny_checkpoint(tmp_path / "other")
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="calibrated on other weights"):
        write(other, tmp_path / "out", llama_scales)
    assert not (tmp_path / "out").exists()


def test_e5m2_is_refused_before_anything_is_computed(tmp_path, llama, write, llama_statistics):
    with pytest.raises(UsageError, match="E5M2 scales cannot be written"):
        check_writable(SourceCheckpoint.open(llama), tmp_path / "out", PolicyOptions(number_format="e5m2"))
    with pytest.raises(UsageError, match="E5M2"):
        write(llama, tmp_path / "out", solve(llama_statistics, PolicyOptions(number_format="e5m2")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["awq", "gptq", "mxfp4", "fp8", "something-new", None])
def test_formats_that_cannot_carry_scales_are_refused_with_what_can(tmp_path, copy, write, method):
    edit_config(copy, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UsageError, match=r"compressed-tensors") as caught:
        write(copy, tmp_path / "out")
    assert str(method or "unnamed") in str(caught.value)


def test_a_language_models_own_quantization_config_is_seen(tmp_path, copy):
    config = json.loads((copy / "config.json").read_text())
    edit_config(copy, text_config={**config, "quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UsageError, match="gptq"):
        SourceCheckpoint.open(copy).check_can_carry_scales()
