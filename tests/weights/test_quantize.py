"""Quantizing first: the process around llmcompressor, what it leaves behind, and llmcompressor itself where it is installed."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from calibrate import pipeline
from calibrate.cli import main
from calibrate.errors import HostError, UsageError
from calibrate.model import SourceCheckpoint
from calibrate.pipeline import JobOptions
from calibrate.weights import SCHEMES, convert_checkpoint, llmcompressor_child, quantize_checkpoint
from calibrate.weights.process import SETTING, find_python
from calibrate.weights.quantize import made_from
from tests.conftest import rows_corpus
from tests.engines.test_process import wait_gone
from tests.tiny import tiny_checkpoint, tiny_model
from tests.weights import foreign
from tests.weights.compressed import compress

SHORT = {"data": "random", "samples": 4, "sequence_length": 24}


@pytest.fixture
def dense(tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "llama", **foreign.SHAPE)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    """The weights of `dense`, quantized by hand."""
    folder = tmp_path_factory.mktemp("quantized")
    compress(tiny_checkpoint(folder / "model", "llama", **foreign.SHAPE), folder / "w4a16", "w4a16")
    return folder / "w4a16"


@pytest.fixture
def stand_in(tmp_path, monkeypatch, quantized):
    """tests/weights/stand_in.py in llmcompressor's place. Called: what it was called with so far."""
    program, calls = tmp_path / "python-of-llmcompressor", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in.py")} "$@"\n')
    program.chmod(0o755)
    calls.touch()
    monkeypatch.setenv(SETTING, str(program))
    monkeypatch.setenv("STAND_IN_CALLS", str(calls))
    monkeypatch.setenv("STAND_IN_GIVES", str(quantized))
    return lambda: [line.split() for line in calls.read_text().splitlines()]


def _left(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir()} - {"model", "calls", "python-of-llmcompressor"}


def test_without_the_environment_one_line_says_how_to_make_it(dense, tmp_path, monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr("calibrate.weights.process._roots", lambda: (tmp_path,))
    with pytest.raises(HostError, match="make llmcompressor") as refusal:
        find_python()
    assert refusal.value.exit_code == 3
    for command in (["quantize", dense, "--scheme", "fp8"], ["run", dense, "--weights", "fp8"]):
        result = CliRunner().invoke(main, [*map(str, command), "--output", str(tmp_path / "out")])
        assert result.exit_code == 3, result.output
    for own in ("/no/such/python", str(tmp_path)):
        monkeypatch.setenv(SETTING, own)
        with pytest.raises(HostError, match=f"{own} is no program"):
            find_python()
    assert _left(tmp_path) == set()


def test_run_quantizes_calibrates_that_and_leaves_nothing_else(dense, tmp_path, stand_in):
    result = pipeline.run(JobOptions(model=str(dense), weights="gptq", **SHORT), tmp_path / "out", verify=False)
    assert [call[1] for call in stand_in()] == ["gptq"]
    assert _left(tmp_path) == {"out"}
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] != []
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["config_groups"]
    assert config["kv_cache_scheme"]
    record = json.loads((tmp_path / "out/weights_provenance.json").read_text())
    assert record["made"]["source"] == SourceCheckpoint.open(dense).fingerprint
    made = tmp_path / "quantized"
    quantize_checkpoint(SourceCheckpoint.open(dense), "gptq", made, None)
    assert result.scales.provenance[0]["model"]["fingerprint"] == SourceCheckpoint.open(made).fingerprint
    assert {path.stat().st_mode & 0o777 for path in made.glob("*.safetensors")} == {(made / "config.json").stat().st_mode & 0o777}


def test_an_interrupted_run_goes_on_with_the_weights_that_it_made(dense, tmp_path, stand_in, monkeypatch):
    options = JobOptions(model=str(dense), weights="gptq", **SHORT)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "collect_statistics", stop)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(options, tmp_path / "out", verify=False)
    assert _left(tmp_path) == {".out.weights"}
    pipeline.run(options, tmp_path / "out", verify=False)
    assert len(stand_in()) == 1
    assert _left(tmp_path) == {"out"}
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "collect_statistics", stop)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(options, tmp_path / "out", verify=False, force=True)
    pipeline.run(options.model_copy(update={"seed": 1}), tmp_path / "out", verify=False, force=True)  # other rows: other weights
    assert len(stand_in()) == 3


@pytest.mark.parametrize(
    ("does", "error", "said"),
    [
        ("fail", UsageError, "RuntimeError: the model has no layers"),
        ("die", HostError, "memory"),
        ("nothing", HostError, "ended without a result"),
    ],
)
def test_a_child_that_fails_is_one_line_and_nothing_is_left(dense, tmp_path, stand_in, monkeypatch, does, error, said):
    monkeypatch.setenv("STAND_IN", does)
    with pytest.raises(error, match=said) as refusal:
        quantize_checkpoint(SourceCheckpoint.open(dense), "fp8", tmp_path / "out", None)
    assert "\n" not in str(refusal.value)
    assert _left(tmp_path) == set()


def test_an_environment_without_llmcompressor_is_the_hosts_matter(dense, tmp_path, monkeypatch):
    monkeypatch.setenv(SETTING, sys.executable)  # this one has everything but that
    with pytest.raises(HostError, match=r"has no llmcompressor: `make llmcompressor`") as refusal:
        quantize_checkpoint(SourceCheckpoint.open(dense), "fp8", tmp_path / "out", None)
    assert "\n" not in str(refusal.value)
    assert _left(tmp_path) == set()


