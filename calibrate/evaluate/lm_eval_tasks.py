"""lm-eval's tasks on our engines, so that every variant of the cache is asked the same. Importing this needs the extra `lm-eval`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import sha256_bytes
from calibrate.engines.session import Engine, EngineInfo, Session, TokenScores, Variant
from calibrate.errors import CalibrateError, UsageError
from calibrate.evaluate.evidence import subject_of
from calibrate.evaluate.journal import Journal
from calibrate.evaluate.lm_eval_model import SessionLM
from calibrate.evaluate.prompts import stop_ids
from calibrate.evaluate.results import FOLDER, LmEvalMetric, LmEvalResult, LmEvalTask, LmEvalVariant, save
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.progress import note

KIND = "lm-eval"
_CONTEXT = 2048  # where a model names none, as lm-eval
_BOOTSTRAPS = 1000  # of metrics whose standard error has no formula


class _Rehearsal:
    """A session that answers at once: what the tasks ask is known, and found to be usable, before a model is loaded."""

    def info(self) -> EngineInfo:
        raise NotImplementedError

    def score(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        return [TokenScores(np.zeros(len(row) - 1, np.float32), np.zeros((len(row) - 1, 1), np.int32), np.zeros((len(row) - 1, 1))) for row in rows]

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        return [[] for _ in prompts]


@dataclass(frozen=True)
class Rehearsed:
    """What the tasks ask: tokens of the longest request with its answer, and the digest of all."""

    longest: int
    requests: str
    truncated: int = field(compare=False)


def rehearse(
    source: SourceCheckpoint,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    trust: bool = False,
) -> Rehearsed:
    """Build every request without a model. Raises UsageError as `run_lm_eval`."""
    return _rehearse(source, _Harness(tuple(tasks), limit, include_path, num_fewshot), trust)


def run_lm_eval(
    checkpoint: Path,
    engine: Engine,
    variants: Sequence[Variant],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    batch: int = 1,
    trust: bool = False,
) -> LmEvalResult:
    """Put lm-eval's tasks to every variant and write `kv_calibration/evidence/lm-eval-<engine>.json` into the checkpoint. A run that was
    killed goes on after the last variant that was finished.

    Args:
        tasks: names of lm-eval's tasks, groups and tags. Most load their data from the hub.
        limit: documents of a task at most. num_fewshot: worked examples, None as the task says.
        include_path: a folder of the user's own task YAML files.
        batch: rows or prompts that the engine is handed at once. trust: run a tokenizer's own Python code.

    Raises:
        UsageError: no or unknown tasks, a task that cannot be built or does not fit (images, code to be run, sampled answers, too long).
    """
    harness = _Harness(tuple(tasks), limit, include_path, num_fewshot)
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"variants must be some, each once: {', '.join(names) or 'none given'}")
    subject, source = subject_of(checkpoint), SourceCheckpoint.open(checkpoint, trust_remote_code=True)
    asked = _rehearse(source, harness, trust)
    if asked.truncated:
        note(f"{asked.truncated:,} prompts are longer than the context: their beginning is cut off")
    settings = {
        "tasks": list(tasks),
        "limit": limit,
        "num_fewshot": num_fewshot,
        "include_path": None if include_path is None else include_path.name,
        "lm_eval": version("lm-eval"),
        "requests": asked.requests,
    }
    results, journals = [], []
    for variant in variants:
        with engine.session(variant) as session:
            info = session.info()
            path = checkpoint / FOLDER / f"{KIND}-{info.engine}.json"
            cache = variant.digest()
            plan = json.dumps([subject.model_dump(), settings, variant.name, cache, info.model_dump()], sort_keys=True)
            journal = Journal(path, variant.name, sha256_bytes(plan.encode()), LmEvalVariant)
            done = journal.open()
            if not done:
                model = _model(source, session, trust, batch, f"{KIND} {variant.name}")
                rows = _rows(harness.run(model, _BOOTSTRAPS))
                if model.requests != asked.requests:
                    raise UsageError(f"{', '.join(tasks)}: the requests differ from run to run, so no two caches can be compared")
                done = [LmEvalVariant(variant=variant.name, engine=info, truncated=model.truncated, tasks=rows)]
                journal.add(done, 0)
            results += done
            journals.append(journal)
    result = LmEvalResult(subject=subject, model=source.path.resolve().name, settings=settings, variants=tuple(results))
    save(result, path)
    for journal in journals:
        journal.discard()
    return result


@dataclass(frozen=True)
class _Harness:
    tasks: tuple[str, ...]
    limit: int | None
    include_path: Path | None
    num_fewshot: int | None

    def check(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"--tasks {','.join(self.tasks)}: some tasks, each once, are wanted")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UsageError(f"no such folder: {self.include_path}")
        if (self.limit is not None and self.limit < 1) or (self.num_fewshot or 0) < 0:
            raise UsageError("a limit is at least 1, and the number of examples at least 0")

    def run(self, model: SessionLM, bootstraps: int) -> dict[str, Any]:
        """lm-eval's results. What tasks raise is of any kind: their YAML, templates, Python and data loaders are others' code."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        self.check()
        try:
            own = TaskManager(include_path=None if self.include_path is None else str(self.include_path), include_defaults=False)
            complete = all(name in own.all_tasks for name in self.tasks)  # lm-eval's own thousands of files take many seconds to read
            manager = own if complete else TaskManager(include_path=own.include_path)
            unknown = next((name for name in self.tasks if name not in manager.all_tasks), None)
            if unknown is not None:
                raise UsageError(f"lm-eval has no task {unknown}: `lm-eval ls tasks` lists them, and --include-path adds a folder of your own")
            return simple_evaluate(
                model,
                tasks=list(self.tasks),
                task_manager=manager,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                bootstrap_iters=bootstraps,
                log_samples=False,
            )
        except CalibrateError:
            raise
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), "")
            raise UsageError(f"lm-eval cannot run {', '.join(self.tasks)}: {type(error).__name__}: {line}") from error


