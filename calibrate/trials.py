"""What `niah`, `reason` and `lm-eval` need beside their questions: a checkpoint, an engine, and the variants of the cache by name."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from calibrate.engines.session import Engine, Variant
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import build_variants, checkpoint_scales, overlay, unit_scales
from calibrate.evaluate.niah import NeedleGrid, run_niah
from calibrate.evaluate.reasoning import ReasoningPlan, longest_problem, run_reasoning
from calibrate.evaluate.results import CALIBRATED, OLD_FORMULA, RANDOM, SIXTEEN_BIT, UNIT, LmEvalResult, NeedleResult, ReasoningResult
from calibrate.model import SourceCheckpoint
from calibrate.pipeline import JobOptions, collect_statistics, recipe_for
from calibrate.statistics import Statistics

RANDOM_ROWS, RANDOM_TOKENS = 2, 1024
_BATCH = {"transformers": 1, "vllm": 64}  # vLLM runs prompts side by side; the other one by one


@dataclass(frozen=True)
class EngineChoice:
    """Which engine, and how.

    Attributes:
        device, dtype: of transformers. attention_backend, tensor_parallel_size: of vLLM. None or 1 leaves it to the engine.
    """

    name: str = "transformers"
    device: str | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise UsageError for options of the other engine."""
        wrong = {
            "transformers": {"--attention-backend": self.attention_backend, "--tensor-parallel-size": self.tensor_parallel_size > 1},
            "vllm": {"--device": self.device, "--dtype": self.dtype},
        }[self.name]
        option = next((option for option, given in wrong.items() if given), None)
        if option is not None:
            raise UsageError(f"{option} is not for --engine {self.name}")


def needles(checkpoint: Path, choice: EngineChoice, names: Sequence[str], grid: NeedleGrid) -> NeedleResult:
    """`kv-calibrate niah`."""
    source = _open(checkpoint, choice)
    grid.check(source.context_length)
    variants = choose_variants(source, names, choice, seed=grid.seed)
    with open_engine(choice, source, grid.longest) as engine:
        return run_niah(checkpoint, engine, variants, grid, batch=_BATCH[choice.name], trust=choice.trust_remote_code)


def reasoning(checkpoint: Path, choice: EngineChoice, names: Sequence[str], plan: ReasoningPlan) -> ReasoningResult:
    """`kv-calibrate reason`."""
    source = _open(checkpoint, choice)
    plan.check()
    variants = choose_variants(source, names, choice, seed=plan.seed)
    with open_engine(choice, source, longest_problem(source, plan, trust=choice.trust_remote_code)) as engine:
        return run_reasoning(checkpoint, engine, variants, plan, batch=_BATCH[choice.name], trust=choice.trust_remote_code)


def harness(checkpoint: Path, choice: EngineChoice, names: Sequence[str], tasks: Sequence[str], **settings: Any) -> LmEvalResult:
    """`kv-calibrate lm-eval`; settings as for `run_lm_eval`. Raises HostError where lm-eval is not installed."""
    from calibrate.evaluate.lm_eval_tasks import rehearse, run_lm_eval

    source = _open(checkpoint, choice)
    variants = choose_variants(source, names, choice)
    settings["trust"] = choice.trust_remote_code
    with open_engine(choice, source, rehearse(source, tasks, **settings).longest) as engine:
        return run_lm_eval(checkpoint, engine, variants, tasks, batch=_BATCH[choice.name], **settings)


def _open(checkpoint: Path, choice: EngineChoice) -> SourceCheckpoint:
    choice.check()
    return SourceCheckpoint.open(checkpoint, trust_remote_code=choice.trust_remote_code)


def choose_variants(source: SourceCheckpoint, names: Sequence[str], choice: EngineChoice, *, seed: int = 0) -> tuple[Variant, ...]:
    """Variants by name, in the order given: the built-in ones, and NAME=PATH for another checkpoint or scales file.

    Raises:
        UsageError: an unknown name, one given twice, or a checkpoint that kv-calibrate did not write.
    """
    extra = dict(name.split("=", 1) for name in names if "=" in name)
    wanted = [name.split("=", 1)[0] for name in names]
    known = (SIXTEEN_BIT, UNIT, RANDOM, OLD_FORMULA, CALIBRATED)
    unknown = next((name for name in wanted if name not in known and name not in extra), None)
    if unknown is not None or not wanted or len(set(wanted)) < len(wanted):
        raise UsageError(f"--variants {','.join(names)}: some of {', '.join(known)} or NAME=PATH, each once, are wanted")
    calibrated = checkpoint_scales(source)
    if extra or {RANDOM, OLD_FORMULA} & set(wanted):
        paths = {name: Path(path) for name, path in extra.items()}
        built = build_variants(source, calibrated, random_statistics(source, choice, seed=seed), extra=paths)
    else:
        built = (Variant(SIXTEEN_BIT, None), Variant(UNIT, unit_scales(calibrated)), Variant(CALIBRATED, calibrated))
    by_name = {variant.name: variant for variant in built}
    return tuple(by_name[name] for name in wanted)


def random_statistics(source: SourceCheckpoint, choice: EngineChoice, *, seed: int = 0) -> Statistics:
    """What the model caches on 2,048 random tokens."""
    length = min(RANDOM_TOKENS, source.context_length or RANDOM_TOKENS)
    options = JobOptions(
        model=str(source.path),
        data="random",
        seed=seed,
        samples=RANDOM_ROWS,
        sequence_length=length,
        device=choice.device,
        dtype=choice.dtype,
        trust_remote_code=choice.trust_remote_code,
    )
    return collect_statistics(source, options, recipe_for(source, options), state=None)


@contextmanager
def open_engine(choice: EngineChoice, source: SourceCheckpoint, longest: int) -> Iterator[Engine]:
    """The engine; vLLM's variants are linked checkpoints beside the source (where links work) that are gone afterwards."""
    if choice.name == "transformers":
        from calibrate.engines.transformers_engine import TransformersEngine

        yield TransformersEngine(source, device=choice.device, dtype=choice.dtype, trust_remote_code=choice.trust_remote_code)
        return
    from calibrate.engines.vllm_engine import VllmEngine

    with tempfile.TemporaryDirectory(prefix=f".{source.path.name}.variants-", dir=source.path.resolve().parent) as folder:
        yield VllmEngine(
            source,
            folder=Path(folder),
            overlay=lambda variant, base: overlay(source, variant, base / quote(variant.name, safe="")),
            attention_backend=choice.attention_backend,
            tensor_parallel_size=choice.tensor_parallel_size,
            max_model_len=longest,
        )
