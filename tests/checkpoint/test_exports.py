"""Exports, each read by the reader's own code: SGLang's and ModelOpt's from their wheels (vLLM itself in tests/engines/test_modelopt.py)."""

import abc
import dataclasses
import json
import logging
import re
import shutil
from collections import defaultdict
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import load_file

from calibrate.artefact import write_tensors
from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.exports import FORMATS, ExportOptions, open_given
from calibrate.checkpoint.exports.modelopt import hf_quant_config, vllm_config
from calibrate.checkpoint.write import ENGINE_SCALES
from calibrate.cli import main
from calibrate.collect import collect
from calibrate.engines.serving import Serving, serving
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.checkpoint.conftest import add_foreign_scales, read_weights, snapshot
from tests.conftest import collect_run, rows_corpus
from tests.engine_sources import definitions
from tests.tiny import edit_config, tiny_checkpoint

SGLANG, MODELOPT = "sglang==0.5.23", "nvidia-modelopt==0.47.0"
LAYERS = 3


@pytest.fixture
def calibrated(tmp_path, llama, llama_scales, llama_statistics):
    """The tiny llama with its scales and statistics, as `run` leaves it."""
    return write_checkpoint(SourceCheckpoint.open(llama), llama_scales, tmp_path / "calibrated", statistics=llama_statistics)


def export(path, form, output, *, scales=None, statistics=None, force=False, **options):
    given = open_given(SourceCheckpoint.open(path), scales, statistics)
    return FORMATS[form].export(given, output, ExportOptions(**options), force=force)


def command(*words) -> Any:
    return CliRunner().invoke(main, ["export", *map(str, words)])


def sglang_loader() -> dict[str, Any]:
    """SGLang's own reader of the file and of scale tensors."""
    names = ["KVCacheQuantSchema", "QuantParamSchema", "kv_cache_scales_loader", "maybe_remap_kv_scale_name", "default_weight_loader"]
    given = {name: getattr(pydantic, name) for name in ("BaseModel", "ConfigDict", "ValidationInfo", "model_validator")}
    given |= {"torch": torch, "json": json, "logger": logging.getLogger("sglang"), "print_warning_once": logging.getLogger("sglang").warning}
    exec("from typing import Dict, Iterable, Optional, Tuple", given)
    return definitions(SGLANG, "sglang/srt/model_loader/weight_utils.py", names, given)


# --- sglang-json


def test_sglang_reads_the_larger_scale_of_every_layer_on_every_rank(calibrated, llama_scales, tmp_path):
    export(calibrated.path, "sglang-json", tmp_path / "scales.json", tensor_parallel_size=2)
    load = sglang_loader()["kv_cache_scales_loader"]
    for rank in (0, 1):
        read = dict(load(str(tmp_path / "scales.json"), rank, 2, LAYERS, "llama"))
        assert read == {layer.index: float(max(layer.k[0], layer.v[0])) for layer in llama_scales.layers}


@pytest.mark.parametrize(
    "asked", [(0, 4, LAYERS, "llama"), (0, 2, LAYERS + 1, "llama"), (0, 2, LAYERS, "qwen2")], ids=["other ranks", "more layers", "other model"]
)
def test_sglang_takes_nothing_from_a_file_for_something_else(calibrated, tmp_path, asked, caplog):
    """The control: its loader does look, and what it refuses runs at 1.0 with a line in its log."""
    export(calibrated.path, "sglang-json", tmp_path / "scales.json", tensor_parallel_size=2)
    assert list(sglang_loader()["kv_cache_scales_loader"](str(tmp_path / "scales.json"), *asked)) == []
    assert "Defaulting to KV cache scaling factors = 1.0" in caplog.text