def _rehearse(source: SourceCheckpoint, harness: _Harness, trust: bool) -> Rehearsed:
    model = _model(source, _Rehearsal(), trust, 1 << 10, f"{KIND} requests")
    harness.run(model, 0)
    if not model.longest:
        raise UsageError(f"{', '.join(harness.tasks)} asks nothing")
    return Rehearsed(model.longest, model.requests, model.truncated)


def _model(source: SourceCheckpoint, session: Session, trust: bool, batch: int, label: str) -> SessionLM:
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    ends = stop_ids(source.path, tokenizer)
    if not ends:
        raise UsageError(f"the tokenizer in {source.path} has no token that ends a text")
    return SessionLM(session, tokenizer, ends, limit=source.context_length or _CONTEXT, batch=batch, label=label)


def _rows(found: dict[str, Any]) -> tuple[LmEvalTask, ...]:
    """lm-eval's results as ours: its keys are "acc,none" and "acc_stderr,none"."""
    rows = []
    for task, values in found["results"].items():
        keys = [key for key in values if "," in key and not key.partition(",")[0].endswith("_stderr")]
        better = found["higher_is_better"].get(task, {})
        metrics = []
        for name, chosen in (key.split(",", 1) for key in keys):
            stderr = _finite(values.get(f"{name}_stderr,{chosen}"))
            value = _finite(values[f"{name},{chosen}"])
            metrics.append(LmEvalMetric(metric=name, filter=chosen, value=value, stderr=stderr, higher_is_better=better.get(name)))
        if metrics:
            number = found["versions"].get(task)
            shots, documents = found["n-shot"].get(task), values["sample_len"]
            row = LmEvalTask(task=task, version=None if number is None else str(number), documents=documents, shots=shots, metrics=tuple(metrics))
            rows.append(row)
    return tuple(rows)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | np.number) and math.isfinite(value) else None
