"""The folded weights that `run --fold` calibrates, kept beside the output until it is there."""

import shutil
from pathlib import Path

from calibrate.artefact import FOLD_FILE
from calibrate.corpus import Corpus
from calibrate.errors import UsageError
from calibrate.fold.artefact import Fold, parse_switches
from calibrate.fold.job import fold_checkpoint
from calibrate.fold.parts import check_foldable
from calibrate.model import SourceCheckpoint
from calibrate.progress import note


def check_fold(source: SourceCheckpoint, asked: str | None, scheme: str | None) -> None:
    """Everything about `--fold` that can be refused before a model is loaded. Raises UsageError."""
    if asked is None:
        return
    if scheme is not None:
        raise UsageError("--fold and --weights do not go together: fold first (`kv-calibrate fold`), then run --weights on the result")
    parse_switches(asked)
    check_foldable(source)


def folded(source: SourceCheckpoint, corpus: Corpus, output: Path, asked: str, *, device: str, trust: bool) -> SourceCheckpoint:
    """The folded checkpoint to calibrate. What an interrupted run made of the same source, in the same way, is used again."""
    place, switches = _place_of(output), parse_switches(asked)
    if _made_before(place, source, corpus, switches):
        note(f"going on with the folded weights in {place}")
    else:
        note(fold_checkpoint(source, corpus, place, switches, device=device, trust=trust, force=True).summary())
    return SourceCheckpoint.open(place, trust_remote_code=trust)


def discard_folded(output: Path) -> None:
    """Remove the folded weights beside a finished output, which holds links to them."""
    shutil.rmtree(_place_of(output), ignore_errors=True)


def _place_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.folded")


def _made_before(place: Path, source: SourceCheckpoint, corpus: Corpus, switches: tuple[str, ...]) -> bool:
    if not (place / FOLD_FILE).is_file():
        return False
    fold = Fold.load(place / FOLD_FILE)
    return (fold.origin, fold.switches, fold.report.get("corpus")) == (source.fingerprint, switches, corpus.digest)
