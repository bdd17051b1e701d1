"""A process that has imported everything and forks for each command: `python -m calibrate …` without the seconds that imports take.

Requests are lines of JSON on stdin, answers lines of JSON on stdout. {"start": [words], "environment": {…}, "log": file} answers {"process": pid};
{"wait": pid, "seconds": most} answers {"exit": code}, None of one that did not end in time and was killed. Each command says on the pipe `argv[1]`
when a stage begins and when it ends.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

NEEDED = ("calibrate.pipeline", "calibrate.steps", "calibrate.tables", "transformers.models.llama.modeling_llama", "accelerate", "torch.distributed")
STAGES = {
    "calibrate.pipeline": {"collect_statistics": "collect", "solve": "solve", "write_checkpoint": "write"},
    "calibrate.steps": {"collect_statistics": "collect", "solve": "solve", "write_checkpoint": "write"},
}


def main() -> None:
    for name in NEEDED:
        import_module(name)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"exit": _ended(request["wait"], time.monotonic() + request["seconds"])}
        else:
            child = os.fork()
            if not child:
                _command(request)
            answer = {"process": child}
        print(json.dumps(answer), flush=True)


def _ended(process: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _command(request: dict[str, Any]) -> None:
    """In the child: be `python -m calibrate …`, and end."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.dump_traceback_later(60, file=sys.__stderr__)  # where one that does not end stands
    os.environ.update(request["environment"])
    sys.argv = ["calibrate", *request["start"]]
    for module, stages in STAGES.items():
        for function, stage in stages.items():
            if hasattr(sys.modules[module], function):
                setattr(sys.modules[module], function, _told(stage, getattr(sys.modules[module], function)))
    code = 1
    try:
        _say("begin run")
        runpy.run_module("calibrate", run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    finally:
        _say("end run")
        os._exit(code)


def _told(stage: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        _say(f"begin {stage}")
        try:
            return inner(*args, **kwargs)
        finally:
            _say(f"end {stage}")

    return outer


def _say(what: str) -> None:
    os.write(PIPE, f"{what} {time.monotonic()}\n".encode())


if __name__ == "__main__":
    PIPE = int(sys.argv[1])
    main()
