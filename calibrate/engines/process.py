"""One engine child: its own process group, its log in a file, no orphans, and one clear line when it fails."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import calibrate
from calibrate.errors import CalibrateError, CheckFailed, HostError

_ERROR = re.compile(r"(?:^|\]\s|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.+)$")
# These say only that another process, whose error stands above, has failed.
_ECHO = re.compile(r"Engine core initialization failed|EngineCore encountered|cancelled|WorkerProc initialization failed")
_HEADLINE = re.compile(r"\d+ validation errors? for ")
_DEATH = re.compile(r"Worker proc \S+ died unexpectedly \(exit code: (-?\d+)\)|Fatal Python error: (.+)$")
# No kernel for a kind of weights; or a CPU build that names an operation without having it.
_NO_KERNEL = re.compile(r"Failed to find a kernel that can implement the (\S+) linear layer|_C::(\w+)\(\) expected at most 0 argument")
_GRACE_SECONDS = 5


class EngineRefused(CheckFailed):
    """The engine ran and would not take the checkpoint; the message quotes it and names the log."""


def run_child(
    module: str, job: dict[str, Any], timeout: float, extra_env: dict[str, str] | None = None
) -> tuple[dict[str, Any], CalibrateError | None]:
    """Run `python -m module JOB.json RESULT.json` and return the last result it wrote, and how it failed after that.

    The temporary folder with the log is removed on success and kept, and named in the error, on failure. Ctrl-C, a timeout or any other
    exception kills the child's whole process group before it propagates; should this process die itself, the child notices and goes too.

    Raises:
        EngineRefused: the child failed before any result; quotes its decisive error.
        HostError: the same, but it was killed for memory, died of an illegal instruction, or did not finish within `timeout` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="kv-calibrate-engine-"))
    job_file, result, log = folder / "job.json", folder / "result.json", folder / "engine.log"
    alive_read, alive_write = os.pipe()
    try:
        job_file.write_text(json.dumps(job | {"alive_fd": alive_read}), encoding="utf-8")
        code = _wait([sys.executable, "-m", module, str(job_file), str(result)], log, engine_environment(extra_env or {}), timeout, alive_read)
    finally:
        os.close(alive_write)
        os.close(alive_read)
    if not result.is_file():
        raise failure(code, log)
    value = json.loads(result.read_text(encoding="utf-8"))
    if code != 0:
        return value, failure(code, log)
    for file in (job_file, result, log):
        file.unlink(missing_ok=True)
    folder.rmdir()
    return value, None


def _wait(command: list[str], log: Path, env: dict[str, str], timeout: float, alive_fd: int) -> int:
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env, start_new_session=True, pass_fds=(alive_fd,)
        )  # fmt: skip
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        raise HostError(f"vLLM did not finish within {timeout:g} s; its log: {log}") from None
    finally:
        end_group(child)


def end_group(child: subprocess.Popen) -> None:
    """End what is left of the child's group: vLLM's engine and workers outlive a child that was killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(_GRACE_SECONDS if number == signal.SIGTERM else None)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def engine_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with what an engine child needs, and without what must not reach it."""
    env = {name: value for name, value in os.environ.items() if name not in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_CPU_KVCACHE_SPACE")}
    root = str(Path(calibrate.__file__).resolve().parents[1])  # vLLM's spawned workers import our extension too
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONFAULTHANDLER": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return env | extra


def failure(code: int, log: Path) -> EngineRefused | HostError:
    """The error for a child that ended with `code`, from the decisive line of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    death = -code if code < 0 else worker_signal(text)
    if death == signal.SIGKILL:
        return HostError(f"vLLM was killed, most likely for memory; its log: {log}")
    if death == signal.SIGILL:
        return HostError(f"vLLM used an instruction that this CPU does not have; its log: {log}")
    if lacking := _NO_KERNEL.search(text):
        return HostError(
            f"vLLM has no kernel on this host for the checkpoint's weights ({lacking[1] or lacking[2]}): verify it on a GPU host; its log: {log}"
        )
    return EngineRefused(f"vLLM failed: {decisive_line(text) or f'exit code {code}'}; its log: {log}")


def worker_signal(text: str) -> int | None:
    """The signal that ended one of vLLM's workers, as its log tells; None when none died."""
    codes = [int(found[1]) for found in map(_DEATH.search, text.splitlines()) if found and found[1]]
    return -codes[0] if codes and codes[0] < 0 else None


def decisive_line(text: str) -> str:
    """The first root error of a vLLM log, `Type: message`; later ones repeat it from other processes. "" when there is none."""
    lines = text.splitlines()
    found = [(number, match) for number, match in enumerate(map(_ERROR.search, lines)) if match and " WARNING " not in match.string]
    for number, match in found:
        if not _ECHO.search(match[2]):
            # pydantic says what is wrong on the line after its headline
            detail = lines[number + 1].rpartition("] ")[2].strip() if _HEADLINE.match(match[2]) and number + 1 < len(lines) else ""
            return " ".join([f"{match[1].rpartition('.')[2]}:", match[2].strip(), detail]).strip()
    death = next(filter(None, map(_DEATH.search, lines)), None)
    return death[0] if death else (found[0][1][0].strip() if found else "")