def test_a_link_out_of_the_checkpoint_is_refused_before_the_work(dense, tmp_path, stand_in):
    """`convert` reads no file behind one either."""
    (tmp_path / "secret").touch()
    (dense / "notes.txt").symlink_to(tmp_path / "secret")
    for command in (["quantize", dense, "--scheme", "fp8"], ["run", dense, "--weights", "fp8"], ["run", dense]):
        result = CliRunner().invoke(main, [*map(str, command), "--output", str(tmp_path / "out")])
        assert (result.exit_code, "outside the checkpoint" in result.stderr) == (2, True)
    foreign.awq(tmp_path / "awq")
    (tmp_path / "awq/model.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "awq/model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="outside the checkpoint"):
        convert_checkpoint(SourceCheckpoint.open(tmp_path / "awq"), tmp_path / "out")
    assert not stand_in()
    assert _left(tmp_path) == {"secret", "awq", "elsewhere"}


def test_towers_are_left_as_they_are():
    """By the child's own rule, on a model with an image tower and a projector."""
    outside = runpy.run_path(str(Path(llmcompressor_child.__file__)))["outside_the_language_model"]
    model = tiny_model("gemma3")
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = set(outside(model))
    assert {name.split(".")[1] for name in found - {"lm_head"}} == {"vision_tower"}
    assert {name for name in linear - found if "language_model" not in name} == set()
    assert outside(tiny_model("llama")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_child_ends_with_us_however_we_end(dense, tmp_path, stand_in, number):
    command = [sys.executable, "-m", "calibrate", "quantize", str(dense), "--scheme", "fp8", "--output", str(tmp_path / "out")]
    ours = subprocess.Popen(command, env=os.environ | {"STAND_IN": "wait"}, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while not stand_in() and time.monotonic() < deadline:
        time.sleep(0.1)
    (child,) = (int(call[0]) for call in stand_in())
    ours.send_signal(number)
    _, said = ours.communicate(timeout=60)
    if number == signal.SIGINT:
        assert ours.returncode == 130
        assert said.decode().strip().endswith("interrupted")
        assert _left(tmp_path) == set()
    assert wait_gone(child)
    assert not (tmp_path / "out").exists()


def test_what_is_quantized_or_calibrated_already_is_refused(dense, tmp_path, stand_in):
    foreign.awq(tmp_path / "awq")
    with pytest.raises(UsageError, match="quantized already"):
        quantize_checkpoint(SourceCheckpoint.open(tmp_path / "awq"), "fp8", tmp_path / "out", None)
    calibrated = pipeline.run(JobOptions(model=str(dense), **SHORT), tmp_path / "calibrated", verify=False).written.path
    with pytest.raises(UsageError, match="is calibrated"):
        quantize_checkpoint(SourceCheckpoint.open(calibrated), "fp8", tmp_path / "out", None)
    assert not stand_in()


def test_run_converts_by_itself_and_the_result_is_that_of_two_commands(tmp_path):
    foreign.gptq(tmp_path / "gptq", symmetric=False)
    result = pipeline.run(JobOptions(model=str(tmp_path / "gptq"), **SHORT), tmp_path / "out", verify=False)
    assert _left(tmp_path) == {"gptq", "out"}
    converted = convert_checkpoint(SourceCheckpoint.open(tmp_path / "gptq"), tmp_path / "converted")
    twice = pipeline.run(JobOptions(model=str(converted.path), **SHORT), tmp_path / "twice", verify=False)
    assert {name: array.tolist() for name, array in result.written.tensors.items()} == {
        name: array.tolist() for name, array in twice.written.tensors.items()
    }
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("out", "twice")]
    assert files[0] == files[1]


def test_run_says_before_the_work_that_vllm_would_not_load_activation_order(tmp_path):
    foreign.gptq(tmp_path / "gptq", desc_act=True)
    result = CliRunner().invoke(main, ["run", str(tmp_path / "gptq"), "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["gptq"]
    done = pipeline.run(JobOptions(model=str(tmp_path / "gptq"), **SHORT), tmp_path / "out", verify=False)
    (group,) = json.loads((done.written.path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["weights"]["actorder"] == "group"


def _installed() -> str:
    try:
        find_python()
    except HostError as error:
        return str(error)
    return ""


@pytest.mark.llmcompressor
@pytest.mark.skipif(bool(_installed()), reason=_installed())
def test_llmcompressor_quantizes_on_our_rows_to_equal_bytes(dense, tmp_path):
    source, corpus = SourceCheckpoint.open(dense), rows_corpus([24, 30, 17], seed=3)
    first, second = (quantize_checkpoint(source, "awq", tmp_path / name, corpus) for name in ("first", "second"))
    assert first.group_size == 128
    assert (first.path / "model.safetensors").read_bytes() == (second.path / "model.safetensors").read_bytes()
    record = json.loads((first.path / "weights_provenance.json").read_text())
    assert record["made"] == made_from(source, "awq", corpus, 0)
    assert record["versions"]["compressed_tensors"].startswith("0.19")
    assert (first.path / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    config = json.loads((first.path / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((dense / "config.json").read_text())
    assert "weight_zero_point" in " ".join(load_file(first.path / "model.safetensors"))
    result = pipeline.run(JobOptions(model=str(first.path), **SHORT), tmp_path / "out", verify=False)
    assert all(np.isfinite(array).all() and (array > 0).all() for array in result.written.tensors.values())


def test_every_scheme_is_told_apart():
    from calibrate.cli_weights import SCHEMES as offered

    assert list(offered) == list(SCHEMES)