def test_what_sharing_a_scale_costs_is_exact(calibrated, llama_scales, llama_statistics, tmp_path):
    """Against a sum over every value that occurred, one by one, through torch's own cast."""
    made = export(calibrated.path, "sglang-json", tmp_path / "scales.json")
    values = llama_statistics.values()
    for loss, layer in zip(made.losses, llama_scales.layers, strict=True):
        assert loss.shared == max(float(layer.k[0]), float(layer.v[0]))
        for kind in ("k", "v"):
            counts = llama_statistics.layers[layer.index][kind].counts.sum(axis=0)
            used = np.flatnonzero(counts)
            x = torch.tensor(values[used], dtype=torch.float32)
            back = (x / np.float32(loss.shared)).clamp(max=448).to(torch.float8_e4m3fn).float().double() * loss.shared
            error, energy = (counts[used] * (back.numpy() - values[used]) ** 2).sum(), (counts[used] * values[used] ** 2).sum()
            assert loss.shared_snr_db[kind] == pytest.approx(10 * np.log10(energy / error), abs=1e-9)
            assert loss.saturated[kind] == 0
        keeps = "k" if layer.k[0] >= layer.v[0] else "v"
        assert loss.loss_db(keeps) == 0  # its own scale
        assert loss.loss_db("kv".replace(keeps, "")) != 0


def test_without_statistics_the_cost_is_not_claimed(llama, llama_scales, tmp_path):
    made = export(llama, "sglang-json", tmp_path / "scales.json", scales=llama_scales)
    assert made.losses == ()
    assert "not computed" in made.notes[0]


def test_a_model_with_layers_that_cache_nothing_is_refused(tmp_path, llama_scales, llama):
    source = shutil.copytree(llama, tmp_path / "hybrid")
    edit_config(source, num_hidden_layers=5)
    with pytest.raises(UsageError, match=r"must name every layer, and layer 3 .* has no KV cache \(2 such layers\)"):
        export(source, "sglang-json", tmp_path / "scales.json", scales=llama_scales)
    assert not (tmp_path / "scales.json").exists()


def test_a_config_that_names_its_layers_otherwise_is_read(tmp_path):
    path = tiny_checkpoint(tmp_path / "gpt2", "gpt2")
    scales = solve(collect(collect_run(path, rows_corpus([16]))), PolicyOptions())
    export(path, "sglang-json", tmp_path / "scales.json", scales=scales)
    assert len(json.loads((tmp_path / "scales.json").read_text())["kv_cache"]["scaling_factor"]["0"]) == len(scales.layers)
    edit_config(path, n_layer=None)
    with pytest.raises(UsageError, match="does not say how many layers"):
        export(path, "sglang-json", tmp_path / "other.json", scales=scales)


# --- the checkpoint that `write` makes, in SGLang


