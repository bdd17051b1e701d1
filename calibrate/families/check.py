"""`recipes check`: the whole job on a tiny model of each family, loaded in real vLLM, every scale compared."""

import importlib.util
import tempfile
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.checkpoint import write_checkpoint
from calibrate.engines import Readback, load_scales
from calibrate.errors import CalibrateError, CheckFailed, HostError, UsageError
from calibrate.families.tiny import tiny_checkpoint, tiny_config
from calibrate.model import SourceCheckpoint
from calibrate.pipeline import JobOptions, collect_statistics
from calibrate.progress import meter, note, stderr
from calibrate.recipes import Recipe
from calibrate.scales import Scales, solve
from calibrate.statistics import Statistics

GRANULARITIES = ("tensor", "head")
_ROWS, _TOKENS = 4, 48
_MOST_CHARACTERS = 300
_AT_ONCE = 32  # checkpoints in one vLLM child


@dataclass(frozen=True)
class Row:
    """What became of one model type at one granularity.

    Attributes:
        outcome: "loads" (vLLM holds every scale, exactly), "refused" (the recipe says no, the tool refuses it, and vLLM, where it was asked, was
            seen not to hold the scales), "not checked" (vLLM cannot import the family's class on this host), or "failed".
        scales: scale tensors compared and found equal.
        reason: why not, "" where it loads.
    """

    family: str
    model_type: str
    granularity: str
    outcome: str
    scales: int
    reason: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.outcome != "failed"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Job:
    """A written checkpoint that waits for vLLM."""

    recipe: Recipe
    model_type: str
    granularity: str
    path: Path
    tensors: Mapping[str, np.ndarray]
    seconds: float

    def row(self, outcome: str, scales: int, reason: str, seconds: float = 0.0) -> Row:
        return Row(self.recipe.family, self.model_type, self.granularity, outcome, scales, reason, round(self.seconds + seconds, 2))


class _Unchecked(SourceCheckpoint):
    """Writes even where vLLM cannot load the scales: the check wants to see that with its own eyes."""

    def check_can_carry_scales(self) -> None:
        return


def check_recipes(recipes: Sequence[Recipe], granularities: Sequence[str] = GRANULARITIES, *, model_types: Sequence[str] | None = None) -> list[Row]:
    """Check recipes against real vLLM.

    Args:
        recipes: those with a `tiny:` part.
        model_types: only these of theirs; None is all.

    Returns:
        a row for each model type and granularity, in the recipes' order; a family that crashes is a row that says so.

    Raises:
        UsageError: a recipe without a tiny model. HostError: no vLLM here.
    """
    wanted = [(recipe, kind) for recipe in recipes for kind in _tiny_types(recipe) if model_types is None or kind in model_types]
    if not wanted:
        raise UsageError("nothing to check: no recipe asked for has a tiny model of these types")
    with tempfile.TemporaryDirectory(prefix="kv-calibrate-families-") as folder:
        rows: list[Row | _Job] = []
        with meter("calibrating tiny models", len(wanted), "models") as progress:
            for number, (recipe, kind) in enumerate(wanted):  # names are what a file says: they are no paths, and two files may say the same
                rows += _calibrate(recipe, kind, granularities, Path(folder) / str(number))
                progress.advance(1)
        jobs = [row for row in rows if isinstance(row, _Job)]
        if jobs:
            note(f"vLLM loads {len(jobs)} checkpoints; a second or two each")
        readbacks = dict(zip([job.path for job in jobs], _load_all(jobs), strict=True))
        return [_judge(row, readbacks[row.path]) if isinstance(row, _Job) else row for row in rows]


def _tiny_types(recipe: Recipe) -> list[str]:
    missing = [kind for kind in recipe.model_types if kind not in recipe.tiny]
    if missing or not recipe.tiny:
        raise UsageError(f"recipe {recipe.family} has no tiny model of {missing[0] if missing else 'any type'}: `recipes new` writes one (tiny:)")
    return list(recipe.model_types)


