"""Progress on stderr: rate and time left, quiet where nobody watches."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

_SECONDS_BETWEEN_LINES = 15.0

stderr = Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """One line to the user on stderr; stdout belongs to results."""
    stderr.print(message, markup=False, soft_wrap=True)


class Meter(Protocol):
    """What a long stage is given: call `advance(n)` as work is done."""

    def advance(self, amount: int) -> None: ...


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.speed or task.finished_speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s")


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)


class _Lines:
    """For logs: a line now and then instead of a bar that redraws itself."""

    def __init__(self, label: str, total: int, unit: str, done: int) -> None:
        self._label, self._total, self._unit, self._done, self._before = label, total, unit, done, done
        self._start = self._told = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN_LINES and self._done < self._total:
            return
        self._told = now
        rate = (self._done - self._before) / max(now - self._start, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        note(f"{self._label} {self._done:,}/{self._total:,} {self._unit}, {rate:,.{0 if rate >= 1 else 2}f}/s, {left:,.0f} s left")


@contextmanager
def meter(label: str, total: int, unit: str = "tokens", done: int = 0) -> Iterator[Meter]:
    """Progress of `total` units, `done` of them already finished (a resumed run's rate does not count those): a bar on a terminal, else lines."""
    if not stderr.is_terminal:
        yield _Lines(label, total, unit, done)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=stderr) as progress:
        yield _Bar(progress, progress.add_task(label, total=total, completed=done, unit=unit))