def sglang_attention(folder) -> dict[str, Any]:
    """SGLang's KV method on each attention layer of a checkpoint: its names, its loader, its processing; scales as its kernels take them."""
    loader = sglang_loader()
    stubs = {"torch": torch, "logger": logging.getLogger("sglang"), "QuantizeMethodBase": object, "QuantizationConfig": object, "is_fp8_fnuz": bool}
    method = definitions(SGLANG, "sglang/srt/layers/quantization/kv_cache.py", ["BaseKVCacheMethod"], stubs)["BaseKVCacheMethod"](None)
    layers = {f"model.layers.{index}.self_attn.attn": SimpleNamespace() for index in range(LAYERS)}
    for layer in layers.values():
        method.create_weights(layer)
    parameters = {f"{name}.{scale}": getattr(layer, scale) for name, layer in layers.items() for scale in ("k_scale", "v_scale")}
    with safe_open(folder / "kv_scales.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            target = loader["maybe_remap_kv_scale_name"](name, parameters)
            if target in parameters:
                loader["default_weight_loader"](parameters[target], file.get_tensor(name))
    for layer in layers.values():
        method.process_weights_after_loading(layer)
    return {name: (layer.k_scale_float, layer.v_scale_float) for name, layer in layers.items()}


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_sglang_loads_both_checkpoints_in_float32(calibrated, llama_scales, tmp_path, form):
    folder = calibrated.path if form == "compressed-tensors" else export(calibrated.path, "modelopt", tmp_path / "out").path
    held = sglang_attention(folder)
    assert held == {f"{layer.module}.attn": (float(layer.k[0]), float(layer.v[0])) for layer in llama_scales.layers}


def test_sglang_supports_the_tensor_scheme_and_not_the_head_scheme(calibrated):
    methods = ["CompressedTensorsKVCacheMethod"]
    given = {"BaseKVCacheMethod": object, "Any": Any}
    exec("from typing import Dict", given)
    file = "sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py"
    supported = definitions(SGLANG, file, methods, given)["CompressedTensorsKVCacheMethod"].is_supported_scheme
    scheme = json.loads((calibrated.path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert supported(scheme)
    assert not supported(scheme | {"strategy": "attn_head"})


# --- modelopt


def test_modelopts_checkpoint_is_the_source_linked_with_scalars_under_its_names(calibrated, llama_scales, tmp_path):
    made = export(calibrated.path, "modelopt", tmp_path / "out")
    assert made.how.keys() == {"link"}
    with safe_open(made.path / "kv_scales.safetensors", framework="pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    want = {f"{layer.module}.{kind}_proj.{kind}_scale": scale for layer in llama_scales.layers for kind, scale in layer.items() if kind != "q"}
    assert {name: tensor.item() for name, tensor in held.items()} == {name: float(scale[0]) for name, scale in want.items()}
    assert {(tensor.dtype, tuple(tensor.shape)) for tensor in held.values()} == {(torch.float32, ())}
    weights, original = read_weights(made.path), read_weights(calibrated.path)
    assert all(torch.equal(weights[name].view(torch.int16), original[name].view(torch.int16)) for name in original if not name.endswith("_scale"))
    assert json.loads((made.path / "hf_quant_config.json").read_text()) == hf_quant_config()
    assert json.loads((made.path / "config.json").read_text())["quantization_config"] == vllm_config()
    assert "k and v of 3 attention layers" in (made.path / "README.md").read_text()
    provenance = json.loads((made.path / "kv_calibration" / "provenance.json").read_text())
    assert {"hf_quant_config.json", "kv_scales.safetensors"} <= provenance["files"].keys()


def test_modelopts_own_export_uses_these_names_and_this_config():
    """TensorRT-LLM is not on PyPI; the files it reads are those that ModelOpt writes."""
    names = definitions(MODELOPT, "modelopt/torch/export/quant_utils.py", ["_KV_CACHE_REPLACEMENTS"], {})["_KV_CACHE_REPLACEMENTS"]
    assert names["k_bmm_quantizer._amax"] == "k_proj.k_scale"
    assert names["v_bmm_quantizer._amax"] == "v_proj.v_scale"
    file, both = "modelopt/torch/export/convert_hf_config.py", ["convert_hf_quant_config_format", "_quant_algo_to_group_config"]
    convert = definitions(MODELOPT, file, both, {"Any": Any, "defaultdict": defaultdict})["convert_hf_quant_config_format"]
    theirs = convert(hf_quant_config())
    assert "quant_algo" not in theirs  # what vLLM and SGLang refuse, and why config.json says FP8 with everything ignored
    assert {key: value for key, value in vllm_config().items() if key not in ("quant_algo", "ignore")} == {
        key: value for key, value in theirs.items() if key != "ignore"
    }


def test_sglang_makes_of_config_json_a_quantized_cache_and_plain_weights():
    base = {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod}
    given = definitions(SGLANG, "sglang/srt/layers/quantization/base_config.py", ["QuantizationConfig"], base)
    given |= {"lru_cache": lru_cache, "re": re, "logger": logging.getLogger("sglang")}
    names = ["_compile_exclusion_pattern", "ModelOptQuantConfig", "ModelOptFp8Config"]
    read = definitions(SGLANG, "sglang/srt/layers/quantization/modelopt_quant.py", names, given)["ModelOptFp8Config"].from_config
    config = read(vllm_config())
    assert config.kv_cache_quant_algo == "FP8"
    assert all(config.is_layer_excluded(name) for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj", "lm_head"))
    with pytest.raises(ValueError, match="Cannot find 'quant_algo'"):
        read(vllm_config() | {"quant_algo": None})


def test_an_export_can_be_exported_again(calibrated, tmp_path):
    first = export(calibrated.path, "modelopt", tmp_path / "one").path
    second = export(first, "modelopt", tmp_path / "two").path
    one, two = snapshot(first), snapshot(second)
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} == {"kv_calibration/provenance.json"}  # it names the config.json it came from
    export(second, "sglang-json", tmp_path / "from-export.json")
    export(calibrated.path, "sglang-json", tmp_path / "from-checkpoint.json")
    assert (tmp_path / "from-export.json").read_bytes() == (tmp_path / "from-checkpoint.json").read_bytes()


def test_scales_that_bfloat16_does_not_hold_are_counted(llama, llama_statistics, tmp_path):
    scales = solve(llama_statistics, PolicyOptions(policy="amax", margin=1.1))
    exact = [bool(torch.tensor(scale).to(torch.bfloat16).float() == torch.tensor(scale)) for one in scales.layers for scale in (one.k, one.v)]
    made = export(llama, "modelopt", tmp_path / "out", scales=scales)
    assert not all(exact)
    assert f"{exact.count(False)} of {len(exact)} move, by at most 0." in made.notes[1]


def test_another_tools_scales_leave_the_weights(llama, llama_scales, tmp_path, write):
    source = shutil.copytree(llama, tmp_path / "source")
    foreign = add_foreign_scales(source)
    calibrated = write(source, tmp_path / "calibrated").path
    made = export(calibrated, "modelopt", tmp_path / "out").path
    assert not set(foreign) & read_weights(made).keys()


# --- what no form can hold


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"granularity": "head"}, "per KV head"), ({"number_format": "e4m3fnuz"}, "MI300"), ({"number_format": "e5m2"}, "for e5m2")],
)
def test_scales_of_another_kind_are_refused(form, options, reason, llama, llama_statistics, tmp_path):
    scales = solve(llama_statistics, PolicyOptions(**options))
    with pytest.raises(UsageError, match=reason):
        export(llama, form, tmp_path / "out", scales=scales)
    assert not list(tmp_path.iterdir())


