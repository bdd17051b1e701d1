"""What both engine children share: read the job, write the result, never outlive the parent."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from calibrate.artefact import write_json


def serve(work: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> None:
    """Run `work(job)` for the `JOB.json RESULT.json` of the command line; each result it yields replaces the one before.

    An exception is left to Python, whose traceback is the log, and what was yielded until then stays.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "alive_fd" in job:
        threading.Thread(target=_follow_parent, args=(job["alive_fd"],), daemon=True).start()
    for result in work(job):
        write_json(Path(sys.argv[2]), result)


def _follow_parent(alive_fd: int) -> None:
    """The parent holds the other end of this pipe and writes nothing: a read returns only when it is gone, however it died."""
    os.read(alive_fd, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
