"""Where an interrupted collection stands: a file that is replaced whole, so that a kill at any moment leaves a usable one."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from calibrate.artefact import discard, read_tensors, write_tensors
from calibrate.collect.observer import Observer
from calibrate.errors import UsageError
from calibrate.progress import note
from calibrate.statistics import Observed, pack_layers, unpack_layers

SCHEMA = "kv-calibrate/collect-state/1"
_DONE = "done"


class ResumeState:
    """The partial statistics of a run and which of its batches they hold.

    Args:
        path: the state file. None keeps no state.
        plan: digest of all that fixes the result (weights, batches, types). A file of another plan is ignored.
        seconds: time between two writes.
    """

    def __init__(self, path: Path | None, plan: str, seconds: float = 60.0) -> None:
        self.path, self.plan, self.seconds = path, plan, seconds
        self._written = time.monotonic()

    def read(self, batches: int) -> tuple[np.ndarray, dict[int, dict[str, Observed]]]:
        """Which batches are done (bool [batches]) and their statistics; all False and {} where there is nothing to go on from."""
        if self.path is None or not self.path.exists():
            return np.zeros(batches, dtype=bool), {}
        try:
            tensors, header = read_tensors(self.path, SCHEMA)
            if header["plan"] != self.plan:
                return np.zeros(batches, dtype=bool), {}
            done = tensors.pop(_DONE).astype(bool)
            return done, unpack_layers(tensors)
        except (UsageError, KeyError, ValueError, TypeError, IndexError) as error:
            note(f"{self.path} cannot be read ({error}): starting anew")
            return np.zeros(batches, dtype=bool), {}

    def write(self, done: np.ndarray, observer: Observer) -> None:
        """Replace the state file."""
        if self.path is None or not done.any():
            return
        write_tensors(self.path, {_DONE: done.astype(np.uint8), **pack_layers(observer.layers())}, {"schema": SCHEMA, "plan": self.plan})
        self._written = time.monotonic()

    def write_if_due(self, done: np.ndarray, observer: Observer) -> None:
        if time.monotonic() - self._written >= self.seconds:
            self.write(done, observer)

    def discard(self) -> None:
        """The result is safe elsewhere: the state is of no more use."""
        if self.path is not None:
            discard(self.path)


class Interrupts:
    """Set by Ctrl-C or SIGTERM; the batch under way is finished first, so that the state on disk is whole."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: object) -> None:
        if self.asked:  # a second Ctrl-C means now
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Catch SIGINT and SIGTERM while the context lasts (in the main thread; elsewhere signals are not ours to catch)."""
    flag = Interrupts()
    try:
        before = {number: signal.signal(number, flag) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        before = {}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
