"""Files that ship with the tool: recipes and corpus mixes, in the wheel and in a checkout alike."""

from pathlib import Path
from typing import Literal

from calibrate.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def resource(kind: Literal["recipes", "data"], name: str | None = None) -> Path:
    """The shipped folder `kind`, or the file `name` in it.

    A wheel carries them in `calibrate/_shipped`; a checkout has them at its top.

    Raises:
        UsageError: there is no such folder or file; the message lists the files there.
    """
    candidates = (_PACKAGE / "_shipped" / kind, _PACKAGE.parent / kind)
    folder = next((path for path in candidates if path.is_dir()), None)
    if folder is None:
        raise UsageError(f"this installation lacks its {kind} folder (looked in {candidates[0]} and {candidates[1]}): install it again")
    if name is None:
        return folder
    path = folder / name
    if not path.is_file():
        known = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_file())) or "nothing"
        raise UsageError(f"no {name} among the shipped {kind}; there is: {known}")
    return path
