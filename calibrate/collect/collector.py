"""The collection: a model and batches in, `Statistics` out."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import calibrate
from calibrate.artefact import sha256_bytes
from calibrate.collect.ledger import upload
from calibrate.collect.observer import Observer
from calibrate.collect.state import ResumeState, Stopped, interrupted, interrupts
from calibrate.collect.team import Team, TeamError
from calibrate.collect.watch import observe
from calibrate.corpus import Batch, Corpus, plan_batches
from calibrate.errors import UsageError
from calibrate.model import CacheLayout, SourceCheckpoint, cache_dtype_of, probe_layout
from calibrate.progress import meter, note
from calibrate.statistics import CACHE_DTYPES, Statistics
from calibrate.statistics.second import SKIPPED_TOKENS

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}
_KIND_NAMES = {"k": "K", "v": "V", "q": "Q"}


@dataclass(frozen=True)
class CollectRun:
    """One collection: everything that fixes its result.

    Attributes:
        corpus: the samples. batches: how they are laid out; the same samples in other shapes may round differently in matmuls.
        second_moments: whether sums of products of channels are kept, as KVarN tables need.
    """

    model: PreTrainedModel
    source: SourceCheckpoint
    layout: CacheLayout
    corpus: Corpus
    batches: tuple[Batch, ...]
    second_moments: bool = False

    @property
    def tokens(self) -> int:
        return sum(_tokens(batch) for batch in self.batches)

    def provenance(self) -> dict[str, Any]:
        """What a reader needs to repeat this run, without the weights' full digests (they are added when it ends)."""
        second = {"second_moments": {"skipped_tokens": SKIPPED_TOKENS}} if self.second_moments else {}
        return second | {
            "tool": f"kv-calibrate {calibrate.__version__}",
            "model": {"fingerprint": self.source.fingerprint, "model_type": self.source.model_type},
            "corpus": {"digest": self.corpus.digest, **self.corpus.description},
            "compute_dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "attention": self.model.config.get_text_config(decoder=True)._attn_implementation,
            "batches": _batches_digest(self.batches),
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        }


def prepare(
    model: PreTrainedModel, source: SourceCheckpoint, corpus: Corpus, *, tokens_per_batch: int | None = None, second_moments: bool = False
) -> CollectRun:
    """Probe the model and lay the corpus out in batches."""
    budget = tokens_per_batch or TOKENS_PER_BATCH.get(model.device.type, TOKENS_PER_BATCH["cuda"])
    pad = model.config.get_text_config(decoder=True).pad_token_id
    batches = plan_batches(corpus, budget, pad_token_id=pad if isinstance(pad, int) else 0)
    return CollectRun(model, source, probe_layout(model), corpus, batches, second_moments)


def collect(
    run: CollectRun,
    *,
    state: Path | None = None,
    state_seconds: float = 60.0,
    after_batch: Callable[[Batch, Observer], None] | None = None,
    team: Team | None = None,
) -> Statistics:
    """Observe every batch.

    Args:
        state: file that keeps partial results, so that an interrupted run goes on where it stopped; removed by the caller's next step,
            when the statistics are safe (`discard_states`).
        after_batch: called with each batch and all that was observed up to its end.
        team: processes that share out the batches; each of them returns the same statistics, of all batches, whatever their number.

    Raises:
        UsageError: infinity or NaN in K, V or Q (layer, head and sample are named), or a layer that saw nothing.
        TeamError: another rank failed; after the state was written.
        KeyboardInterrupt: after the state was written.
    """
    team = team or Team()
    provenance = run.provenance()
    plan = sha256_bytes(json.dumps(provenance, sort_keys=True).encode())
    _check_same(team.exchange("plan", [plan, provenance]))
    resume = ResumeState(state, plan, state_seconds, team)
    observer = Observer(run.layout, CACHE_DTYPES[cache_dtype_of(run.source)], second_moments=run.second_moments)
    done, earlier = resume.read(len(run.batches))
    for layers in earlier:
        observer.add(layers, devices_of(run))
    finished = sum(_tokens(batch) for batch, ready in zip(run.batches, done, strict=True) if ready)
    if finished:
        note(f"resuming: {finished:,} of {run.tokens:,} tokens are done")
    with ThreadPoolExecutor(1) as pool, meter("calibrating", run.tokens, done=finished) as progress, interrupts(patient=team.rank.size > 1) as stop:

        def pause() -> None:
            stop.check()
            if others := team.total():
                progress.advance(others)

        digests = pool.submit(run.source.weight_digests) if team.rank.leads else None  # costs no time beside the forward
        try:
            ahead = _can_run_ahead(run) and after_batch is None
            for batch in _observe_all(run, observer, resume, np.flatnonzero(~done), team, pause, ahead=ahead):
                if after_batch is not None:
                    after_batch(batch, observer)
                progress.advance(_tokens(batch))
            provenance["model"]["weights"] = team.exchange("weights", digests.result() if digests else None, pause)[0]
            pause()  # where nobody had to be waited for, the others' last tokens are told now
            team.add(observer, devices_of(run))
        except Stopped as stopped:
            if died := team.who_died():  # the launcher ended this rank because of that one
                raise TeamError(died) from stopped
            raise interrupted(resume.batches_here, len(done), "batches", resume.path if resume.kept else None) from stopped
    check_seen(run.layout, observer)
    return finished_statistics(run, observer, provenance)


