"""`kv-calibrate compare --formats`: every cache format on the same text, needles and problems, against its size."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import checkpoint_scales
from calibrate.evaluate.compare import CompareOptions, held_out_corpus, score_all, score_plan, scored_corpus
from calibrate.evaluate.evidence import check_evidence_place, subject_of
from calibrate.evaluate.kvformats import served_name
from calibrate.evaluate.mcnemar import McNemar, compare_cells
from calibrate.evaluate.niah import NeedleGrid, build_grid, run_niah
from calibrate.evaluate.offline import Prepared, prepare_offline
from calibrate.evaluate.pareto import SpectrumBounds, front, judge, recommend
from calibrate.evaluate.prompts import Prompter
from calibrate.evaluate.reasoning import ReasoningPlan, longest_problem, run_reasoning
from calibrate.evaluate.results import FOLDER, SIXTEEN_BIT, Fidelity, save
from calibrate.evaluate.spectrum_result import FormatRow, Hits, SpectrumResult, StorageError
from calibrate.evaluate.storage import cache_bytes, storage_errors
from calibrate.evaluate.summary import compare_problems
from calibrate.lowbit import FORMATS, LowBitFormat, Placement, make_format
from calibrate.model import SourceCheckpoint, cache_dtype_of, load_tokenizer
from calibrate.progress import note
from calibrate.statistics import CACHE_DTYPES

KIND = "formats"
DEFAULT_FORMATS = (
    "fp8_e4m3",
    "fp8_e5m2",
    "int8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "turboquant_paper_3bit",
    "kivi_4bit",
    "kivi_2bit",
    "gear_4bit",
    "gear_2bit",
    "kvarn_k4v4_g128",
    "kvarn_k4v2_g128",
    "kvarn_k4v2_g128+balanced",
    "kvarn_k2v2_g128",
    "kvarn_k2v2_g128+mean",
    "kvarn_k2v2_g128+smooth",
    "kvarn_k2v2_g128+balanced",
    "additive",
)
FEW_FORMATS = (  # what engines serve, and what may come next; without GEAR and additive codebooks, which take longest
    "fp8_e4m3",
    "int8_per_token_head",
    "int4_per_token_head",
    "turboquant_4bit_nc",
    "turboquant_3bit_nc",
    "kivi_4bit",
    "kivi_2bit",
    "kvarn_k4v2_g128",
    "kvarn_k2v2_g128",
    "kvarn_k2v2_g128+balanced",
)
_QUICK_LENGTH = 768  # tokens, six blocks: a sink and a tail of 128 leave two thirds of them quantized
_BATCH = 12  # prompts whose answers grow together: each holds its cache meanwhile
_CONTEXT = 32768  # tokens for which bytes a token are given, or the model's own limit


class SpectrumOptions(BaseModel):
    """What is compared and how much of it.

    Attributes:
        compare: the scored text, device, compute type and prefill block. Blocks are short by default: a block attends to its own tokens in 16 bits
            in many formats (`LowBitFormat.own_exact_above`), and in long blocks these would seem better than they are.
        offline: the text that tables and codebooks are made of.
        needles, reasoning: None leaves them out.
        storage_rows: scored rows whose K and V are stored in every format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    formats: tuple[str, ...] = DEFAULT_FORMATS
    compare: CompareOptions = CompareOptions(sequence_length=1024, block=128)
    offline: CompareOptions = CompareOptions(data="builtin", samples=8, sequence_length=1024)
    needles: NeedleGrid | None = NeedleGrid(lengths=(1024, 2048), depths=(0.0, 0.25, 0.5, 0.75, 1.0), needles_per_cell=4)
    reasoning: ReasoningPlan | None = ReasoningPlan(problems=4)
    storage_rows: int = Field(4, ge=0)
    bounds: SpectrumBounds = SpectrumBounds()

    def check(self, context: int | None) -> None:
        """Raise UsageError for formats that are none, twice or unknown, and for a grid that is impossible."""
        unknown = next((name for name in self.formats if name not in FORMATS), None)
        if unknown is not None:
            like = "".join(f", perhaps {name}" for name in get_close_matches(unknown, FORMATS, 1))
            raise UsageError(f"--formats {unknown}: no such format{like}; there are few, default, all, {', '.join(FORMATS)}")
        if not self.formats:
            raise UsageError("--formats names none: give few, default, all, or names with commas between")
        twice = next((name for name in self.formats if self.formats.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"--formats {twice}: named twice")
        if self.compare.engine != "transformers":
            raise UsageError("--formats runs in the transformers engine: leave --engine away")
        if self.needles is not None:
            self.needles.check(context)
        if self.reasoning is not None:
            self.reasoning.check()


def quick(options: SpectrumOptions, keep: frozenset[str] = frozenset()) -> SpectrumOptions:
    """The same formats on less text, fewer and shorter needle prompts and no problems: a first look. As many documents and needles as intervals and
    `SpectrumBounds.least_hits` need. `keep`: options of the comparison that the user gave."""
    needles = options.needles
    if needles is not None:
        needles = NeedleGrid(lengths=(_QUICK_LENGTH,), depths=(0.0, 0.5, 1.0), needles_per_cell=4, seed=needles.seed)
    less = {name: value for name, value in {"samples": 8, "sequence_length": _QUICK_LENGTH}.items() if name not in keep}
    compare = options.compare.model_copy(update=less)
    return options.model_copy(update={"compare": compare, "needles": needles, "reasoning": None, "storage_rows": 2})


def evidence_path(checkpoint: Path) -> Path:
    """Where the comparison is kept."""
    return checkpoint / FOLDER / f"{KIND}-transformers.json"


def run_spectrum(checkpoint: Path, options: SpectrumOptions) -> SpectrumResult:
    """Compare, and keep the result in the checkpoint. A killed run goes on where it was when it is started again with the same options.

    Raises:
        UsageError: no checkpoint of ours or one that cannot be written to, unknown formats, a corpus that cannot be used.
    """
    trust = options.compare.trust_remote_code
    source = SourceCheckpoint.open(checkpoint, trust_remote_code=trust)
    options = _within(options, source.context_length)
    options.check(source.context_length)
    options = _askable(options, source)
    check_evidence_place(checkpoint)
    subject, path = subject_of(checkpoint), evidence_path(checkpoint)
    corpus = scored_corpus(source, options.compare, checkpoint_scales(source))
    compare = options.compare
    engine = TransformersEngine(source, device=compare.device, dtype=compare.dtype, block=compare.block, trust_remote_code=trust)
    text = held_out_corpus(source, options.offline, options.offline.corpus())
    if corpus.digest == text.digest:
        raise UsageError("the scored text is the very text that tables and codebooks are made of: give another --data")
    prepared = prepare_offline(engine, checkpoint, options.formats, text, path.with_name(f"{KIND}-codebooks.safetensors"))
    formats, left_out = _fitting(engine, options.formats, prepared)
    note(f"formats: {', '.join(fmt.name for fmt, _ in formats)}")
    variants = [Variant(SIXTEEN_BIT, None), *(Variant(fmt.name, None, fmt) for fmt, _ in formats)]
    rows = [sample.tokens for sample in corpus.samples[: options.storage_rows]]
    errors = storage_errors(engine.model, engine.layout, rows, [placement for _, placement in formats])
    plan = score_plan(source.weight_digests(), corpus, compare) | {"offline": prepared.description}
    fidelities, parts = score_all(engine, variants, corpus, path, plan, compare)
    needles = _needles(checkpoint, engine, variants, options)
    problems = _problems(checkpoint, engine, variants, options)
    table = _Table(engine, options, min(source.context_length or _CONTEXT, _CONTEXT), max(len(sample.tokens) for sample in corpus.samples))
    found = [table.row(fidelities[0], None, (None, None), needles, problems)]
    found += [table.row(each, both, error, needles, problems) for each, both, error in zip(fidelities[1:], formats, errors, strict=True)]
    result = SpectrumResult(
        subject=subject,
        model=checkpoint.resolve().name,
        corpus={"digest": corpus.digest, **corpus.description},
        offline=prepared.description,
        context=table.context,
        measured_length=table.measured,
        rows=tuple(found),
        front=front(found),
        left_out=left_out,
        recommendation=recommend(found),
    )
    save(result, path)
    for part in parts:
        part.unlink(missing_ok=True)
    return result


def _within(options: SpectrumOptions, context: int | None) -> SpectrumOptions:
    """Rows that tables are made of no longer than the model's context, needle prompts no longer than what it holds with an answer."""
    if context is None:
        return options
    offline = options.offline.model_copy(update={"sequence_length": min(options.offline.sequence_length, context)})
    options, grid = options.model_copy(update={"offline": offline}), options.needles
    if grid is None or grid.longest <= context:
        return options
    room = context - (grid.longest - max(grid.lengths))
    lengths = tuple(dict.fromkeys(min(length, room) for length in grid.lengths))
    note(f"needles in prompts of {', '.join(f'{length:,}' for length in lengths)} tokens: with their answers the model's context holds no more")
    return options.model_copy(update={"needles": replace(grid, lengths=lengths)})


def _askable(options: SpectrumOptions, source: SourceCheckpoint) -> SpectrumOptions:
    """Problems are left out where the model's context does not hold them. Raises UsageError for needle prompts that cannot be built, which would
    otherwise be found after all formats are scored."""
    trust = options.compare.trust_remote_code
    if options.needles is not None:
        build_grid(options.needles, Prompter(load_tokenizer(source, trust_remote_code=trust)))
    if options.reasoning is not None:
        try:
            longest_problem(source, options.reasoning, trust=trust)
        except UsageError as error:
            note(f"no problems are asked: {error}")
            return options.model_copy(update={"reasoning": None})
    return options


def _fitting(engine: TransformersEngine, names: Sequence[str], prepared: Prepared) -> tuple[list[tuple[LowBitFormat, Placement]], dict[str, str]]:
    """The formats that can store this model, with what each does to its layers; the others with their reasons."""
    cache_dtype = CACHE_DTYPES[cache_dtype_of(engine.source)].dtype
    config = engine.model.config.get_text_config(decoder=True)
    formats, left_out = [], dict(prepared.faults)
    for name in names:
        if name in left_out:
            continue
        try:
            fmt = make_format(name, prepared.offline_for(name))
            placement = Placement(engine.layout, fmt, cache_dtype, config)
        except UsageError as error:
            left_out[name] = str(error)
            continue
        if placement.whole or placement.passing:
            formats.append((fmt, placement))
        else:
            left_out[name] = f"{name} leaves every layer of this model in 16 bits"
    if not formats:
        raise UsageError(f"none of the formats fits this model: {'; '.join(f'{name}: {reason}' for name, reason in left_out.items())}")
    return formats, left_out


def _needles(checkpoint: Path, engine: TransformersEngine, variants: Sequence[Variant], options: SpectrumOptions) -> dict[str, Hits]:
    if options.needles is None:
        return {}
    trust = options.compare.trust_remote_code
    result = run_niah(checkpoint, engine, variants, options.needles, batch=_BATCH, trust=trust, kind=f"{KIND}-niah")
    cells = {each.variant: each.cells for each in result.variants}
    return {name: _hits([cell.hit for cell in own], compare_cells(cells[SIXTEEN_BIT], own)) for name, own in cells.items()}


def _problems(checkpoint: Path, engine: TransformersEngine, variants: Sequence[Variant], options: SpectrumOptions) -> dict[str, Hits]:
    if options.reasoning is None:
        return {}
    trust = options.compare.trust_remote_code
    result = run_reasoning(checkpoint, engine, variants, options.reasoning, batch=_BATCH, trust=trust, kind=f"{KIND}-reasoning")
    solved = {each.variant: each.problems for each in result.variants}
    return {name: _hits([each.correct for each in own], compare_problems(solved[SIXTEEN_BIT], own)) for name, own in solved.items()}


def _hits(hits: list[bool], test: McNemar) -> Hits:
    return Hits(hits=sum(hits), asked=len(hits), lost=test.first_only, won=test.second_only, p_worse=test.second_worse)


class _Table:
    """Makes rows."""

    def __init__(self, engine: TransformersEngine, options: SpectrumOptions, context: int, measured: int) -> None:
        self._layout, self._bounds = engine.layout, options.bounds
        self.context, self.measured = context, measured

    def row(
        self,
        fidelity: Fidelity,
        stored: tuple[LowBitFormat, Placement] | None,
        errors: tuple[StorageError | None, StorageError | None],
        needles: dict[str, Hits],
        problems: dict[str, Hits],
    ) -> FormatRow:
        name = fidelity.variant
        fmt, placement = stored or (None, None)
        served = None if fmt is None else served_name(name)
        verdict, reasons = judge(fidelity, served, needles.get(name), problems.get(name), self._bounds) if fmt else ("reference", [])
        writing = {layer.index for layer in self._layout.layers if layer.writes}
        kept = writing - (placement.whole | placement.passing) if placement else writing
        return FormatRow(
            variant=name,
            source=fmt.source if fmt else "what the model was trained with",
            served_as=served,
            sixteen_bit_layers=tuple(sorted(kept)),
            bytes_per_token=cache_bytes(self._layout, placement, self.context) / self.context,
            bytes_at_measured=cache_bytes(self._layout, placement, self.measured) / self.measured,
            key_error=errors[0],
            value_error=errors[1],
            fidelity=fidelity,
            needles=needles.get(name),
            reasoning=problems.get(name),
            verdict=verdict,
            reasons=tuple(reasons),
        )
