"""Many processes on one collection: they share out its batches, and add integers at the end, so that their number changes no bit.

A team talks through torchrun's store (who is done, who failed, how far all are) and meets in collectives once, when every rank has finished.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from calibrate.artefact import process_is_dead
from calibrate.collect.observer import Observer
from calibrate.errors import CalibrateError, HostError, UsageError
from calibrate.progress import stderr
from calibrate.ranks import Rank, check_port, rank_here

STALL_SECONDS = 1800.0  # without a finished batch on any rank: then the job is given up
_JOIN_SECONDS = 300.0  # until all have started (torchrun's own rendezvous came first), and for one collective: ranks have met before each
_POLL_SECONDS = 0.1
_WORD = "word"  # holds the rank that may speak for a job that failed
_TOKENS = "tokens"
_HOPELESS = "hopeless"


class TeamError(HostError):
    """Another rank failed, died or fell silent; finished work is kept."""


class Team:
    """A team of one: nothing to share, nobody to wait for. Its methods are those of `_Ranks`."""

    rank = Rank()

    def device(self, device: str) -> str:
        """The device of this rank, of the kind that was asked for; the group is formed on it."""
        return device

    @contextmanager
    def one_by_host(self) -> Iterator[None]:
        """The first process of each host does what is inside before its others do (downloads, conversions into a cache)."""
        yield

    def exchange(self, name: str, value: Any, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """Every rank's JSON value, in rank order; waits as `meet` does."""
        return [value]

    def share(self, costs: Sequence[int]) -> list[int]:
        """Which of these pieces of work are this rank's, in order: the most costly first to whoever has least."""
        return sorted(_shares(costs, self.rank.size)[self.rank.number])

    def advance(self, tokens: int) -> None:
        """Say that so many tokens more are done. Raises TeamError where another rank failed."""

    def total(self) -> int:
        """Tokens that all other ranks have done since this was last asked."""
        return 0

    def meet(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has come here, calling `meanwhile` now and then. Raises TeamError as `advance`."""

    def add(self, observer: Observer, devices: dict[int, torch.device]) -> None:
        """Make every rank's observer hold the sum over all."""

    def give_up(self) -> None:
        """Say that no later run can go on from what is done."""

    def hopeless(self) -> bool:
        """Whether another rank gave up."""
        return False

    def who_died(self) -> str:
        """A sentence on a rank of this host that ended without a word; "" where there is none."""
        return ""


class _Ranks(Team):
    def __init__(self, rank: Rank, store: dist.Store) -> None:
        self.rank = rank
        self._store = store
        self._own = self._told = 0  # tokens done here; tokens of others that were told
        self._seen, self._seen_at = -1, time.monotonic()
        store.set(f"process/{rank.number}", json.dumps([socket.gethostname(), os.getpid()]))

    def device(self, device: str) -> str:
        cuda = device == "cuda"
        if not cuda and device != "cpu":
            raise UsageError(f"--device {device} names one place for all ranks: under torchrun give cpu or cuda, and each rank takes its own GPU")
        if cuda:
            if self.rank.local >= torch.cuda.device_count():
                raise HostError(f"this is process {self.rank.local + 1} of its host, which has {torch.cuda.device_count()} GPUs")
            device = f"cuda:{self.rank.local}"
            torch.cuda.set_device(device)
        self.meet("started")  # what follows sees no death of another rank until its time is up
        with _one_line("the ranks cannot reach each other"):
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=self._store,
                rank=self.rank.number,
                world_size=self.rank.size,
                timeout=timedelta(seconds=_JOIN_SECONDS),
                device_id=torch.device(device) if cuda else None,
            )
        return device

    @contextmanager
    def one_by_host(self) -> Iterator[None]:
        key = f"prepared/{self.rank.host}"
        if self.rank.local:
            self._wait([key], lambda: None)
        yield
        self._store.set(key, "yes")

    def exchange(self, name: str, value: Any, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        keys = [f"{name}/{number}" for number in range(self.rank.size)]
        with _one_line("torchrun's store is gone"):
            self._store.set(keys[self.rank.number], json.dumps(value))
        self._wait(keys, meanwhile)
        with _one_line("torchrun's store is gone"):
            return [json.loads(self._store.get(key)) for key in keys]

    def advance(self, tokens: int) -> None:
        self._own += tokens
        with _one_line("torchrun's store is gone"):
            self._store.add(_TOKENS, tokens)
            self._check_failed()

    def total(self) -> int:
        with _one_line("torchrun's store is gone"):
            others = self._store.add(_TOKENS, 0) - self._own
        new, self._told = others - self._told, others
        return int(new)

    def meet(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.exchange(name, True, meanwhile)

    def _wait(self, keys: list[str], meanwhile: Callable[[], None]) -> None:
        """Poll: unlike a collective this sees signals, a rank that died, and a job in which nothing moves."""
        self._seen_at = time.monotonic()
        while True:
            with _one_line("torchrun's store is gone"):
                if self._store.check(keys):
                    return
                self._check_failed()
                self._check_moving(keys)
            if died := self.who_died():
                raise TeamError(died)
            meanwhile()
            time.sleep(_POLL_SECONDS)

    def _check_failed(self) -> None:
        if self._store.check([_WORD]):
            raise TeamError(f"rank {self._store.get(_WORD).decode()} failed")

    def _check_moving(self, keys: list[str]) -> None:
        now, done = time.monotonic(), self._store.add(_TOKENS, 0)
        if done != self._seen:
            self._seen, self._seen_at = done, now
        if now - self._seen_at > STALL_SECONDS:
            late = next(key.rpartition("/")[2] for key in keys if not self._store.check([key]))
            raise TeamError(f"rank {late} of {self.rank.size} did nothing for {STALL_SECONDS:,.0f} s; finished work is kept")

    def add(self, observer: Observer, devices: dict[int, torch.device]) -> None:
        try:
            with _one_line("the ranks could not add their counts"), torch.inference_mode():  # as the forwards, in which the counts were made
                observer.all_reduce(_sum, _max, devices)
        except TeamError as error:
            time.sleep(3 * _POLL_SECONDS)  # until the launcher has seen to a rank that died
            raise TeamError(self.who_died() or str(error)) from error

    def give_up(self) -> None:
        with suppress(RuntimeError):  # without a store: what made it give up is to be told all the same
            self._store.set(_HOPELESS, "yes")

    def hopeless(self) -> bool:
        with suppress(RuntimeError):
            return self._store.check([_HOPELESS])
        return False

    def who_died(self) -> str:
        here = socket.gethostname()
        with _one_line("torchrun's store is gone"):
            for number in range(self.rank.size):
                if number == self.rank.number or not self._store.check([f"process/{number}"]) or self._store.check([f"left/{number}"]):
                    continue
                host, process = json.loads(self._store.get(f"process/{number}"))
                if host == here and process_is_dead(process):
                    return (
                        f"rank {number} of {self.rank.size} (process {process} of {host}) ended without a word: killed, or out of memory; "
                        "finished work is kept, and the same command goes on from it"
                    )
        return ""

    def may_speak(self) -> bool:
        """Whether this rank is the first that failed: of one failure one line is printed."""
        try:
            return self._store.compare_set(_WORD, "", str(self.rank.number)).decode() == str(self.rank.number)
        except (RuntimeError, dist.DistError):  # the store is gone with its launcher: one voice is enough
            return self.rank.leads

    def leave(self) -> None:
        """The work is done: from here on an ended process is no death."""
        with _one_line("torchrun's store is gone"):
            self._store.set(f"left/{self.rank.number}", "yes")


@contextmanager
def joined() -> Iterator[Team]:
    """This process's team: of all of torchrun's processes, or of one. Ranks but the first are silent, but for the one that fails first.

    Raises:
        CalibrateError: what was raised inside, with the rank in front.
    """
    rank = rank_here()
    if rank.size == 1:
        yield Team()
        return
    stderr.quiet = not rank.leads
    check_port()
    with _one_line("the ranks do not find each other"):
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))
        store.set_timeout(timedelta(seconds=STALL_SECONDS))
    team, done = _Ranks(rank, store), False
    try:
        yield team
        team.leave()
        done = True
    except CalibrateError as error:
        stderr.quiet = not team.may_speak()
        told = str(error) if isinstance(error, TeamError) else f"rank {rank.number} of {rank.size}: {error}"
        raise type(error)(told) from error
    finally:
        _disband(waiting=done)


def _disband(*, waiting: bool) -> None:
    """End the group. NCCL's regular way waits for the other ranks, of which after a failure some may be gone: then it is aborted."""
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)  # experimental in torch, and for NCCL only
    if waiting or abort is None or dist.get_backend() != "nccl":
        dist.destroy_process_group()
    else:
        abort()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())
        raise TeamError(f"{what}: {reason[:200]}; finished work is kept") from error


def _sum(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def _max(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def _shares(costs: Sequence[int], size: int) -> list[list[int]]:
    shares, loads = [[] for _ in range(size)], [0] * size
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return shares
