"""Putting a finished folder in its place: the target is absent or complete at every moment, and nothing the user had is lost."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from calibrate.artefact import process_is_dead
from calibrate.checkpoint.links import own_files
from calibrate.errors import UsageError


def check_target(source: Path, output: Path, *, force: bool) -> None:
    """Raise UsageError where `output` may not be written: it exists, is, holds or lies in the source, or its disk is read-only; or where a link in
    the source leads out of it, which would be published with the output.

    A folder that a killed run had moved aside is put back first: it is the user's, and counts as existing.
    """
    if output.name in ("", ".."):
        raise UsageError(f"output {output} has no name of its own: give the folder by its name")
    check_creatable(output)
    _put_back(output)
    real, origin = output.resolve(), source.resolve()
    if real == origin:
        raise UsageError(f"output {output} is the source checkpoint itself: give another folder")
    if real.is_relative_to(origin) or origin.is_relative_to(real):
        raise UsageError(f"output {output} and source {source} lie within each other: give a folder elsewhere")
    if output.exists() and not force:
        raise UsageError(f"output {output} exists: give another folder, or --force to replace it")
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output} is a file, not a folder")
    for _ in own_files(source):
        pass


def check_creatable(path: Path) -> None:
    """Raise UsageError where nothing can be made at `path`: a file stands in the way, or the folder above cannot be written."""
    try:
        above, reason = place_above(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if reason:
        raise UsageError(f"cannot write {path}: {above} is {reason}")


def place_above(path: Path) -> tuple[Path, str]:
    """The nearest of the folders above `path` that exists, and what keeps anything from being made in it, "" where nothing does."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    return above, "not a folder" if not above.is_dir() else "" if os.access(above, os.W_OK | os.X_OK) else "read-only, or another user's"


@contextmanager
def folder_in_the_making(output: Path) -> Iterator[Path]:
    """Yield an empty sibling folder; on success it becomes `output` (replacing what was there), on any failure it is removed.

    Raises:
        UsageError: the disk is full or read-only.
    """
    making = output.with_name(f".{output.name}.making-{os.getpid()}")
    made = [folder for folder in output.parents if not folder.exists()]  # deepest first
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _put_back(output)
        _tidy(output)
        making.mkdir()
        yield making
        _sync(making)
        _replace(making, output)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a disk that fills
        raise UsageError(f"cannot write {output}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # on success it holds the output
                folder.rmdir()


def _replace(making: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    replaces = os.path.lexists(output)
    if replaces:
        output.rename(old)
    try:
        making.rename(output)
    except BaseException:
        if replaces:
            old.rename(output)
        raise
    _remove(old)


def _put_back(output: Path) -> None:
    """Where a run was killed between moving the old folder away and moving the new one in, there is only the old one: back with it."""
    for old in _left_behind(output, "replaced"):
        if not os.path.lexists(output):
            old.rename(output)


def _tidy(output: Path) -> None:
    """Remove what killed runs left: half-made folders, and replaced ones whose successor is in place."""
    for left in [*_left_behind(output, "making"), *_left_behind(output, "replaced")]:
        _remove(left)


def _left_behind(output: Path, what: str) -> list[Path]:
    prefix = f".{output.name}.{what}-"  # no glob: a name may hold its special characters
    if not output.parent.is_dir():
        return []
    return sorted(path for path in output.parent.iterdir() if path.name.startswith(prefix) and _dead(path.name.removeprefix(prefix)))


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _dead(number: str) -> bool:
    return number.isdigit() and (int(number) == os.getpid() or process_is_dead(int(number)))


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1:  # linked files were on disk before
            with path.open("rb") as file:
                os.fsync(file.fileno())
