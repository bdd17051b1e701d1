"""llmcompressor as a process: found, run, followed, and ended with us."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import calibrate
from calibrate.engines.process import decisive_line, end_group
from calibrate.errors import HostError, UsageError
from calibrate.progress import note, stderr

SETTING = "KV_CALIBRATE_LLMCOMPRESSOR"
_CHILD = Path(__file__).with_name("llmcompressor_child.py")
_BAR = re.compile(r"([^\r\n]*?):?\s+\d+%\|[^|\r\n]*\|\s*(\d+)/(\d+)")  # tqdm's
_SECONDS_BETWEEN_LINES = 15.0
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(llmcompressor|compressed_tensors|transformers|torch|numpy)'")


def find_python() -> Path:
    """The Python of the environment that has llmcompressor.

    Raises:
        HostError: there is none; the message says how to make it.
    """
    if own := os.environ.get(SETTING):
        if not (Path(own).is_file() and os.access(own, os.X_OK)):
            raise HostError(f"{SETTING}={own} is no program that can be run: give the Python of an environment with llmcompressor")
        return Path(own)
    for root in _roots():
        if (root / ".venv-llmcompressor/.ready").is_file():
            return root / ".venv-llmcompressor/bin/python"
    raise HostError(f"weights are quantized by llmcompressor, which needs an environment of its own: `make llmcompressor` makes it, or set {SETTING}")


def _roots() -> tuple[Path, ...]:
    """Where `make` may have put the environment: where the user is, and the project itself where it is installed from its sources."""
    return Path.cwd(), Path(calibrate.__file__).resolve().parents[1]


def run_llmcompressor(job: dict[str, Any], subject: Path) -> dict[str, Any]:
    """Run the child on `job` and return what it reports. Its progress goes to stderr; it ends when this process ends, however that ends.

    Raises:
        HostError: no environment, or killed, most likely for memory. UsageError: llmcompressor would not quantize this model.
    """
    python = find_python()
    folder = Path(tempfile.mkdtemp(prefix="kv-calibrate-weights-"))
    job_file, result, log = folder / "job.json", folder / "result.json", folder / "llmcompressor.log"
    alive_read, alive_write = os.pipe()
    try:
        job_file.write_text(json.dumps(job | {"alive_fd": alive_read, "result": str(result)}), encoding="utf-8")
        code = _wait([str(python), "-P", str(_CHILD), str(job_file)], log, alive_read)
    finally:
        os.close(alive_write)
        os.close(alive_read)
    if code == 0 and not result.is_file():
        raise HostError(f"{python} is no Python with llmcompressor: it ended without a result; give another in {SETTING}")
    if code == -9:
        raise HostError(f"llmcompressor was killed, most likely for memory; its log: {log}")
    if code != 0:
        said = decisive_line(log.read_text(encoding="utf-8", errors="replace")) or f"exit code {code}"
        if missing := _MISSING.search(said):
            raise HostError(f"{python} has no {missing[1]}: `make llmcompressor` makes an environment that has; its log: {log}")
        raise UsageError(f"llmcompressor could not quantize {subject}: {said}; its log: {log}")
    found = json.loads(result.read_text(encoding="utf-8"))
    for file in (job_file, result, log):
        file.unlink()
    folder.rmdir()
    return found


def _wait(command: list[str], log: Path, alive_fd: int) -> int:
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}  # another environment's
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env, start_new_session=True, pass_fds=(alive_fd,)
        )  # fmt: skip
    try:
        with log.open(encoding="utf-8", errors="replace") as text, _teller() as tell:
            while True:
                try:
                    return child.wait(0.5)
                except subprocess.TimeoutExpired:
                    if found := _BAR.findall(text.read()):
                        tell("{} {}/{}".format(*found[-1]))
    finally:
        end_group(child)


@contextmanager
def _teller() -> Iterator[Any]:
    """A spinner with the latest news on a terminal, else a line now and then."""
    if stderr.is_terminal:
        with stderr.status("llmcompressor is starting") as status:
            yield lambda news: status.update(f"llmcompressor: {news.strip()}")
        return
    told = time.monotonic()

    def line(news: str) -> None:
        nonlocal told
        if time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            note(f"llmcompressor: {news.strip()}")

    yield line
