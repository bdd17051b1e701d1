"""The variants by their rules, what is refused, and overlays that engines load."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from calibrate.checkpoint import write_checkpoint
from calibrate.collect import collect
from calibrate.engines.session import Variant
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import build_variants, checkpoint_scales, old_formula, overlay, unit_scales
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("baselines") / "base")


@pytest.fixture(scope="module")
def statistics(base):
    return collect(collect_run(base, rows_corpus([40, 30, 20, 25])))


@pytest.fixture(scope="module")
def random(base):
    return collect(collect_run(base, rows_corpus([64, 64], seed=9)))


@pytest.fixture(scope="module", params=["tensor", "head"])
def calibrated(request, statistics):
    return solve(statistics, PolicyOptions(granularity=request.param))


@pytest.fixture(scope="module")
def checkpoint(base, calibrated, statistics, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "calibrated"
    return write_checkpoint(SourceCheckpoint.open(base), calibrated, folder, statistics=statistics).path


@pytest.fixture
def source(checkpoint):
    return SourceCheckpoint.open(checkpoint)


def by_name(variants):
    return {each.name: each.scales for each in variants}


def test_the_variants_and_their_order(source, calibrated, random):
    variants = build_variants(source, calibrated, random)
    assert [each.name for each in variants] == ["16-bit", "unit", "random", "old-formula", "calibrated"]
    found = by_name(variants)
    assert found["16-bit"] is None
    assert found["calibrated"] is calibrated
    for layer, ours in zip(found["unit"].layers, calibrated.layers, strict=True):
        assert (layer.index, layer.module) == (ours.index, ours.module)
        for (_, scale), (_, like) in zip(layer.items(), ours.items(), strict=True):
            assert scale.shape == like.shape
            assert scale.dtype == np.float32
            assert (scale == 1).all()


def test_random_is_amax_over_448_of_random_tokens(source, calibrated, random):
    found = by_name(build_variants(source, calibrated, random))["random"]
    assert found.options.policy == "amax"
    assert found.options.granularity == calibrated.options.granularity
    values = random.values()
    for layer in found.layers:
        amax = values[random.layers[layer.index]["k"].amax_codes]
        expected = amax / 448 if len(layer.k) > 1 else amax.max(keepdims=True) / 448
        assert layer.k == pytest.approx(expected, rel=1e-6)


def test_the_old_formula(random):
    scales = old_formula(random, PolicyOptions(granularity="head"))
    assert scales.options.granularity == "tensor"
    values = random.values()
    for layer in scales.layers:
        for kind, divisor in (("q", 200), ("k", 200), ("v", 100)):
            peak = values[random.layers[layer.index][kind].amax_codes.max()]
            assert dict(layer.items())[kind].tolist() == [np.float32(peak / divisor)]


@pytest.mark.parametrize("family", ["gemma3n_text", "deepseek_v3"])
def test_the_old_formula_for_shared_and_latent_layers(family, tmp_path):
    path = tiny_checkpoint(tmp_path / "m", family)
    random = collect(collect_run(path, rows_corpus([64, 64])))
    scales = {layer.index: layer for layer in old_formula(random, PolicyOptions()).layers}
    for layer in random.layout["layers"]:
        target = scales[layer["target"]]
        assert np.array_equal(scales[layer["index"]].k, target.k)
        peaks = [float(random.values()[random.layers[layer["target"]][kind].amax_codes.max()]) for kind in "kv"]
        if layer["latent"]:
            assert scales[layer["index"]].k[0] == scales[layer["index"]].v[0] == np.float32(max(peaks) / 200)


def test_a_scales_file_and_checkpoints_as_variants(source, calibrated, random, tmp_path, checkpoint):
    unit_scales(calibrated).save(tmp_path / "unit.safetensors")
    found = by_name(build_variants(source, calibrated, random, extra={"mine": tmp_path / "unit.safetensors", "again": checkpoint}))
    assert all((scale == 1).all() for layer in found["mine"].layers for _, scale in layer.items())
    assert found["again"].digest() == calibrated.digest()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_checkpoint_of_another_tool(dtype, base, source, calibrated, random, tmp_path):
    foreign = tiny_checkpoint(tmp_path / "foreign")
    tensors = {f"model.layers.{n}.self_attn.{kind}_scale": np.array([0.5 + n], dtype) for n in range(3) for kind in "kv"}
    (foreign / "kv").mkdir()
    weights = load_file_torch(foreign / "model.safetensors") | {name: torch.from_numpy(value) for name, value in tensors.items()}
    save_file_torch(weights, foreign / "model.safetensors")
    found = by_name(build_variants(source, calibrated, random, extra={"theirs": foreign}))["theirs"]
    assert [layer.k.tolist() for layer in found.layers] == [[0.5], [1.5], [2.5]]
    assert [layer.q.tolist() for layer in found.layers] == [[1.0]] * 3


def load_file_torch(path):
    from safetensors.torch import load_file

    return load_file(path)


def save_file_torch(tensors, path):
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})


def test_scales_of_other_layers_name_the_first_that_differs(source, calibrated, random, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", num_hidden_layers=2)
    scales = solve(collect(collect_run(other, rows_corpus([40]))), calibrated.options)
    scales.save(tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"variant mine has other layers than the model: layer 2 is model.layers.2.self_attn in the model"):
        build_variants(source, calibrated, random, extra={"mine": tmp_path / "other.safetensors"})
    wide = tiny_checkpoint(tmp_path / "wide", num_key_value_heads=4)
    solve(collect(collect_run(wide, rows_corpus([40]))), PolicyOptions(granularity="head")).save(tmp_path / "wide.safetensors")
    with pytest.raises(UsageError, match="k of layer 0 has 4 scales for 2 heads"):
        build_variants(source, calibrated, random, extra={"mine": tmp_path / "wide.safetensors"})


def test_paths_and_names_that_cannot_be_variants(source, calibrated, random, tmp_path, base):
    for name, path, message in (
        ("unit", base, "cannot be called 'unit'"),
        ("a/b", base, "cannot be called 'a/b'"),
        ("mine", tmp_path / "nowhere", "no such variant"),
        ("mine", base, "carries no KV scales"),
    ):
        with pytest.raises(UsageError, match=message):
            build_variants(source, calibrated, random, extra={name: path})
    broken = tiny_checkpoint(tmp_path / "broken")
    weights = load_file_torch(broken / "model.safetensors")
    save_file_torch(weights | {"model.layers.0.self_attn.k_scale": torch.zeros(1)}, broken / "model.safetensors")
    with pytest.raises(UsageError, match="k_scale is not finite and positive"):
        build_variants(source, calibrated, random, extra={"mine": broken})


def test_a_scale_that_was_edited(base, statistics, tmp_path):
    path = write_checkpoint(SourceCheckpoint.open(base), solve(statistics, PolicyOptions()), tmp_path / "c", statistics=statistics).path
    checkpoint_scales(SourceCheckpoint.open(path))
    tensors = load_file(path / "kv_scales.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = tensors["model.layers.1.self_attn.v_scale"] * 2
    save_file(tensors, path / "kv_scales.safetensors")
    with pytest.raises(UsageError, match=r"model.layers.1.self_attn.v_scale in kv_scales.safetensors is not what was calibrated"):
        checkpoint_scales(SourceCheckpoint.open(path))
    with pytest.raises(UsageError, match="was not calibrated by kv-calibrate"):
        checkpoint_scales(SourceCheckpoint.open(base))


def test_overlays_link_every_weight(source, calibrated, random, tmp_path, checkpoint):
    for variant in build_variants(source, calibrated, random):
        folder = overlay(source, variant, tmp_path / variant.name)
        opened = SourceCheckpoint.open(folder)
        assert opened.fingerprint == source.fingerprint
        for name in source.headers:
            assert os.path.samefile(checkpoint / name, folder / name)
        config = json.loads((folder / "config.json").read_text())
        if variant.scales is None:
            assert "quantization_config" not in config
            assert not (folder / "kv_scales.safetensors").exists()
            assert not (folder / "kv_calibration").exists()
            assert not any("scale" in name for name in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
        else:
            strategy = config["quantization_config"]["kv_cache_scheme"]["strategy"]
            assert strategy == ("attn_head" if variant.scales.options.granularity == "head" else "tensor")
            loaded = load_file(folder / "kv_scales.safetensors")
            assert np.array_equal(loaded["model.layers.2.self_attn.k_scale"], variant.scales.layers[2].k)


def test_the_16_bit_overlay_loads_and_computes_like_the_original(base, source, tmp_path):
    folder = overlay(source, Variant("16-bit", None), tmp_path / "plain")
    tokens = torch.arange(5).unsqueeze(0) + 7
    with torch.inference_mode():
        expected, found = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits for path in (base, folder))
    assert torch.equal(expected, found)


def test_an_overlay_keeps_quantized_weights_config(source, tmp_path):
    source.config["quantization_config"]["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    folder = overlay(source, Variant("16-bit", None), tmp_path / "plain")
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert "kv_cache_scheme" not in kept
    assert kept["config_groups"]


def test_an_overlay_in_place_of_something_is_refused(source, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        overlay(source, Variant("16-bit", None), tmp_path / "there")
