"""Bringing a file into another folder without copying its bytes where the file system can."""

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from calibrate.errors import UsageError

_FICLONE = 0x40049409  # linux/fs.h: share all extents of another file (btrfs, xfs)
_NOT_ITS_OWN = {".git", ".cache", ".gitattributes"}
_NOT_HERE = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.ENOSYS}


def link(source: Path, target: Path) -> str:
    """Make `target` hold what `source` holds: "link" (hard link), "reflink" or "copy", the first that works here."""
    try:
        os.link(source, target)
        return "link"
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    if _reflink(source, target):
        shutil.copystat(source, target)
        return "reflink"
    shutil.copy2(source, target)
    return "copy"


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError as error:
            if error.errno not in _NOT_HERE | {errno.EINVAL, errno.ENOTTY}:
                raise
            return False
    return True


def own_files(root: Path, besides: Collection[str] = ()) -> Iterator[tuple[Path, Path]]:
    """Every file of a checkpoint, sorted: its path below `root`, and the regular file behind it. Version control's own are left out, and those at
    the top that are called as in `besides`. Raises UsageError as `resolved`."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if relative.parts[0] not in _NOT_ITS_OWN and relative.parts[0] not in besides and (path.is_symlink() or not path.is_dir()):
            yield relative, resolved(path, root)


def resolved(path: Path, root: Path) -> Path:
    """The regular file behind `path`, which must lie under `root`, or in the blob store when `root` is a snapshot of the hub's cache.

    Raises:
        UsageError: a symbolic link leads elsewhere (the file would be published with the checkpoint), to a folder or to nothing.
    """
    real = path.resolve()
    allowed = [root.resolve()]
    if root.resolve().parent.name == "snapshots":
        allowed.append(root.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise UsageError(f"{path} is a symbolic link to {real}, outside the checkpoint: replace it by the file if it belongs there")
    if not real.is_file():
        raise UsageError(f"{path} is no regular file{f' (it leads to {real})' if path.is_symlink() else ''}: replace or remove it")
    return real
