"""The steps of the main job on files, one function a command: each can be run, repeated and inspected alone."""

from collections.abc import Sequence
from pathlib import Path

from calibrate.artefact import discard, read_header
from calibrate.checkpoint import Written, check_creatable, write_checkpoint
from calibrate.errors import UsageError
from calibrate.inspection import Inspection, inspect
from calibrate.pipeline import JobOptions, collect_statistics, open_source, recipe_for
from calibrate.recipes import choose_recipe
from calibrate.scales import Scales, solve
from calibrate.statistics import Statistics, merge


def collect_to_file(options: JobOptions, output: Path, *, force: bool) -> Statistics:
    """Collect, and write a statistics file. An interrupted run goes on when the same command is given again."""
    _check_new(output, force)
    source = open_source(options)
    state = output.with_name(f".{output.name}.collect-state.safetensors")
    statistics = collect_statistics(source, options, recipe_for(source, options), state=state)
    statistics.save(output)
    discard(state)
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
    return write_checkpoint(source, loaded, output, statistics=kept, force=force)


def merge_files(files: Sequence[Path], output: Path, *, force: bool) -> Statistics:
    """Add statistics files, and write their sum."""
    _check_new(output, force, files)
    merged = merge([Statistics.load(path) for path in files])
    merged.save(output)
    return merged


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
