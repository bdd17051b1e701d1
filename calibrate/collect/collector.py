"""The collection: a model and batches in, `Statistics` out."""

import json
from collections.abc import Callable, Sequence
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
from calibrate.collect.observer import Observer
from calibrate.collect.state import ResumeState, interrupts
from calibrate.collect.watch import observe
from calibrate.corpus import Batch, Corpus, plan_batches
from calibrate.errors import UsageError
from calibrate.model import CacheLayout, SourceCheckpoint, cache_dtype_of, probe_layout
from calibrate.progress import Meter, meter, note
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
        return int(sum(int(batch.lengths.sum()) for batch in self.batches))

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
    run: CollectRun, *, state: Path | None = None, state_seconds: float = 60.0, after_batch: Callable[[Batch, Observer], None] | None = None
) -> Statistics:
    """Observe every batch.

    Args:
        state: file that keeps partial results, so that an interrupted run goes on where it stopped; removed by the caller's next step,
            when the statistics are safe (`ResumeState.discard`).
        after_batch: called with each batch and all that was observed up to its end.

    Raises:
        UsageError: infinity or NaN in K, V or Q (layer, head and sample are named), or a layer that saw nothing.
        KeyboardInterrupt: after the state was written.
    """
    provenance = run.provenance()
    resume = ResumeState(state, sha256_bytes(json.dumps(provenance, sort_keys=True).encode()), state_seconds)
    observer = Observer(run.layout, CACHE_DTYPES[cache_dtype_of(run.source)], second_moments=run.second_moments)
    done, layers = resume.read(len(run.batches))
    observer.restore(layers, _devices(run))
    finished = sum(int(batch.lengths.sum()) for batch, ready in zip(run.batches, done, strict=True) if ready)
    if finished:
        note(f"resuming: {finished:,} of {run.tokens:,} tokens are done")
    with ThreadPoolExecutor(1) as pool, meter("calibrating", run.tokens, done=finished) as progress:
        digests = pool.submit(run.source.weight_digests)  # reading and hashing the shards costs no time beside the forward
        _observe_all(run, observer, resume, done, progress, after_batch)
        provenance["model"]["weights"] = digests.result()
    _check_seen(run.layout, observer)
    counted = {"tokens": run.tokens, "documents": run.corpus.documents, "samples": len(run.corpus.samples)}
    return Statistics(observer.cache_dtype, observer.layers(), run.layout.as_dict(), counted, (provenance,))


def _observe_all(
    run: CollectRun,
    observer: Observer,
    resume: ResumeState,
    done: np.ndarray,
    progress: Meter,
    after_batch: Callable[[Batch, Observer], None] | None,
) -> None:
    with interrupts() as stop:
        for number, batch in enumerate(run.batches):
            if done[number]:
                continue
            if stop.asked:
                resume.write(done, observer)
                kept = f"; run the same command again to go on from {resume.path}" if resume.path and done.any() else ""
                note(f"interrupted after {int(done.sum())} of {len(done)} batches{kept}")
                raise KeyboardInterrupt
            bad = _observe_batch(run, observer, batch)
            if bad:
                resume.discard()  # no later run could go on from here
                raise UsageError(_nonfinite_message(run, observer, batch, bad))
            done[number] = True
            if after_batch is not None:
                after_batch(batch, observer)
            progress.advance(int(batch.lengths.sum()))
            resume.write_if_due(done, observer)


def _observe_batch(run: CollectRun, observer: Observer, batch: Batch) -> list[tuple[int, str, int]]:
    device = run.model.device
    observer.begin(batch.lengths, batch.input_ids.shape[1], device)
    observe(run.model, run.layout, torch.from_numpy(batch.input_ids).to(device), observer.see)
    return observer.end(batch.part)


def _nonfinite_message(run: CollectRun, observer: Observer, batch: Batch, bad: Sequence[tuple[int, str, int]]) -> str:
    index, kind, head = bad[0]
    sample = "unknown sample"
    for row, (length, number) in enumerate(zip(batch.lengths, batch.samples, strict=True)):
        alone = Batch(batch.input_ids[row : row + 1, :length], batch.lengths[row : row + 1], batch.samples[row : row + 1], batch.part)
        again = _observe_batch(run, Observer(run.layout, observer.cache_dtype), alone)
        if again:
            index, kind, head = again[0]
            sample = f"sample {number} ({run.corpus.samples[number].source})"
            break
    name = run.layout[index].module
    return f"{_KIND_NAMES[kind]} of layer {index} ({name}), head {head}, is infinite or NaN on {sample}: nothing was written"


def _check_seen(layout: CacheLayout, observer: Observer) -> None:
    missing = observer.missing()
    if missing:
        index, kind = missing[0]
        raise UsageError(f"{_KIND_NAMES[kind]} of layer {index} ({layout[index].module}) saw nothing: no scale can be solved for it")


def _devices(run: CollectRun) -> dict[int, torch.device]:
    return {layer.index: _device_of(run.model, layer.module) for layer in run.layout.layers}


def _device_of(model: PreTrainedModel, module: str) -> torch.device:
    parameter = next(model.get_submodule(module).parameters(), None)
    return model.device if parameter is None else parameter.device


def _batches_digest(batches: Sequence[Batch]) -> str:
    return sha256_bytes(*(part.tobytes() for batch in batches for part in (batch.input_ids, batch.lengths, batch.samples)))
