"""Many processes on one collection: real torchrun, gloo, the same bytes as one process; deaths and failures in one line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from calibrate.cli import main
from calibrate.collect.observer import Observer
from calibrate.collect.state import _disjoint
from calibrate.collect.team import TeamError, _disband, _Ranks, _shares
from calibrate.errors import HostError, UsageError
from calibrate.model import probe_layout
from calibrate.ranks import Rank, rank_here
from calibrate.statistics import CACHE_DTYPES
from tests.tiny import tiny_checkpoint, tiny_model

RARE = "~"  # stands in one document only


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model and text, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("team")
    tiny_checkpoint(folder / "model")
    rows = [f"{number} " + "alpha beta gamma " * 20 for number in range(24)]
    rows[7] = rows[7].replace("beta", RARE)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank has
    made = CliRunner().invoke(main, words(folder, "one.safetensors"))
    torch.set_num_threads(threads)
    assert made.exit_code == 0, made.stderr
    return folder


def words(folder: Path, output: str, *more: str) -> list[str]:
    common = ["--sequence-length", "128", "--samples", "40", "--tokens-per-batch", "128", "--device", "cpu", "--dtype", "float32", "--kvarn"]
    return ["collect", str(folder / "model"), "--data", str(folder / "text.jsonl"), *common, "--save-every", "0", "-o", str(folder / output), *more]


def torchrun(processes: int, command: list[str], *where: str) -> subprocess.Popen:
    """`where`: torchrun's options of several hosts; one host by itself without."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *(where or ["--standalone"]), "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, "-m", "calibrate", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )


