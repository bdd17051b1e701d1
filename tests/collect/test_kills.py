"""kill -9 at random moments of the real command, whole, layer by layer and in two processes: the same bytes in the end, and never half a checkpoint.

Moments are drawn over the duration of a run, and over each of its stages, as a run that nobody killed showed them. Each run that was killed is
started again, and perhaps killed again, until it comes to its end.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import TCPStore

from calibrate.artefact import sha256_file
from tests.tiny import tiny_checkpoint

KILLS = {"whole": 12, "layers": 4, "team": 4}  # 20
STAGES = ("run", "collect", "solve", "write")
WAIT = 100.0


class Commands:
    """Starts commands in `command_server`, and hears of their stages."""

    def __init__(self, log: Path) -> None:
        self._ear, mouth = os.pipe()
        self._heard, self._log = "", log
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        alone = {name: value for name, value in os.environ.items() if name not in names}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.collect.command_server", str(mouth)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(mouth,),
            env=alone | {"OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        os.close(mouth)
        assert json.loads(self._server.stdout.readline())["ready"]

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(WAIT)
        os.close(self._ear)

    def start(self, words: list[str], **environment: str) -> int:
        self._heard = ""
        return self._ask(start=words, environment=environment, log=str(self._log))["process"]

    def wait(self, process: int) -> int:
        """Its exit code, minus the signal's number where one ended it."""
        code = self._ask(wait=process, seconds=WAIT)["exit"]
        assert code is not None, self.told()
        return code

    def _ask(self, **request: object) -> dict:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def hear(self, *words: str) -> dict[str, float]:
        """Wait for one of these words; word → time of all that was said since the start."""
        deadline = time.monotonic() + WAIT
        while True:
            said = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in self._heard.splitlines(keepends=True) if line.endswith("\n")}
            if said.keys() & set(words):
                return said
            ready, _, _ = select.select([self._ear], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.told()
            self._heard += os.read(self._ear, 1 << 16).decode()

    def told(self) -> str:
        return self._log.read_text()[-3000:]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    server = Commands(tmp_path_factory.mktemp("log") / "log")
    yield server
    server.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory, commands):
    """A folder with a model and text, the files that a run made of them that nobody killed, and the seconds of its stages."""
    folder = tmp_path_factory.mktemp("kills")
    tiny_checkpoint(folder / "model", num_hidden_layers=4, shard="100KB")
    rows = [json.dumps({"text": f"{number} " + "alpha beta gamma " * 20}) + "\n" for number in range(24)]
    (folder / "text.jsonl").write_text("".join(rows))
    process = commands.start(["run", *words(folder), "--no-verify", "-o", str(folder / "expected")])
    said = commands.hear("end run")
    assert commands.wait(process) == 0, commands.told()
    return folder, files(folder / "expected"), {stage: said[f"end {stage}"] - said[f"begin {stage}"] for stage in STAGES}


def words(folder: Path) -> list[str]:
    data = ["--data", str(folder / "text.jsonl"), "--sequence-length", "160", "--samples", "40", "--tokens-per-batch", "160"]
    return [str(folder / "model"), *data, "--device", "cpu", "--dtype", "float32", "--kvarn", "--save-every", "0"]


def files(folder: Path) -> dict[str, str]:
    """Digest of every file of a checkpoint."""
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("kind", ["whole", "layers"])
def test_a_killed_job_goes_on_to_the_same_checkpoint(kind, commands, reference, tmp_path):
    folder, expected, seconds = reference
    more = ["--streaming", "always"] if kind == "layers" else []
    rng, kills, resumed = np.random.default_rng(0), 0, 0
    while kills < KILLS[kind]:
        before, output = kills, tmp_path / str(len(list(tmp_path.iterdir()))) / "out"
        output.parent.mkdir()
        while not output.exists():
            process = commands.start(["run", *words(folder), *more, "--no-verify", "-o", str(output)])
            if kills < KILLS[kind]:
                stage = STAGES[kills % len(STAGES)]
                commands.hear(f"begin {stage}", "end run")
                time.sleep(seconds[stage] * rng.random())
                os.kill(process, signal.SIGKILL)
            code = commands.wait(process)
            assert code == -signal.SIGKILL or (code == 0 and output.exists()), commands.told()
            assert not output.exists() or files(output) == expected
            kills += code != 0
        resumed += kills > before + (code != 0)
        assert code or [path.name for path in output.parent.iterdir()] == ["out"]
    assert resumed


def test_killed_ranks_go_on_to_the_same_statistics(commands, reference, tmp_path):
    """Two processes with torchrun's environment and store (`test_team.py` has the launcher itself); one of them or both are killed."""
    folder, expected, seconds = reference
    rng, kills, resumed = np.random.default_rng(0), 0, 0
    while kills < KILLS["team"]:
        before, output = kills, tmp_path / str(len(list(tmp_path.iterdir()))) / "statistics"
        output.parent.mkdir()
        while not output.exists():
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # the launcher keeps it, and outlives the ranks
            ranks = _two_ranks(commands, [*words(folder), "-o", str(output)], store)
            victims = []
            if kills < KILLS["team"]:
                commands.hear("begin collect", "end run")
                time.sleep(seconds["collect"] * rng.random())
                victims = (ranks, ranks[:1], ranks[1:])[kills % 3]
                for process in victims:
                    os.kill(process, signal.SIGKILL)
            codes = [commands.wait(process) for process in victims]
            for process in ranks if victims else ():  # as torchrun does; to one that has ended it means nothing
                if process not in victims:
                    time.sleep(0.1)
                    os.kill(process, signal.SIGTERM)
            codes += [commands.wait(process) for process in ranks if process not in victims]
            assert any(codes) or output.exists(), commands.told()
            assert not output.exists() or sha256_file(output) == expected["kv_calibration/statistics.safetensors"]
            kills += -signal.SIGKILL in codes
        resumed += kills > before + any(codes)
        assert any(codes) or [path.name for path in output.parent.iterdir()] == ["statistics"]
    assert resumed


def _two_ranks(commands: Commands, words: list[str], store: TCPStore) -> list[int]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [commands.start(["collect", *words], RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in (0, 1)]
