"""Which process of a torchrun job this is, from what torchrun puts into the environment. Reads no library: the command line asks on every start."""

import os
from dataclasses import dataclass

from calibrate.errors import UsageError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """number: 0 .. size - 1, over all hosts. local: the same on this host. host: number of this host in the job."""

    number: int = 0
    size: int = 1
    local: int = 0
    host: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.number == 0


def rank_here() -> Rank:
    """This process's place; one of one where no launcher started it (schedulers that set a part of these variables are no launcher).

    Raises:
        UsageError: the variables hold no numbers, or contradict each other.
    """
    if not all(name in os.environ for name in _NAMES):
        return Rank()
    texts = [os.environ[name] for name in _NAMES[:3]] + [os.environ.get("GROUP_RANK", "0")]
    try:
        rank = Rank(*map(int, texts))
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE, LOCAL_RANK and GROUP_RANK are {', '.join(texts)}: torchrun sets them to whole numbers") from error
    if not 0 <= rank.number < rank.size:
        raise UsageError(f"RANK is {rank.number} of WORLD_SIZE {rank.size}: ranks are counted from 0")
    return rank


def check_port() -> None:
    """Raise UsageError for a port where nobody answers: given `--master-port 0` torchrun chooses one itself, and tells its processes 0."""
    port = os.environ["MASTER_PORT"]
    if not (port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"MASTER_PORT is {port}, where nobody answers: give torchrun --standalone, or the number of a free port as --master-port")


def refuse_many(command: str) -> None:
    """Raise UsageError in a torchrun job of more than one process: every one of them would do the whole of `command`."""
    if rank_here().size > 1:
        raise UsageError(f"torchrun shares out `collect` only: give its statistics file to `solve` and `write`, and run `{command}` without torchrun")
