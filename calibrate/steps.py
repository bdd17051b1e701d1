"""The steps of the main job on files, one function a command: each can be run, repeated and inspected alone."""

from collections.abc import Sequence
from pathlib import Path

from calibrate.artefact import read_header
from calibrate.checkpoint import Written, check_creatable, write_checkpoint
from calibrate.checkpoint.exports import FORMATS, Exported, ExportOptions, open_given
from calibrate.collect import discard_states, joined
from calibrate.engines.host import sixteen_bit
from calibrate.engines.serving import serving
from calibrate.errors import UsageError
from calibrate.evaluate.evidence import check_target
from calibrate.fold import FoldResult, check_fold, fold_checkpoint, parse_switches
from calibrate.inspection import Inspection, inspect
from calibrate.kvarn import KVarNTables
from calibrate.kvarn.solve import variance_tables
from calibrate.model import choose_device
from calibrate.pipeline import JobOptions, collect_statistics, corpus_of, open_source, recipe_for
from calibrate.recipes import choose_recipe
from calibrate.scales import Scales, solve
from calibrate.statistics import Statistics, merge
from calibrate.weights import SCHEMES, Converted, Quantized, check_quantizable, convert_checkpoint, quantize_checkpoint


def collect_to_file(options: JobOptions, output: Path, *, force: bool) -> Statistics:
    """Collect, and write a statistics file. An interrupted run goes on when the same command is given again.

    Under torchrun every rank does a part of the work and returns the sum; the first one writes it.
    """
    state = output.with_name(f".{output.name}.collect-state.safetensors")
    with joined() as team:
        _check_new(output, force)
        with team.one_by_host():
            source = open_source(options)
        statistics = collect_statistics(source, options, recipe_for(source, options), state=state, team=team)
        if team.rank.leads:
            statistics.save(output)
        team.meet("saved")
        discard_states(state)
    return statistics


def solve_to_file(statistics: Path, options: JobOptions, output: Path, *, force: bool) -> Scales:
    """Solve scales from a statistics file, and write a scales file."""
    _check_new(output, force, [statistics])
    loaded = Statistics.load(statistics)
    scales = solve(loaded, options.scales(choose_recipe(loaded.layout["model_type"], options.recipe)))
    scales.save(output)
    return scales


def write_from_files(scales: Path, options: JobOptions, output: Path, *, statistics: Path | None, force: bool) -> Written:
    """Write the scales of a file into a copy of the checkpoint."""
    loaded = Scales.load(scales)
    kept = None if statistics is None else Statistics.load(statistics)
    if kept is not None and kept.digest() != loaded.statistics_digest:
        raise UsageError(f"{scales} was not solved from {statistics}: their digests differ")
    source = open_source(options)
    skip = options.skipped(recipe_for(source, options))
    return write_checkpoint(source, loaded, output, statistics=kept, skip_layers=skip, force=force)


def export_checkpoint(
    path: Path, options: JobOptions, form: str, output: Path, *, statistics: Path | None, tensor_parallel_size: int, force: bool
) -> Exported:
    """Write what another engine reads, from a folder that kv-calibrate wrote, or from a scales file and the model that it is for."""
    if path.is_dir() and (options.model or statistics):
        raise UsageError(f"{path} is a checkpoint, which has its model and statistics: --model and --statistics go with a scales file")
    if not path.is_dir() and options.model is None:
        raise UsageError(f"{path} is no folder: give a checkpoint that kv-calibrate wrote, or a scales file with --model")
    scales = None if path.is_dir() else Scales.load(path)
    kept = None if statistics is None else Statistics.load(statistics)
    source = open_source(options if scales is not None else options.model_copy(update={"model": str(path)}))
    if not FORMATS[form].folder:
        _check_new(output, force, [one for one in (path, statistics) if one is not None])
        check_target(source.path, output)
    engine = ExportOptions(tensor_parallel_size, sixteen_bit(source.config), serving(source.path).model_dump(exclude_defaults=True))
    return FORMATS[form].export(open_given(source, scales, kept), output, engine, force=force)


def quantize_to_folder(options: JobOptions, output: Path, *, force: bool) -> Quantized:
    """Quantize the weights of a model by the scheme `options.weights`."""
    source = open_source(options)
    check_quantizable(source)
    corpus = corpus_of(source, options, recipe_for(source, options)) if SCHEMES[options.weights].needs_rows else None
    device, trust = choose_device(options.device), options.trust_remote_code
    return quantize_checkpoint(source, options.weights, output, corpus, seed=options.seed, device=device, trust=trust, force=force)


def convert_to_folder(options: JobOptions, output: Path, *, force: bool) -> Converted:
    """Rewrite a model's quantized weights as compressed-tensors."""
    return convert_checkpoint(open_source(options), output, force=force)


def fold_to_folder(options: JobOptions, output: Path, *, force: bool) -> FoldResult:
    """Fold a model's weights."""
    source = open_source(options)
    switches = parse_switches(options.fold or "")
    check_fold(source, options.fold, options.weights)
    corpus = corpus_of(source, options, recipe_for(source, options))
    device, trust = choose_device(options.device), options.trust_remote_code
    return fold_checkpoint(source, corpus, output, switches, device=device, trust=trust, force=force)


def merge_files(files: Sequence[Path], output: Path, *, force: bool) -> Statistics:
    """Add statistics files, and write their sum."""
    _check_new(output, force, files)
    merged = merge([Statistics.load(path) for path in files])
    merged.save(output)
    return merged


def kvarn_to_file(statistics: Path, output: Path | None, *, force: bool) -> KVarNTables:
    """KVarN tables of a statistics file, written where an output is given."""
    if output is not None:
        _check_new(output, force, [statistics])
    made = variance_tables(Statistics.load(statistics))
    if output is not None:
        made.save(output)
    return made


def inspect_path(path: Path, options: JobOptions) -> Inspection:
    """Inspect a checkpoint or a statistics file."""
    if path.is_dir():
        return inspect(path, options.scales(choose_recipe("", None)))
    return inspect(path, options.scales(choose_recipe(_model_type(path), options.recipe)))


def _model_type(path: Path) -> str:
    layout = read_header(path).get("layout")
    return str(layout.get("model_type", "")) if isinstance(layout, dict) else ""


def _check_new(output: Path, force: bool, inputs: Sequence[Path] = ()) -> None:
    if output.is_dir():
        raise UsageError(f"output {output} is a folder: give a file")
    if output.exists() and not force:
        raise UsageError(f"output {output} exists: give another file, or --force to replace it")
    if output.resolve() in {path.resolve() for path in inputs}:
        raise UsageError(f"output {output} is an input: give another file")
    check_creatable(output)