def test_latent_attention_is_refused_where_no_reader_takes_its_scales(llama, llama_scales, tmp_path):
    layers = [layer | {"latent": layer["index"] == 1} for layer in llama_scales.layout["layers"]]
    scales = dataclasses.replace(llama_scales, layout=llama_scales.layout | {"layers": layers})
    with pytest.raises(UsageError, match="layer 1 caches a compressed latent"):
        export(llama, "sglang-json", tmp_path / "out", scales=scales)


def test_attention_that_readers_of_modelopt_do_not_know_is_refused(tmp_path):
    path = tiny_checkpoint(tmp_path / "neox", "gpt_neox")
    scales = solve(collect(collect_run(path, rows_corpus([16]))), PolicyOptions())
    with pytest.raises(UsageError, match=r"called self_attn or mixer, not gpt_neox\.layers\.0\.attention"):
        export(path, "modelopt", tmp_path / "out", scales=scales)


def test_quantized_weights_are_refused(llama, llama_scales, tmp_path):
    source = shutil.copytree(llama, tmp_path / "source")
    edit_config(source, quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {}}})
    with pytest.raises(UsageError, match=r"weights of .* are quantized with compressed-tensors"):
        export(source, "modelopt", tmp_path / "out", scales=llama_scales)


def test_other_weights_other_statistics_and_a_changed_file_are_refused(calibrated, llama, llama_scales, llama_statistics, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match="other weights"):
        export(other, "sglang-json", tmp_path / "out.json", scales=llama_scales)
    wrong = dataclasses.replace(llama_statistics, counted={**llama_statistics.counted, "tokens": 1})
    with pytest.raises(UsageError, match="digests differ"):
        export(llama, "sglang-json", tmp_path / "out.json", scales=llama_scales, statistics=wrong)
    held = load_file(calibrated.path / "kv_scales.safetensors")
    name = next(iter(held))
    write_tensors(calibrated.path / "kv_scales.safetensors", held | {name: held[name] * 2}, {"schema": ENGINE_SCALES})
    with pytest.raises(UsageError, match="holds other scales than"):
        export(calibrated.path, "modelopt", tmp_path / "out")


