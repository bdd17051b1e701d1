"""Whether a model fits into memory, and its collection layer by layer where it does not."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.collect.collector import CollectRun, prepare
from calibrate.collect.layerwise import collect_layerwise
from calibrate.corpus import Corpus
from calibrate.errors import UsageError
from calibrate.host import available_memory
from calibrate.model import SourceCheckpoint
from calibrate.model.streamed import Skeleton, load_streamed, skeleton, weights_read
from calibrate.statistics import Statistics

WORKING_BYTES = 600_000_000  # Python and its libraries, counts, a batch's activations
_FILLED = 1.15  # hidden states with their padding, to the tokens without


@dataclass(frozen=True)
class StreamingPlan:
    """How a model is streamed.

    Attributes:
        hidden_bytes: hidden states of all batches, before and after a layer. in_memory: whether they are kept there, else in mapped files.
    """

    parts: Skeleton
    memory: int
    hidden_bytes: int
    in_memory: bool

    def __str__(self) -> str:
        place = "in memory" if self.in_memory else "in mapped files"
        return (
            f"model {_gigabytes(self.parts.total_bytes)}, memory {_gigabytes(self.memory)}: layer by layer, largest layer "
            f"{_gigabytes(max(self.parts.layer_bytes))}, hidden states {_gigabytes(self.hidden_bytes)} {place}"
        )


def plan_streaming(
    source: SourceCheckpoint, corpus: Corpus, dtype: torch.dtype, mode: str, *, trust_remote_code: bool = False, memory: int | None = None
) -> StreamingPlan | None:
    """The plan, or None where the model is loaded whole.

    Args:
        mode: "auto" streams what does not fit into `memory` bytes (what is free here, unless given), "always", or "never".

    Raises:
        UsageError: it does not fit, or was asked for, and cannot be streamed.
    """
    memory = available_memory() if memory is None else memory
    stored = sum(source.path.joinpath(name).stat().st_size for name in source.headers)
    # in memory a stored byte becomes at most four (8-bit weights in float32): most models fit by far and are not built twice
    if mode == "never" or (mode == "auto" and 4 * stored + WORKING_BYTES < memory):
        return None
    parts = (
        skeleton(source, dtype, trust_remote_code=trust_remote_code)
        if mode == "always"
        else _skeleton_if_large(source, dtype, memory, trust_remote_code)
    )
    if parts is None:
        return None
    hidden = int(2 * _FILLED * sum(len(sample.tokens) for sample in corpus.samples) * parts.hidden_size * dtype.itemsize)
    resident = parts.rest_bytes + max(3 * max(parts.layer_bytes), 2 * parts.head_bytes) + WORKING_BYTES
    return StreamingPlan(parts, memory, hidden, resident + hidden < memory)


def _skeleton_if_large(source: SourceCheckpoint, dtype: torch.dtype, memory: int, trust: bool) -> Skeleton | None:
    """The model's parts where it does not fit into memory; of a model that cannot be streamed nothing is said unless it is too large."""
    stored = sum(source.path.joinpath(name).stat().st_size for name in source.headers)
    try:
        parts = skeleton(source, dtype, trust_remote_code=trust)
    except UsageError:
        if stored + WORKING_BYTES < memory:
            return None
        raise
    return parts if parts.total_bytes + WORKING_BYTES > memory else None


def collect_streamed(
    source: SourceCheckpoint,
    corpus: Corpus,
    plan: StreamingPlan,
    folder: Path,
    *,
    dtype: torch.dtype,
    tokens_per_batch: int | None = None,
    second_moments: bool = False,
    state_seconds: float = 60.0,
    trust_remote_code: bool = False,
    check: Callable[[CollectRun], Any] | None = None,
) -> Statistics:
    """`load_model`, `prepare` and `collect`, layer by layer. `folder` keeps what an interrupted run goes on from; without that it is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with weights_read():
            model = load_streamed(source, plan.parts, folder / "offload", dtype=dtype, trust_remote_code=trust_remote_code)
            run = prepare(model, source, corpus, tokens_per_batch=tokens_per_batch, second_moments=second_moments)
            if check is not None:
                check(run)
            return collect_layerwise(run, plan.parts.layers, plan.parts.hidden_size, folder, in_memory=plan.in_memory, state_seconds=state_seconds)
    finally:
        if not (folder / "state.safetensors").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
