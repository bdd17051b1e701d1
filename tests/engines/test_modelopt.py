"""ModelOpt's form in real vLLM: families, what it drops in silence, and a host without FP8."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from calibrate.checkpoint.exports import FORMATS, ExportOptions, open_given
from calibrate.collect import collect
from calibrate.engines import load_scales, verify_checkpoint
from calibrate.engines.host import KVChoice
from calibrate.engines.source import as_loaded
from calibrate.errors import HostError, UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.vllm

# phi3 has one matrix for q, k and v: the names are the same; gemma4's last layers read others' caches; nemotron_h calls attention `mixer`
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "gemma3_text", "phi3", "opt", "gemma4_text", "nemotron_h")
LAYER = "model.layers.1.self_attn"


def exported(root, name: str, family: str, **changes):
    """A tiny model of the family, calibrated by a policy whose scales bfloat16 does not hold, in ModelOpt's form."""
    path = tiny_checkpoint(root / f"{name}-source", family, **changes)
    scales = solve(collect(collect_run(path, rows_corpus([24, 30]))), PolicyOptions(policy="amax", margin=1.1))
    return FORMATS["modelopt"].export(open_given(SourceCheckpoint.open(path), scales), root / name, ExportOptions(), force=False).path


def rewritten(folder, target, change):
    """A copy whose scale tensors `change` has changed; the index lists what the file holds."""
    shutil.copytree(folder, target)
    scales = {name: np.asarray(value) for name, value in change(load_file(target / "kv_scales.safetensors")).items()}
    save_file(scales, target / "kv_scales.safetensors", metadata={"format": "pt"})
    index = json.loads((target / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != "kv_scales.safetensors"}
    index["weight_map"] = kept | dict.fromkeys(scales, "kv_scales.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


# name → (change to the file, reason of each failing row, how many)
DEFECTS = {
    "layer removed": (lambda held: {name: value for name, value in held.items() if LAYER not in name}, "not loaded (stayed 1.0)", 2),
    "names of another module": (lambda held: {name.replace("self_attn", "attention"): value for name, value in held.items()}, "", 0),
    "a bfloat16 step off": (lambda held: held | {f"{LAYER}.k_proj.k_scale": held[f"{LAYER}.k_proj.k_scale"] * np.float32(1.01)}, "differs", 1),
    "v as k": (lambda held: held | {f"{LAYER}.k_proj.k_scale": held[f"{LAYER}.v_proj.v_scale"]}, "differs", 1),
}


@pytest.fixture(scope="module")
def readbacks(tmp_path_factory):
    """vLLM ignores these scales without an FP8 cache."""
    root = tmp_path_factory.mktemp("modelopt")
    jobs = {family: (exported(root, family, family), None) for family in FAMILIES}
    llama = jobs["llama"][0]
    truth = load_file(llama / "kv_scales.safetensors")
    for number, (name, (change, _, _)) in enumerate(DEFECTS.items()):
        jobs[name] = (rewritten(llama, root / f"defect{number}", change), truth)
    jobs["float16"] = (exported(root, "float16", "llama", dtype=torch.float16), None)
    folders, truths = zip(*jobs.values(), strict=True)
    return dict(zip(jobs, zip(folders, load_scales(folders, expected=truths), strict=True), strict=True))


@pytest.mark.fp8_cpu
@pytest.mark.parametrize("name", [*FAMILIES, "float16"])
def test_vllm_holds_k_and_v_after_rounding_to_the_models_type(readbacks, name):
    folder, readback = readbacks[name]
    assert readback.ok, readback.error or readback.failures
    assert readback.kv_cache_dtype == "fp8"
    held = load_file(folder / "kv_scales.safetensors")
    dtype = torch.float16 if name == "float16" else torch.bfloat16
    loaded = {f"{row.layer}.{row.kind}_proj.{row.kind}_scale": row.loaded[0] for row in readback.rows}
    assert loaded == {key: torch.tensor(value).to(dtype).float().item() for key, value in held.items()}
    changed = sum(loaded[key] != float(value) for key, value in held.items())
    assert changed > 0, "scales that need no rounding prove nothing about it"
    assert max(abs(loaded[key] / float(value) - 1) for key, value in held.items()) <= (2**-11 if name == "float16" else 2**-8)
    assert any(f"which changes {changed} of {len(held)}" in note for note in readback.notes)
    assert any("vLLM holds 1 for q" in note for note in readback.notes)


@pytest.mark.fp8_cpu
@pytest.mark.parametrize("name", [name for name, (_, _, count) in DEFECTS.items() if count])
def test_each_defect_fails_and_names_its_layer(readbacks, name):
    _, reason, count = DEFECTS[name]
    _, readback = readbacks[name]
    assert readback.error == ""  # vLLM itself saw nothing wrong
    assert [(row.layer, row.reason) for row in readback.failures] == [(LAYER, reason)] * count


@pytest.mark.fp8_cpu
def test_under_names_that_no_reader_maps_nothing_is_loaded(readbacks):
    """Why `export` refuses attention modules of other names."""
    _, readback = readbacks["names of another module"]
    assert not readback.ok
    assert readback.error or {row.reason for row in readback.failures} == {"not loaded (stayed 1.0)"}


def test_without_fp8_the_host_is_named_and_vllm_is_not_started(tmp_path, monkeypatch):
    folder = exported(tmp_path, "llama", "llama")
    with pytest.raises(UsageError, match="only where the cache is FP8, not bfloat16: leave --kv-cache-dtype out"):
        verify_checkpoint(folder, kv_cache_dtype="bfloat16")
    for module in ("verify", "light"):
        monkeypatch.setattr(f"calibrate.engines.{module}.choose_kv_dtype", lambda config, cuda: KVChoice("bfloat16", "this CPU cannot run FP8; more"))
        monkeypatch.setattr(f"calibrate.engines.{module}.run_child", lambda *given: pytest.fail("vLLM was started"))
    for ask in (verify_checkpoint, lambda path: load_scales([path])):
        with pytest.raises(HostError, match=r"only where the cache is FP8, and this CPU cannot run FP8: verify on a host that runs FP8"):
            ask(folder)


def test_rounding_is_for_modelopts_form_alone():
    scales = {"a.k_scale": np.array([0.1], dtype=np.float32)}
    assert as_loaded(scales, {}, "bfloat16") == scales
    modelopt = {"quantization_config": {"quant_method": "modelopt"}}
    assert as_loaded(scales, modelopt, "bfloat16")["a.k_scale"].tolist() == [0.10009765625]