# --- the command


def test_the_command_writes_says_and_guards(calibrated, llama, llama_scales, tmp_path):
    made = command(calibrated.path, "--format", "sglang-json", "-o", tmp_path / "s.json", "--tensor-parallel-size", 2)
    assert made.exit_code == 0, made.stderr
    assert "one scale for K and V, the larger: K loses" in made.stdout
    again = command(calibrated.path, "--format", "sglang-json", "-o", tmp_path / "s.json")
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    as_json = command(calibrated.path, "--format", "modelopt", "-o", tmp_path / "folder", "--json")
    assert json.loads(as_json.stdout)["how"] == {"link": 4}
    llama_scales.save(tmp_path / "scales.safetensors")
    alone = command(tmp_path / "scales.safetensors", "--model", llama, "--format", "sglang-json", "-o", tmp_path / "alone.json")
    assert (alone.exit_code, "not computed" in alone.stdout) == (0, True)
    assert set(json.loads((tmp_path / "alone.json").read_text())["kv_cache"]["scaling_factor"]) == {"0"}


def test_layers_left_in_16_bits_are_not_forgotten(llama, llama_scales, tmp_path):
    """vLLM is told of them for an export too; a file that cannot say it says so."""
    kept = write_checkpoint(SourceCheckpoint.open(llama), llama_scales, tmp_path / "kept", skip_layers=(1,)).path
    told, alone = command(kept, "--format", "modelopt", "-o", tmp_path / "out"), command(kept, "--format", "sglang-json", "-o", tmp_path / "s.json")
    assert (told.exit_code, alone.exit_code) == (0, 0)
    assert serving(tmp_path / "out") == serving(kept) == Serving(kv_cache_dtype_skip_layers=(1,))
    assert "--kv-cache-dtype-skip-layers 1" in (tmp_path / "out" / "README.md").read_text()
    assert "layers 1 keep 16 bits in vLLM, if it is told so" in " ".join(told.stdout.split())
    assert "layers 1 were to keep 16 bits, which this form cannot say" in " ".join(alone.stdout.split())


def test_statistics_that_are_read_are_not_written_over(llama, llama_scales, llama_statistics, tmp_path):
    llama_scales.save(tmp_path / "scales.safetensors")
    llama_statistics.save(tmp_path / "statistics.safetensors")
    before = snapshot(tmp_path)
    given = [tmp_path / "scales.safetensors", "--model", llama, "--statistics", tmp_path / "statistics.safetensors"]
    for target in ("statistics", "scales"):
        done = command(*given, "--format", "sglang-json", "-o", tmp_path / f"{target}.safetensors", "--force")
        assert (done.exit_code, "is an input" in done.stderr) == (2, True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{calibrated}", "--format", "sglang-json", "-o", "{calibrated}/kv_scales.safetensors", "--force"], "lies in the checkpoint"),
        (["{calibrated}", "--format", "modelopt", "-o", "{calibrated}", "--force"], "is the source checkpoint itself"),
        (["{calibrated}", "--format", "modelopt", "-o", "{tmp}/x", "--model", "{llama}"], "go with a scales file"),
        (["{llama}", "--format", "modelopt", "-o", "{tmp}/x"], "was not written by kv-calibrate"),
        (["{tmp}/nothing", "--format", "modelopt", "-o", "{tmp}/x"], "scales file with --model"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(words, reason, calibrated, llama, tmp_path):
    before = snapshot(tmp_path)
    done = command(*[word.format(calibrated=calibrated.path, llama=llama, tmp=tmp_path) for word in words])
    assert done.exit_code == 2
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert snapshot(tmp_path) == before
