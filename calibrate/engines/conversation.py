"""A child that stays: an engine loaded once that answers many requests, one JSON line each; arrays travel as files beside the log."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrate.engines.process import end_group, engine_environment, failure
from calibrate.errors import HostError

_POLL_SECONDS = 0.5
_BLOCK = 1 << 20


class Conversation:
    """The parent's end. `hello` is what the child said once it was ready; `folder` is where both may leave files."""

    def __init__(self, child: subprocess.Popen, replies: int, folder: Path, timeout: float) -> None:
        self._child, self._replies, self._timeout = child, replies, timeout
        self._buffer = b""
        self.folder = folder
        self.hello = self._answer()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            EngineRefused, HostError: the child died (its decisive error is quoted), or did not answer within the timeout.
        """
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise failure(self._child.wait(), self.folder / "engine.log") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        until = time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            if time.monotonic() > until:
                raise HostError(f"vLLM did not answer within {self._timeout:g} s; its log: {self.folder / 'engine.log'}")
            if select.select([self._replies], [], [], _POLL_SECONDS)[0]:
                data = os.read(self._replies, _BLOCK)
                self._buffer += data
                if not data:
                    raise failure(self._child.wait(), self.folder / "engine.log")
            elif self._child.poll() is not None:  # a forked worker may still hold the pipe
                raise failure(self._child.returncode, self.folder / "engine.log")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


@contextmanager
def conversation(module: str, job: dict[str, Any], timeout: float, extra_env: dict[str, str] | None = None) -> Iterator[Conversation]:
    """Start `python -m module JOB.json` and talk to it while the context lasts; however that ends, its whole process group is gone then.

    Args:
        timeout: seconds that the start, and then each answer, may take.

    Raises:
        EngineRefused, HostError: as `Conversation.ask`. The folder with the log is then kept, else removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="kv-calibrate-engine-"))
    alive_read, alive_write = os.pipe()
    reply_read, reply_write = os.pipe()
    try:
        (folder / "job.json").write_text(json.dumps(job | {"alive_fd": alive_read, "reply_fd": reply_write}), encoding="utf-8")
        with (folder / "engine.log").open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", module, str(folder / "job.json")], stdin=subprocess.PIPE, stdout=sink, stderr=sink,
                env=engine_environment(extra_env or {}), start_new_session=True, pass_fds=(alive_read, reply_write),
            )  # fmt: skip
        os.close(reply_write)
        reply_write = -1
        try:
            yield Conversation(child, reply_read, folder, timeout)
        finally:
            end_group(child)
    finally:
        for end in (alive_write, alive_read, reply_read, reply_write):
            if end >= 0:
                os.close(end)
    shutil.rmtree(folder)
