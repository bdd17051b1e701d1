"""Where an interrupted collection stands: a file that is replaced whole, so that a kill at any moment leaves a usable one."""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from calibrate.artefact import discard, read_tensors, write_tensors
from calibrate.collect.observer import Observer
from calibrate.collect.team import Team
from calibrate.errors import UsageError
from calibrate.progress import note
from calibrate.statistics import Observed, pack_layers, unpack_layers

SCHEMA = "kv-calibrate/collect-state/1"
_DONE = "done"


class ResumeState:
    """The partial statistics of a run and which of its batches they hold. Each rank of a team writes a file of its own.

    What is gone on from are all files of the same plan that lie beside each other, whatever number of processes wrote them: each batch is in
    the mask of one. Files that another one supersedes (a kill between writing the one and removing the other) are left out.

    Args:
        path: the state file of the first rank. None keeps no state.
        plan: digest of all that fixes the result (weights, batches, types). A file of another plan is ignored.
        seconds: time between two writes.
    """

    def __init__(self, path: Path | None, plan: str, seconds: float = 60.0, team: Team | None = None) -> None:
        self.path, self.plan, self.seconds = path, plan, seconds
        self._team = team or Team()
        self._own = None if path is None else _file_of(path, self._team.rank.number)
        self._absorbed: list[Path] = []
        self._here = np.zeros(0, dtype=bool)  # batches whose statistics this rank holds
        self._written = time.monotonic()

    def read(self, batches: int) -> tuple[np.ndarray, list[dict[int, dict[str, Observed]]]]:
        """Which batches are done on any rank (bool [batches]), and the statistics that this rank is to go on from."""
        found = {} if self.path is None else {file.name: mask for file in _files(self.path) if (mask := self._mask(file, batches)) is not None}
        seen = self._team.exchange("states", {name: mask.tolist() for name, mask in found.items()})
        done, layers = np.zeros(batches, dtype=bool), []
        self._here = np.zeros(batches, dtype=bool)
        for name, mask, owner in _disjoint(seen, self.path):
            done |= mask
            if owner == self._team.rank.number:
                self._here |= mask
                file = self.path.with_name(name)
                layers.append(self._load(file)[1])
                self._absorbed += [file] if file != self._own else []
        return done, layers

    def _mask(self, file: Path, batches: int) -> np.ndarray | None:
        try:
            plan, _, done = self._load(file)
            return done if plan == self.plan and len(done) == batches else None
        except (UsageError, KeyError, ValueError, TypeError, IndexError) as error:
            note(f"{file} cannot be read ({error}): starting anew")
            return None

    def _load(self, file: Path) -> tuple[str, dict[int, dict[str, Observed]], np.ndarray]:
        tensors, header = read_tensors(file, SCHEMA)
        done = tensors.pop(_DONE).astype(bool)
        return header["plan"], unpack_layers(tensors), done

    def finished(self, number: int) -> None:
        """A batch is done on this rank."""
        self._here[number] = True

    @property
    def batches_here(self) -> int:
        """How many batches this rank's statistics hold, earlier runs' included."""
        return int(self._here.sum())

    @property
    def kept(self) -> bool:
        """Whether a file was written that a later run can go on from."""
        return self._own is not None and bool(self._here.any())

    def write(self, observer: Observer) -> None:
        """Replace the state file."""
        if not self.kept:
            return
        write_tensors(self._own, {_DONE: self._here.astype(np.uint8), **pack_layers(observer.layers())}, {"schema": SCHEMA, "plan": self.plan})
        while self._absorbed:
            discard(self._absorbed.pop())
        self._written = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the file is as old as it may become; never where there is none."""
        return self._own is not None and time.monotonic() - self._written >= self.seconds

    def write_if_due(self, observer: Observer) -> None:
        if self.due:
            self.write(observer)

    def discard(self) -> None:
        """The result is safe elsewhere, or there can be none: the state is of no more use, and none is kept from here on."""
        if self.path is not None:
            discard_states(self.path)
        self._own = None


def discard_states(path: Path) -> None:
    """Remove the state file of every rank, and the folder of a layer by layer collection."""
    for file in [path, *_files(path)]:
        discard(file)
    if layers_folder(path).exists():
        shutil.rmtree(layers_folder(path))


def layers_folder(path: Path) -> Path:
    """Where a layer by layer collection keeps its state and hidden states, beside the state file that it does not write."""
    return path.with_suffix(".layers")


def _file_of(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def _files(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(path.stem) + r"(\.rank\d+)?" + re.escape(path.suffix))
    return sorted(file for file in path.parent.iterdir() if pattern.fullmatch(file.name)) if path.parent.is_dir() else []


def _disjoint(seen: list[dict[str, list[bool]]], path: Path | None) -> list[tuple[str, np.ndarray, int]]:
    """(file name, mask, rank that loads it) of files with no batch in common, the fullest first. `seen`: what each rank sees on its host."""
    holders: dict[tuple[str, bytes], list[int]] = {}
    for rank, files in enumerate(seen):
        for name, mask in files.items():
            holders.setdefault((name, bytes(mask)), []).append(rank)
    chosen, done = [], None
    for (name, packed), ranks in sorted(holders.items(), key=lambda item: (-sum(item[0][1]), item[0])):
        mask = np.frombuffer(packed, dtype=np.uint8).astype(bool)
        if done is not None and (done & mask).any():
            continue
        done = mask if done is None else done | mask
        chosen.append((name, mask, next((rank for rank in ranks if path is not None and _file_of(path, rank).name == name), ranks[0])))
    return chosen


class Stopped(Exception):
    """Ctrl-C or SIGTERM was met between two batches."""


def interrupted(done: int, total: int, what: str, kept: Path | None) -> KeyboardInterrupt:
    """Say how far a stopped run came and what the next one goes on from (None: nothing); the exception to end it with."""
    again = f"; run the same command again to go on from {kept}" if kept else ""
    note(f"interrupted after {done} of {total} {what}{again}")
    return KeyboardInterrupt()


class Interrupts:
    """Set by Ctrl-C or SIGTERM; the batch under way is finished first, so that the state on disk is whole."""

    def __init__(self, patient: bool) -> None:
        self.asked = False
        self._patient = patient

    def __call__(self, signum: int, frame: object) -> None:
        if self.asked and not self._patient:  # a second Ctrl-C means now
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Stopped where an end was asked for."""
        if self.asked:
            raise Stopped


@contextmanager
def interrupts(*, patient: bool = False) -> Iterator[Interrupts]:
    """Catch SIGINT and SIGTERM while the context lasts (in the main thread; elsewhere signals are not ours to catch).

    `patient`: repeated signals mean no more than one; torchrun passes on what the terminal has sent already, and kills what does not end.
    """
    flag = Interrupts(patient)
    try:
        before = {number: signal.signal(number, flag) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        before = {}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
