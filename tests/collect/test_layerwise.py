"""Layer by layer is the whole model, byte for byte; chosen by sizes; killed and resumed; refused where it cannot be."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from calibrate import host
from calibrate.cli import main
from calibrate.collect import collect, collect_streamed, plan_streaming
from calibrate.collect.layerwise import HiddenStates
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "phi3", "gpt2", "opt", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3",
    "qwen3_next", "nemotron_h",
)  # fmt: skip
ROWS = rows_corpus([40, 33, 17, 29, 8])


def _streamed(source, folder, *, in_memory: bool, second_moments: bool = False):
    plan = replace(plan_streaming(source, ROWS, torch.float32, "always"), in_memory=in_memory)
    return collect_streamed(source, ROWS, plan, folder, dtype=torch.float32, tokens_per_batch=64, second_moments=second_moments)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_as_the_whole_model(family, tmp_path):
    """Several shards; hidden states in memory and in files; families whose layers differ in masks, rotary embeddings, caches or experts."""
    path = tiny_checkpoint(tmp_path / "model", family, shard="200KB")
    run = replace(collect_run(path, ROWS), second_moments=True)
    whole = collect(run)
    for in_memory in (True, False):
        streamed = _streamed(run.source, tmp_path / "folder", in_memory=in_memory, second_moments=True)
        assert streamed.digest() == whole.digest()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", "read the keys and values of earlier ones"),
        ("gemma4_text", "of earlier ones"),
        ("gptj", "hands on more than its hidden state"),
    ],
)
def test_what_cannot_be_streamed_is_refused(family, reason, tmp_path):
    source = SourceCheckpoint.open(tiny_checkpoint(tmp_path / "model", family))
    with pytest.raises(UsageError, match=reason):
        _streamed(source, tmp_path / "folder", in_memory=True)
    assert not (tmp_path / "folder").exists()


def test_chosen_by_the_sizes(llama):
    source = SourceCheckpoint.open(llama)

    def plan(memory, mode="auto", dtype=torch.float32):
        return plan_streaming(source, ROWS, dtype, mode, memory=memory)

    stored = sum(tensor.numel() for tensor in load_file(llama / "model.safetensors").values())
    edge = 4 * stored + 600_000_000  # all weights in float32, and room to work
    assert plan(edge + 5000) is None  # what the tied head and rotary tables add is below that
    assert plan(edge - 5000) is not None
    assert plan(edge - 5000, dtype=torch.bfloat16) is None
    assert plan(0, "never") is None
    assert plan(10**12, "always").in_memory
    assert not plan(0).in_memory
    text = str(plan(600_500_000))
    assert text.startswith("model 0.6 MB, memory 0.6 GB: layer by layer, largest layer 0.2 MB, hidden states 0.1 MB in ")


def test_memory_is_what_cgroups_and_limits_leave(tmp_path):
    assert 0 < host.available_memory() <= host.total_memory()
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    assert host._cgroup_left(tmp_path, "memory.max", "memory.current", "inactive_file") == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert host._cgroup_left(tmp_path, "memory.max", "memory.current", "inactive_file") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process has mapped is read from Linux's /proc")
@pytest.mark.parametrize(("limit", "counted"), [(resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")])
def test_memory_is_what_the_process_may_still_map(limit, counted, monkeypatch):
    mapped = next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(counted))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (mapped + 10**6 if which == limit else resource.RLIM_INFINITY,) * 2)
    assert host.available_memory() <= 2 * 10**6  # the heap may shrink in between
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 if which == limit else resource.RLIM_INFINITY,) * 2)
    assert host.available_memory() == 0


def test_many_processes_and_gpus_are_refused(llama, tmp_path):
    words = ["collect", str(llama), "-o", str(tmp_path / "out"), "--data", "random", "--samples", "1", "--sequence-length", "8"]
    result = CliRunner().invoke(main, [*words, "--device", "auto", "--streaming", "always"])
    assert result.exit_code == 2
    assert "--streaming always is for one process on the CPU" in result.stderr


def test_infinity_names_the_layer_and_leaves_nothing(tmp_path):
    path = tiny_checkpoint(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][33] = float("inf")  # head 1 of 2, head_dim 32
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"V of layer 1 \(model\.layers\.1\.self_attn\), head 1, .* samples .*rows:"):
        _streamed(SourceCheckpoint.open(path), tmp_path / "folder", in_memory=True)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_interrupted_run_goes_on_at_the_last_finished_layer(in_memory, tmp_path, monkeypatch):
    """Ctrl-C in layer 2 of 4: the state holds two layers, and only the others run again."""
    source = SourceCheckpoint.open(tiny_checkpoint(tmp_path / "model", num_hidden_layers=4))
    expected = _streamed(source, tmp_path / "expected", in_memory=True)
    got: list[tuple[int, int]] = []

    def get(self, finished, number):
        got.append((finished, number))
        if len(got) == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return _GET(self, finished, number)

    monkeypatch.setattr(HiddenStates, "get", get)
    batches = len(collect_run(tmp_path / "model", ROWS).batches)
    stop_at = batches + 2  # in the layer that takes what two layers gave
    with pytest.raises(KeyboardInterrupt):
        _streamed(source, tmp_path / "folder", in_memory=in_memory)
    assert {file.name for file in (tmp_path / "folder").iterdir()} >= {"hidden-2.bin", "state.safetensors"}
    got.clear()
    stop_at = -1
    assert _streamed(source, tmp_path / "folder", in_memory=in_memory).digest() == expected.digest()
    assert got[0] == (2, 0)
    assert len(got) == 2 * batches


_GET = HiddenStates.get


def test_killed_runs_resume_to_the_same_bytes(tmp_path):
    """kill -9 of the real command, hidden states in memory and saved after every layer; nothing but the output is left."""
    model = tiny_checkpoint(tmp_path / "model", num_hidden_layers=8)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " + "alpha beta gamma " * 20}) + "\n" for number in range(24)))
    words = ["collect", str(model), "--data", str(text), "--sequence-length", "128", "--samples", "40", "--tokens-per-batch", "128"]
    words += ["--device", "cpu", "--dtype", "float32", "--save-every", "0"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert CliRunner().invoke(main, [*words, "-o", str(tmp_path / "expected")]).exit_code == 0
    torch.set_num_threads(threads)
    command = [sys.executable, "-m", "calibrate", *words, "--streaming", "always", "-o", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    state = tmp_path / ".killed.collect-state.layers" / "state.safetensors"
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        before = state.stat().st_mtime_ns if state.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert state.exists(), "every run ended before it could be killed"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "of 8 layers are done" in done.stderr
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_plan_is_printed_first(llama, tmp_path):
    words = ["collect", str(llama), "-o", str(tmp_path / "out"), "--data", "random", "--samples", "1", "--sequence-length", "8", "--device", "cpu"]
    result = CliRunner().invoke(main, [*words, "--streaming", "always"])
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith(("model ", "calibrating"))]
    assert "layer by layer, largest layer" in lines[0]
    assert lines[-1].startswith("calibrating")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["out"]