def finished_statistics(run: CollectRun, observer: Observer, provenance: dict[str, Any]) -> Statistics:
    """What was observed, as an artefact."""
    counted = {"tokens": run.tokens, "documents": run.corpus.documents, "samples": len(run.corpus.samples)}
    return Statistics(observer.cache_dtype, observer.layers(), run.layout.as_dict(), counted, (provenance,))


def _observe_all(
    run: CollectRun, observer: Observer, resume: ResumeState, pending: np.ndarray, team: Team, pause: Callable[[], None], *, ahead: bool
) -> Iterator[Batch]:
    """Observe this rank's share of the pending batches, yielding each when it is counted, and wait for the other ranks. Whatever ends it between
    two batches, the state is written first.

    Args:
        ahead: begin a batch before the one before it is settled.
    """
    unsettled: int | None = None  # a closed batch
    try:
        for number in pending[team.share([run.batches[number].input_ids.size for number in pending])]:
            pause()
            _begin_batch(run, observer, run.batches[number])
            finished = None if unsettled is None else _settle(run, observer, resume, team, unsettled)
            observer.close(run.batches[number].part)
            unsettled = number
            if finished is not None:
                yield finished
                team.advance(_tokens(finished))
            if not ahead or resume.due:
                finished, unsettled = _settle(run, observer, resume, team, unsettled), None
                yield finished
                team.advance(_tokens(finished))
                resume.write_if_due(observer)
        if unsettled is not None:
            finished, unsettled = _settle(run, observer, resume, team, unsettled), None
            yield finished
            team.advance(_tokens(finished))
        if team.rank.size > 1:
            resume.write(observer)  # from here on others may end this rank
        team.meet("observed", pause)
    except (Stopped, TeamError):
        if unsettled is not None:
            _settle(run, observer, resume, team, unsettled)
        if team.hopeless():
            resume.discard()  # it may have been written after the rank that gave up removed the files of all
        else:
            resume.write(observer)
        raise


def _can_run_ahead(run: CollectRun) -> bool:
    """On a GPU a batch is looked at when the next one is under way, so that the device never waits for the host."""
    return run.model.device.type == "cuda" and not run.second_moments


def _settle(run: CollectRun, observer: Observer, resume: ResumeState, team: Team, number: int) -> Batch:
    """The closed batch is done. Raises UsageError where it gave infinity or NaN."""
    batch = run.batches[number]
    if bad := observer.settle():
        team.give_up()  # no later run could go on from here
        resume.discard()
        raise UsageError(_nonfinite_message(run, observer, batch, bad))
    resume.finished(number)
    return batch


def _check_same(plans: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise UsageError where ranks would add up different runs: other files, versions or options on another host."""
    for number, (plan, provenance) in enumerate(plans):
        if plan != plans[0][0]:
            part = next(name for name in provenance if provenance[name] != plans[0][1].get(name))
            raise UsageError(f"rank {number} differs from rank 0 in {part}: all hosts need the same model, data, options and versions")


def _tokens(batch: Batch) -> int:
    return int(batch.lengths.sum())


def _begin_batch(run: CollectRun, observer: Observer, batch: Batch) -> None:
    device = run.model.device
    observer.begin(batch.lengths, batch.input_ids.shape[1], device)
    observe(run.model, run.layout, upload(batch.input_ids, device), observer.see)


def _nonfinite_message(run: CollectRun, observer: Observer, batch: Batch, bad: Sequence[tuple[int, str, int]]) -> str:
    index, kind, head = bad[0]
    sample = "unknown sample"
    for row, (length, number) in enumerate(zip(batch.lengths, batch.samples, strict=True)):
        alone = Batch(batch.input_ids[row : row + 1, :length], batch.lengths[row : row + 1], batch.samples[row : row + 1], batch.part)
        fresh = Observer(run.layout, observer.cache_dtype)
        _begin_batch(run, fresh, alone)
        if again := fresh.end(alone.part):
            index, kind, head = again[0]
            sample = f"sample {number} ({run.corpus.samples[number].source})"
            break
    name = run.layout[index].module
    return f"{_KIND_NAMES[kind]} of layer {index} ({name}), head {head}, is infinite or NaN on {sample}: nothing was written"


def check_seen(layout: CacheLayout, observer: Observer) -> None:
    """Raise UsageError for a layer of which nothing was seen."""
    missing = observer.missing()
    if missing:
        index, kind = missing[0]
        raise UsageError(f"{_KIND_NAMES[kind]} of layer {index} ({layout[index].module}) saw nothing: no scale can be solved for it")


def devices_of(run: CollectRun) -> dict[int, torch.device]:
    """Where each layer computes, and its counts are kept."""
    return {layer.index: _device_of(run.model, layer.module) for layer in run.layout.layers}


def _device_of(model: PreTrainedModel, module: str) -> torch.device:
    parameter = next(model.get_submodule(module).parameters(), None)
    return model.device if parameter is None or parameter.is_meta else parameter.device


def _batches_digest(batches: Sequence[Batch]) -> str:
    return sha256_bytes(*(part.tobytes() for batch in batches for part in (batch.input_ids, batch.lengths, batch.samples)))