def _calibrate(recipe: Recipe, kind: str, granularities: Sequence[str], folder: Path) -> list["Row | _Job"]:
    """Everything but vLLM: build, collect, and solve and write for each granularity."""
    started = time.monotonic()

    def rows(outcome: str, reason: str) -> list[Row | _Job]:
        seconds = round((time.monotonic() - started) / len(granularities), 2)
        reason = reason.replace(str(folder / "source"), f"tiny {kind}")  # the folder is gone when this is read
        return [Row(recipe.family, kind, granularity, outcome, 0, reason, seconds) for granularity in granularities]

    missing = recipe.needs.get(kind)
    if missing and importlib.util.find_spec(missing) is None:
        return rows("not checked", f"vLLM's class imports {missing}, which is not installed here")
    try:
        source = SourceCheckpoint.open(tiny_checkpoint(folder / "source", tiny_config(kind, recipe.tiny[kind])))
        statistics = _collect(recipe, source)
        jobs: list[Row | _Job] = []
        for granularity in granularities:
            scales = solve(statistics, JobOptions(granularity=granularity).scales(recipe))
            tensors = _write(source, scales, folder / granularity)
            jobs.append(_Job(recipe, kind, granularity, folder / granularity, tensors, (time.monotonic() - started) / len(granularities)))
        return jobs
    except HostError:
        raise
    except CalibrateError as error:
        foretold = recipe.support == "refused" and not isinstance(error, CheckFailed) and str(recipe.reason) in str(error)
        return rows("refused", str(recipe.reason)) if foretold else rows("failed", str(error))
    except Exception as error:
        stderr.print(traceback.format_exc(), markup=False, soft_wrap=True)
        return rows("failed", " ".join(f"{type(error).__name__}: {error}".split()))


def _collect(recipe: Recipe, source: SourceCheckpoint) -> Statistics:
    """Collect as `run` does. Raises CheckFailed where the recipe's `support` and what the tool does disagree."""
    refusal = _refusal(source)
    if recipe.support == "vllm" and refusal:
        raise CheckFailed(f"the recipe says that vLLM loads the scales, but the tool refuses: {refusal}")
    if recipe.support == "collect-only" and str(recipe.reason) not in refusal:
        raise CheckFailed(f"the recipe says collect-only, but the tool {'refuses for another reason: ' + refusal if refusal else 'refuses nothing'}")
    if recipe.support == "refused" and refusal:
        raise UsageError(refusal)
    options = JobOptions(data="builtin", samples=_ROWS, sequence_length=_TOKENS, dtype="float32", device="cpu")
    statistics = collect_statistics(source, options, recipe, state=None)
    if recipe.support == "refused":
        raise CheckFailed("the recipe says refused, but statistics were collected")
    return statistics


def _refusal(source: SourceCheckpoint) -> str:
    try:
        source.check_can_carry_scales()
    except UsageError as error:
        return str(error).removeprefix(f"{source.path}: ")
    return ""


def _write(source: SourceCheckpoint, scales: Scales, output: Path) -> Mapping[str, np.ndarray]:
    unchecked = _Unchecked(source.path, source.config, source.weight_map, source.headers, source.indexed)
    return write_checkpoint(unchecked, scales, output).tensors


def _load_all(jobs: Sequence[_Job]) -> list[Readback | str]:
    found: list[Readback | str] = []
    with meter("loading in vLLM", len(jobs), "checkpoints") as progress:
        for first in range(0, len(jobs), _AT_ONCE):
            part = jobs[first : first + _AT_ONCE]
            found += _load(part)
            progress.advance(len(part))
    return found


def _load(jobs: Sequence[_Job]) -> list[Readback | str]:
    """One child; where it dies of one model, halves find out of which."""
    try:
        return list(load_scales([job.path for job in jobs], expected=[job.tensors for job in jobs]))
    except CheckFailed as error:
        if len(jobs) == 1:
            return [str(error)]
        middle = len(jobs) // 2
        return [*_load(jobs[:middle]), *_load(jobs[middle:])]


def _judge(job: _Job, readback: Readback | str) -> Row:
    if isinstance(readback, str):
        seconds, complaint = 0.0, readback
    else:
        seconds, complaint = readback.seconds, _complaint(job, readback)
    if job.recipe.support == "vllm":
        return job.row("failed", 0, complaint, seconds) if complaint else job.row("loads", len(job.tensors), "", seconds)
    if complaint:
        return job.row("refused", 0, job.recipe.reason or "", seconds)
    return job.row("failed", len(job.tensors), "vLLM holds every scale, but the recipe says collect-only: it is out of date", seconds)


def _complaint(job: _Job, readback: Readback) -> str:
    """Why vLLM does not hold these scales, "" where it does."""
    if readback.error:
        return textwrap.shorten(readback.error, _MOST_CHARACTERS, placeholder=" …")  # vLLM lists every parameter that it does have
    if readback.failures:
        rest = f" (and {len(readback.failures) - 1} more)" if len(readback.failures) > 1 else ""
        return f"{readback.failures[0]}{rest}"
    if len(readback.rows) != len(job.tensors):
        return f"vLLM holds {len(readback.rows)} scales, {len(job.tensors)} were written"
    if 3 * len({float(scale.max()) for scale in job.tensors.values()}) < len(job.tensors):  # layers that share a cache share their scales
        return "scales that are all alike prove nothing"
    return ""
