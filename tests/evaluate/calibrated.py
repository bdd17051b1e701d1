"""A calibrated checkpoint, made by the project's own steps."""

from pathlib import Path

import torch

from calibrate.checkpoint import write_checkpoint
from calibrate.collect import collect
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus


def calibrated_copy(source: Path, output: Path) -> Path:
    """Collect on a few random rows, solve, write."""
    torch.manual_seed(0)
    statistics = collect(collect_run(source, rows_corpus([40, 50, 60])))
    write_checkpoint(SourceCheckpoint.open(source), solve(statistics, PolicyOptions()), output, statistics=statistics)
    return output
