"""What the engine children share: read the job, write results or answers, never outlive the parent."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from calibrate.artefact import write_json


def serve(work: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> None:
    """Run `work(job)` for the `JOB.json RESULT.json` of the command line; each result it yields replaces the one before.

    An exception is left to Python, whose traceback is the log, and what was yielded until then stays.
    """
    for result in work(_read_job()):
        write_json(Path(sys.argv[2]), result)


def converse(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]]) -> None:
    """Say the first value of `start(job)`, then answer each JSON line on stdin by the function that is its second, until stdin ends.

    Answers go to the pipe `reply_fd` of the job, since engines print to stdout what they like.
    """
    job = _read_job()
    with os.fdopen(job["reply_fd"], "w", encoding="utf-8") as replies:
        hello, answer = start(job)
        _say(replies, hello)
        for line in sys.stdin:
            _say(replies, answer(json.loads(line)))


def _say(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


def _read_job() -> dict[str, Any]:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "alive_fd" in job:
        threading.Thread(target=_follow_parent, args=(job["alive_fd"],), daemon=True).start()
    return job


def _follow_parent(alive_fd: int) -> None:
    """The parent holds the other end of this pipe and writes nothing: a read returns only when it is gone, however it died."""
    os.read(alive_fd, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
