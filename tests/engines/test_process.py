"""The child runner, with small modules in the engine's place."""

import os
import signal
import time
from pathlib import Path

import pytest

from calibrate.engines.process import EngineRefused, decisive_line, run_child
from calibrate.errors import HostError

SERVE = "from calibrate.engines.child import serve\n"


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Makes a module out of source text and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def make(source: str) -> str:
        (tmp_path / "fake_engine.py").write_text(source)
        return "fake_engine"

    return make


def gone(pid: int) -> bool:
    """No such process, or only its unreaped remains (a test container may have no init that reaps)."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return gone(pid)


def test_result_comes_back_and_nothing_is_left(child, tmp_path):
    assert run_child(child(SERVE + "serve(lambda job: [{'twice': job['n'] * 2}])"), {"n": 21}, 60) == ({"twice": 42}, None)
    assert not list(tmp_path.glob("kv-calibrate-engine-*"))


def test_insecure_serialization_is_never_inherited(child, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    source = SERVE + "import os\nserve(lambda job: [{'set': 'VLLM_ALLOW_INSECURE_SERIALIZATION' in os.environ}])"
    assert run_child(child(source), {}, 60)[0] == {"set": False}


def test_error_is_quoted_and_the_log_kept(child):
    with pytest.raises(EngineRefused, match=r"vLLM failed: ValueError: There is no module or parameter named x; its log: (.+)$") as caught:
        run_child(child("raise ValueError('There is no module or parameter named x')"), {}, 60)
    assert "Traceback" in Path(str(caught.value).rpartition("its log: ")[2]).read_text()


@pytest.mark.parametrize(
    ("raised", "lacks"),
    [
        ("ValueError('Failed to find a kernel that can implement the NVFP4 linear layer. Reasons: CutlassNvFp4 requires CUDA')", "NVFP4"),
        ("RuntimeError('_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s).')", "static_scaled_fp8_quant"),
    ],
)
def test_weights_without_a_kernel_are_the_hosts_lack(child, raised, lacks):
    with pytest.raises(HostError, match=rf"no kernel on this host .*\({lacks}\): verify it on a GPU host") as caught:
        run_child(child(f"raise {raised}"), {}, 60)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_what_was_reported_before_a_failure_stays(child):
    value, failed = run_child(child(SERVE + "def work(job):\n    yield {'a': 1}\n    raise RuntimeError('later')\nserve(work)"), {}, 60)
    assert value == {"a": 1}
    assert isinstance(failed, EngineRefused)
    assert "RuntimeError: later" in str(failed)


@pytest.mark.parametrize(("number", "message"), [("SIGKILL", "most likely for memory"), ("SIGILL", "an instruction")])
def test_death_by_signal(child, number, message):
    with pytest.raises(HostError, match=message):
        run_child(child(f"import os, signal; os.kill(os.getpid(), signal.{number})"), {}, 60)


HANG = """
import os, pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {grandchild.pid}")
"""


def test_timeout_kills_the_whole_group(child, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    with pytest.raises(HostError, match="did not finish within 3 s"):
        run_child(child(HANG + "time.sleep(600)"), {}, 3)
    assert all(wait_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_ctrl_c_kills_the_whole_group(child, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    interrupt = f"os.kill({os.getpid()}, {int(signal.SIGINT)})\n"
    with pytest.raises(KeyboardInterrupt):
        run_child(child(HANG + interrupt + "time.sleep(600)"), {}, 60)
    assert all(wait_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_orphans_follow_their_parent(child, tmp_path, monkeypatch):
    """The calling process is killed outright: the engine notices and goes, with what it started."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    child(SERVE + "def work(job):\n" + "".join(f"    {line}\n" for line in HANG.strip().splitlines()) + "    time.sleep(600)\nserve(work)")
    caller = os.fork()
    if caller == 0:
        try:
            run_child("fake_engine", {}, 60)
        finally:
            os._exit(1)
    pids = tmp_path / "pids"
    until = time.monotonic() + 30
    while (not pids.exists() or len(pids.read_text().split()) < 2) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    assert all(wait_gone(int(pid)) for pid in pids.read_text().split())


def test_root_error_is_found_among_its_echoes():
    log = """
(MainProcess pid=1) WARNING 01-01 00:00:00 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:900] ValueError: There is no module or parameter named 'x.k_scale' in Llama
(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1512] RuntimeError: cancelled
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    assert decisive_line(log) == "ValueError: There is no module or parameter named 'x.k_scale' in Llama"
    assert decisive_line("RuntimeError: cancelled") == "RuntimeError: cancelled"
    assert decisive_line("nothing of use") == ""


def test_pydantic_detail_is_quoted_too():
    log = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no such architecture"
    assert decisive_line(log) == "ValidationError: 1 validation error for ModelConfig Value error, no such architecture"
