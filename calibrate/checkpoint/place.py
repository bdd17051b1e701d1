"""Putting a finished folder in its place: the target is absent or complete at every moment, and nothing the user had is lost."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calibrate.errors import UsageError


def check_target(source: Path, output: Path, *, force: bool) -> None:
    """Raise UsageError where `output` may not be written: it exists, or is, holds or lies in the source."""
    real, origin = output.resolve(), source.resolve()
    if real == origin:
        raise UsageError(f"output {output} is the source checkpoint itself: give another folder")
    if real.is_relative_to(origin) or origin.is_relative_to(real):
        raise UsageError(f"output {output} and source {source} lie within each other: give a folder elsewhere")
    if output.exists() and not force:
        raise UsageError(f"output {output} exists: give another folder, or --force to replace it")
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output} is a file, not a folder")


@contextmanager
def folder_in_the_making(output: Path) -> Iterator[Path]:
    """Yield an empty sibling folder; on success it becomes `output` (replacing what was there), on any failure it is removed.

    Raises:
        UsageError: the disk is full or read-only.
    """
    making = output.with_name(f".{output.name}.making-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _tidy(output)
        making.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        yield making
        _sync(making)
        _replace(making, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _replace(making: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():
        output.rename(old)
    making.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _tidy(output: Path) -> None:
    """Clean up after runs that were killed: put back a folder that was about to be replaced, remove half-made ones of dead processes."""
    for old in output.parent.glob(f".{output.name}.replaced-*"):
        if _dead(old):
            shutil.rmtree(old) if output.exists() else old.rename(output)
    for making in output.parent.glob(f".{output.name}.making-*"):
        if _dead(making):
            shutil.rmtree(making)


def _dead(folder: Path) -> bool:
    number = folder.name.rpartition("-")[2]
    if not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(number) == os.getpid()


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1:  # linked files were on disk before
            with path.open("rb") as file:
                os.fsync(file.fileno())
