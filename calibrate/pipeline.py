"""The main job, top to bottom: a model and a corpus in; a calibrated checkpoint that vLLM was seen to load out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from calibrate.checkpoint import Written, check_layers, write_checkpoint
from calibrate.collect import CollectRun, Team, collect, collect_streamed, discard_states, layers_folder, plan_streaming, prepare
from calibrate.corpus import Corpus, CorpusOptions, load_corpus
from calibrate.engines import Readback, unlisted, verify_checkpoint
from calibrate.errors import UsageError
from calibrate.evaluate.evidence import save_readback
from calibrate.fold import check_fold, discard_folded, folded
from calibrate.inspection import Inspection, inspect
from calibrate.kvarn.solve import check_longest
from calibrate.model import SourceCheckpoint, choose_device, compute_dtype, load_model, load_tokenizer, resolve_model
from calibrate.model.skip import SkipLayers, parse_skip_layers
from calibrate.progress import note
from calibrate.recipes import Recipe, choose_recipe
from calibrate.scales import PolicyOptions, Scales, solve
from calibrate.statistics import Statistics
from calibrate.weights import carrier, check_carrier, discard_carrier


class JobOptions(BaseModel):
    """What the command line gives. None leaves a choice to the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None
    weights: str | None = None
    fold: str | None = None
    recipe: str | None = None
    data: str | None = None
    samples: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    text_column: str | None = None
    chat_column: str | None = None
    split: str = "train"
    device: str | None = None
    dtype: str | None = None
    tokens_per_batch: int | None = None
    save_every: float = 60.0
    kvarn: bool = False
    streaming: str = "auto"
    trust_remote_code: bool = False
    policy: str | None = None
    granularity: str | None = None
    number_format: str | None = None
    margin: float | None = None
    percentile: float | None = None
    search_octaves: int | None = None
    skip_layers: str | None = None

    def corpus(self, recipe: Recipe, context_length: int | None = None) -> CorpusOptions:
        """The recipe's corpus, its rows no longer than the model's context, with what was asked for on top."""
        proposed = recipe.corpus.model_dump()
        proposed["sequence_length"] = min(proposed["sequence_length"], context_length or proposed["sequence_length"])
        chosen = {name: getattr(self, name) for name in ("data", "samples", "sequence_length") if getattr(self, name) is not None}
        rest = {name: getattr(self, name) for name in ("seed", "text_column", "chat_column", "split")}
        return CorpusOptions(**{**proposed, **chosen, **rest})

    def scales(self, recipe: Recipe) -> PolicyOptions:
        """The recipe's scale options with what was asked for on top."""
        asked = {name: getattr(self, name) for name in PolicyOptions.model_fields if getattr(self, name) is not None}
        try:
            return PolicyOptions(**{**recipe.scales.model_dump(), **asked})
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{'.'.join(str(part) for part in first['loc'])} {first['input']}: {first['msg']}") from error

    def skipped(self, recipe: Recipe) -> SkipLayers:
        """The recipe's layers for a 16-bit cache, or those asked for."""
        return recipe.skip_layers if self.skip_layers is None else parse_skip_layers(self.skip_layers)


@dataclass(frozen=True)
class JobResult:
    """What `run` leaves behind. `readback` is None where verification was switched off."""

    written: Written
    scales: Scales
    inspection: Inspection
    readback: Readback | None


def run(options: JobOptions, output: Path | None, *, force: bool = False, verify: bool = True) -> JobResult:
    """Calibrate, write, and have vLLM read it back."""
    original = open_source(options)
    output = output or Path("calibrated") / "-".join(filter(None, [model_name(original, options), options.weights]))
    recipe = recipe_for(original, options)
    policy, skip = options.scales(recipe), options.skipped(recipe)
    check_fold(original, options.fold, options.weights)
    check_carrier(original, output, options.weights, policy, force=force, for_vllm=verify)
    note(f"model {original.path} ({original.model_type}), recipe {recipe.family}, output {output}")
    if verify and (unknown := unlisted(original.config)):
        note(unknown)
    source = prepare_weights(original, options, recipe, output)
    state = output.with_name(f".{output.name}.collect-state.safetensors")

    def check(job: CollectRun) -> None:
        check_layers(job.layout.as_dict()["layers"], policy, skip)
        if options.kvarn:
            check_longest(max(len(sample.tokens) for sample in job.corpus.samples))

    statistics = collect_statistics(source, options, recipe, state=state, check=check)
    scales = solve(statistics, policy)
    written = write_checkpoint(source, scales, output, statistics=statistics, skip_layers=skip, force=force)
    discard_states(state)
    discard_carrier(output)
    discard_folded(output)
    readback = verify_checkpoint(output, expected=written.tensors) if verify else None
    if readback is not None:
        save_readback(output, readback)
    return JobResult(written, scales, inspect(output, scales.options), readback)


