"""Progress on stderr: rate and time left, quiet where nobody watches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

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
    def __init__(self, progress: Progress, task) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)


@contextmanager
def meter(label: str, total: int, unit: str = "tokens", done: int = 0) -> Iterator[Meter]:
    """A progress bar for `total` units, `done` of them already finished (a resumed run's rate does not count those)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=not stderr.is_terminal) as progress:
        yield _Bar(progress, progress.add_task(label, total=total, completed=done, unit=unit))