def ours(stderr: str) -> list[str]:
    """Our error lines among torchrun's own."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_four_processes_write_the_bytes_of_one(place):
    process = torchrun(4, words(place, "four.safetensors", "--json"))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert (place / "four.safetensors").read_bytes() == (place / "one.safetensors").read_bytes()
    assert json.loads(stdout)["counted"]["tokens"] > 4000  # one result, not four
    assert stderr.count("tokens, ") == 1  # one meter, which ends at the total
    assert re.search(r"calibrating ([\d,]+)/\1 tokens", stderr)
    assert left(place) == []


def test_two_launchers_as_on_two_hosts_write_the_bytes_of_one(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "hosts"]
    hosts = [torchrun(1, words(place, "hosts.safetensors"), *where) for _ in range(2)]
    ended = [host.communicate(timeout=180) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], ended
    assert (place / "hosts.safetensors").read_bytes() == (place / "one.safetensors").read_bytes()
    assert left(place) == []


def test_a_killed_rank_ends_the_job_and_any_number_of_processes_goes_on(place):
    process = torchrun(2, words(place, "killed.safetensors"))
    state = place / ".killed.safetensors.collect-state.rank1.safetensors"
    deadline = time.monotonic() + 200
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(_process_of_rank(process.pid, 1), signal.SIGKILL)
    stderr = process.communicate(timeout=100)[1]
    assert process.returncode != 0
    assert len(ours(stderr)) == 1, stderr
    assert re.match(r"error: rank 1 of 2 \(process \d+ of .*\) ended without a word: killed, .* finished work is kept", ours(stderr)[0])
    assert not (place / "killed.safetensors").exists()
    assert left(place) == [".killed.safetensors.collect-state.rank1.safetensors", ".killed.safetensors.collect-state.safetensors"]

    process = torchrun(3, words(place, "killed.safetensors"))
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 0, stderr
    assert re.search(r"resuming: [1-9][\d,]* of", stderr)
    assert (place / "killed.safetensors").read_bytes() == (place / "one.safetensors").read_bytes()
    assert left(place) == []


def _process_of_rank(launcher: int, rank: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    named = [int(child) for child in children if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes()]
    assert len(named) == 1
    return named[0]


def test_a_rank_that_fails_is_named_once_and_nothing_is_written(place, tmp_path):
    tiny_checkpoint(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    weights["model.embed_tokens.weight"][vocabulary[RARE]] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.jsonl").write_bytes((place / "text.jsonl").read_bytes())
    process = torchrun(2, words(tmp_path, "nan.safetensors"))
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    assert len(ours(stderr)) == 1, stderr
    assert re.match(r"error: rank [01] of 2: K of layer 0 .* is infinite or NaN on sample \d+ \(.*text.jsonl:8\)", ours(stderr)[0])
    assert not (tmp_path / "nan.safetensors").exists()
    assert left(tmp_path) == []  # the other rank's finished work is of no use: the same run meets the same NaN


def environment(monkeypatch, **changes: str) -> None:
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"} | changes).items():
        monkeypatch.setenv(name, value)


def test_other_commands_are_refused(monkeypatch, place):
    environment(monkeypatch, RANK="0")
    result = CliRunner().invoke(main, ["run", str(place / "model")])
    assert result.exit_code == 2
    assert "`collect` only" in result.stderr


def test_what_the_environment_says(monkeypatch):
    environment(monkeypatch, GROUP_RANK="0")
    assert rank_here() == Rank(1, 2, 1, 0)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="RANK is 2 of WORLD_SIZE 2"):
        rank_here()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="whole numbers"):
        rank_here()
    monkeypatch.delenv("LOCAL_RANK")  # a scheduler that sets a part of them is no launcher
    assert rank_here() == Rank()


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_a_port_that_nobody_answers_at_is_refused_at_once(monkeypatch, place, port):
    """torchrun --master-port 0 hands the 0 on to its processes."""
    environment(monkeypatch, RANK="0", MASTER_PORT=port)
    result = CliRunner().invoke(main, words(place, "port.safetensors"))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: MASTER_PORT is {port}, where nobody answers: give torchrun --standalone")


def test_a_rank_takes_no_named_gpu():
    ranks = _Ranks(Rank(1, 2, 1), torch.distributed.HashStore())
    with pytest.raises(UsageError, match="each rank takes its own GPU"):
        ranks.device("cuda:1")
    if torch.cuda.device_count() < 2:
        with pytest.raises(HostError, match="process 2 of its host"):
            ranks.device("cuda")


def test_each_rank_takes_its_own_gpu_and_nccl(monkeypatch):
    """What is asked of torch where there are two GPUs; two real ones are used by `benchmarks/gpu/two_gpus.py`."""
    asked = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(current=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **more: asked.update(more, backend=backend))
    monkeypatch.setattr(_Ranks, "meet", lambda self, name: asked.update(met=name))  # the three others are not here
    assert _Ranks(Rank(3, 4, 1, 1), torch.distributed.HashStore()).device("cuda") == "cuda:1"
    assert (asked["backend"], asked["current"], asked["device_id"]) == ("nccl", "cuda:1", torch.device("cuda:1"))
    assert (asked["rank"], asked["world_size"]) == (3, 4)
    assert _Ranks(Rank(3, 4, 1, 1), torch.distributed.HashStore()).device("cpu") == "cpu"
    assert (asked["backend"], asked["device_id"]) == ("gloo", None)


def test_a_rank_that_died_before_the_ranks_connect_is_named():
    """gloo would wait for it until its time is up."""
    store, dead = torch.distributed.HashStore(), subprocess.Popen(["true"])
    dead.wait()
    store.set("process/1", json.dumps([socket.gethostname(), dead.pid]))
    with pytest.raises(TeamError, match=r"rank 1 of 2 .* ended without a word"):
        _Ranks(Rank(0, 2), store).device("cpu")


@pytest.mark.parametrize("place", ["auto", "cuda:0"])
def test_a_model_is_not_spread_under_torchrun(place):
    with pytest.raises(UsageError, match=f"--device {place} names one place for all ranks"):
        _Ranks(Rank(0, 2), torch.distributed.HashStore()).device(place)


@pytest.mark.parametrize(("backend", "waiting", "ended"), [("nccl", False, "aborted"), ("nccl", True, "destroyed"), ("gloo", False, "destroyed")])
def test_after_a_failure_nccl_does_not_wait_for_ranks_that_may_be_gone(monkeypatch, backend, waiting, ended):
    calls = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", lambda: calls.append("aborted"))
    _disband(waiting=waiting)
    assert calls == [ended]


def test_shares_hold_everything_once_and_weigh_alike():
    costs = np.random.default_rng(0).integers(100, 2000, 200).tolist()
    for size in (1, 2, 3, 7):
        shares = _shares(costs, size)
        assert sorted(number for share in shares for number in share) == list(range(200))
        loads = [sum(costs[number] for number in share) for share in shares]
        assert max(loads) - min(loads) <= max(costs)
    assert _shares([5], 3) == [[0], [], []]


def test_no_batch_is_counted_twice_when_states_overlap():
    """The fullest file wins; what shares a batch with it is left out; each is loaded by its own rank, else by the first that sees it."""
    path = Path("x.safetensors")
    whole = {"x.safetensors": [1, 1, 0, 0, 0], "x.rank1.safetensors": [0, 1, 1, 1, 0], "x.rank7.safetensors": [0, 0, 0, 0, 1]}
    chosen = [(name, mask.tolist(), owner) for name, mask, owner in _disjoint([{"x.safetensors": [1, 1, 0, 0, 0]}, whole], path)]
    assert chosen == [
        ("x.rank1.safetensors", [False, True, True, True, False], 1),
        ("x.rank7.safetensors", [False, False, False, False, True], 1),
    ]
    assert _disjoint([{}, {}], path) == []


def test_a_rank_without_batches_adds_zeros():
    model = tiny_model("gemma3n_text")  # with layers that only read
    layout = probe_layout(model)
    observer = Observer(layout, CACHE_DTYPES["bfloat16"], second_moments=True)
    calls = []
    observer.all_reduce(calls.append, calls.append, {layer.index: model.device for layer in layout.layers})
    seen = observer.layers()
    assert all(tensor.is_contiguous() for tensor in calls)
    assert {(index, kind) for index, kinds in seen.items() for kind in kinds} == {
        (layer.index, kind) for layer in layout.layers for kind in layer.kinds
    }
    assert not any(one.counts.any() for kinds in seen.values() for one in kinds.values())
    assert len(observer.missing()) == sum(len(layer.kinds) for layer in layout.layers)