def model_name(source: SourceCheckpoint, options: JobOptions) -> str:
    """What to call the model: the folder's name, or a hub id's last part (its folder is called after a commit)."""
    path = source.path.resolve()
    return Path(options.model).name if options.model and path.parent.name == "snapshots" else path.name


def open_source(options: JobOptions) -> SourceCheckpoint:
    """Find and check the model folder."""
    return SourceCheckpoint.open(resolve_model(options.model), trust_remote_code=options.trust_remote_code)


def recipe_for(source: SourceCheckpoint, options: JobOptions) -> Recipe:
    """The recipe that was asked for, else the model's."""
    return choose_recipe(source.model_type, options.recipe, source.text_config.get("model_type", ""))


def prepare_weights(source: SourceCheckpoint, options: JobOptions, recipe: Recipe, output: Path) -> SourceCheckpoint:
    """What is calibrated: the source, or its weights quantized (`weights`), converted or folded (`fold`) first, beside the output."""
    device, trust = choose_device(options.device), options.trust_remote_code
    if options.fold is not None:
        return folded(source, corpus_of(source, options, recipe), output, options.fold, device=device, trust=trust)
    return carrier(source, output, options.weights, lambda: corpus_of(source, options, recipe), seed=options.seed, device=device, trust=trust)


def corpus_of(source: SourceCheckpoint, options: JobOptions, recipe: Recipe) -> Corpus:
    """The rows that were asked for, in the model's tokens."""
    tokenizer = load_tokenizer(source, trust_remote_code=options.trust_remote_code)
    return load_corpus(options.corpus(recipe, source.context_length), tokenizer, vocab_size=source.vocab_size, context_length=source.context_length)


def collect_statistics(
    source: SourceCheckpoint,
    options: JobOptions,
    recipe: Recipe,
    *,
    state: Path | None,
    check: Callable[[CollectRun], Any] | None = None,
    team: Team | None = None,
) -> Statistics:
    """Corpus and model → statistics; an interrupted run goes on from `state`. `check` is given the run beforehand, and may refuse.

    `team`: the processes that share the work out; each returns the same statistics.
    """
    team = team or Team()
    device = team.device(choose_device(options.device))
    corpus = corpus_of(source, options, recipe)
    dtype, trust = compute_dtype(source, device, options.dtype), options.trust_remote_code
    how = {"tokens_per_batch": options.tokens_per_batch, "second_moments": options.kvarn}
    try:
        plan = plan_streaming(source, corpus, dtype, _streaming(options, device, team, state), trust_remote_code=trust)
        if plan is not None:
            note(str(plan))
            how |= {"state_seconds": options.save_every, "trust_remote_code": trust, "check": check}
            return collect_streamed(source, corpus, plan, layers_folder(state), dtype=dtype, **how)
        job = prepare(load_model(source, device=device, dtype=dtype, trust_remote_code=trust), source, corpus, **how)
        if check is not None:
            check(job)
        return collect(job, state=state, state_seconds=options.save_every, team=team)
    except OverflowError as error:
        raise UsageError(f"{source.path} writes numbers into its cache whose squares exceed 2^100: its weights are damaged") from error


def _streaming(options: JobOptions, device: str, team: Team, state: Path | None) -> str:
    """The mode that was asked for, as far as it can be had: layers are streamed to one process, on the CPU."""
    can = device == "cpu" and team.rank.size == 1 and state is not None
    if options.streaming == "always" and not can:
        raise UsageError("--streaming always is for one process on the CPU: give --device cpu, without torchrun")
    return options.streaming if can else "never"
