"""The command line: options in, one of the pipeline's functions called, a table or JSON out. No logic lives here."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Threads that spin while they wait starve the others on a shared machine; set before torch starts its pool.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import click
from rich.console import Console
from rich.text import Text

import calibrate
from calibrate import cli_export, cli_fold, cli_kvarn, cli_lm_eval, cli_niah, cli_planning, cli_proof, cli_recipes, cli_release, cli_weights
from calibrate.cli_options import as_json, corpus_options, model_options, policy_options, skip_layers
from calibrate.errors import CalibrateError, UsageError
from calibrate.progress import stderr
from calibrate.ranks import rank_here, refuse_many

stdout = Console(highlight=False)
if not stdout.is_terminal:
    stdout = Console(highlight=False, width=120)  # a log has no edge to wrap at
_INTERRUPTED = 130


class _Group(click.Group):
    """Turns expected failures into one line and their exit code; anything else is a bug and keeps its traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _fail(_usage(error), error.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CalibrateError as error:
            _fail(str(error), error.exit_code)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _fail(_usage(error), error.exit_code)
        except BrokenPipeError:  # `| head` had enough
            raise
        except OSError as error:  # the world's doing, not a bug: a disk that fills, a file that may not be read, a name that is too long
            _fail(f"{error.filename or 'this host'}: {error.strerror or error}", UsageError.exit_code)
        except KeyboardInterrupt:
            stderr.print("interrupted", soft_wrap=True)
            sys.exit(_INTERRUPTED)


def _usage(error: click.UsageError) -> str:
    return error.format_message() + (f" ({error.ctx.command_path} --help)" if error.ctx else "")


def _fail(message: str, code: int) -> NoReturn:
    stderr.print(Text.assemble(("error:", "bold red"), " ", " ".join(message.splitlines())), soft_wrap=True)
    sys.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(calibrate.__version__, prog_name="kv-calibrate")
@click.pass_context
def main(context: click.Context) -> None:
    """Calibrate FP8 KV-cache scales, write them into a checkpoint, and prove that vLLM loads them."""
    if context.invoked_subcommand != "collect":
        stderr.quiet = not rank_here().leads  # one line for all ranks
        refuse_many(str(context.invoked_subcommand))


@main.command()
@click.argument("model", required=False)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Folder to write. Default: calibrated/<model name>.")
@click.option("--force", is_flag=True, help="Replace the output folder.")
@click.option("--verify/--no-verify", default=True, help="Have vLLM read the scales back.", show_default=True)
@cli_weights.weights_option
@cli_fold.fold_option
@model_options
@corpus_options
@policy_options
@skip_layers
@as_json
def run(output: Path | None, force: bool, verify: bool, as_json: bool, **options: Any) -> None:
    """The main job: calibrate MODEL (a folder or a hub id), write a checkpoint, have vLLM read it back.

    Without MODEL and --data it runs on the embedded default, SmolLM2-135M-Instruct and built-in text.
    """
    from calibrate import pipeline, tables

    result = pipeline.run(_job(options), output, force=force, verify=verify)
    show(as_json, tables.job_as_dict(result), lambda: tables.job(result))
    if result.readback is not None and not result.readback.ok:
        sys.exit(1)


@main.command()
@click.argument("model", required=False)
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Statistics file to write (.safetensors).")
@click.option("--force", is_flag=True, help="Replace the output file.")
@model_options
@corpus_options
@as_json
def collect(output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """First step alone: MODEL and a corpus to a statistics file. torchrun shares it out among processes and hosts."""
    from calibrate import steps, tables

    statistics = steps.collect_to_file(_job(options), output, force=force)
    show(as_json, tables.statistics_as_dict(statistics, output), lambda: tables.statistics(statistics, output))


@main.command()
@click.argument("statistics", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Scales file to write (.safetensors).")
@click.option("--force", is_flag=True, help="Replace the output file.")
@click.option("--recipe", help="Recipe file or family.")
@policy_options
@as_json
def solve(statistics: Path, output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Second step alone: a statistics file to a scales file; needs no model."""
    from calibrate import steps, tables

    scales = steps.solve_to_file(statistics, _job(options), output, force=force)
    show(as_json, tables.scales_as_dict(scales, output), lambda: tables.scales(scales, output))


@main.command()
@click.argument("scales", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The checkpoint that was calibrated: a folder or a hub id.")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics file to keep in the checkpoint.")
@click.option("--force", is_flag=True, help="Replace the output folder.")
@click.option("--trust-remote-code", is_flag=True, help="Accept a checkpoint that brings Python code.")
@skip_layers
@as_json
def write(scales: Path, output: Path, statistics: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """Third step alone: a scales file into a copy of the checkpoint, weights linked."""
    from calibrate import steps, tables

    written = steps.write_from_files(scales, _job(options), output, statistics=statistics, force=force)
    show(as_json, tables.written_as_dict(written), lambda: tables.written(written))


@main.command()
@click.argument("statistics", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Statistics file to write.")
@click.option("--force", is_flag=True, help="Replace the output file.")
@as_json
def merge(statistics: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Add statistics files of one model, in any order, to the same bytes."""
    from calibrate import steps, tables

    merged = steps.merge_files(statistics, output, force=force)
    show(as_json, tables.statistics_as_dict(merged, output), lambda: tables.statistics(merged, output))


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--kv-cache-dtype", help="Default: fp8 where this host runs it, else bfloat16 (loading is proven all the same).")
@click.option("--timeout", type=click.FloatRange(1), default=900.0, show_default=True, help="Seconds to wait for vLLM.")
@as_json
def verify(checkpoint: Path, tensor_parallel_size: int, kv_cache_dtype: str | None, timeout: float, as_json: bool) -> None:
    """Start vLLM on CHECKPOINT and compare every layer's scales with the file, exactly. Exit 1 where one differs."""
    from calibrate import tables
    from calibrate.engines import verify_checkpoint
    from calibrate.evaluate.evidence import forget_readback, save_readback

    forget_readback(checkpoint)
    result = verify_checkpoint(checkpoint, tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype, timeout=timeout)
    show(as_json, result.as_dict(), lambda: tables.readback(result))
    save_readback(checkpoint, result)
    if not result.ok:
        sys.exit(1)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@policy_options
@as_json
def inspect(path: Path, as_json: bool, **options: Any) -> None:
    """Ranges, scales, saturation and signal-to-noise of a calibrated checkpoint or a statistics file."""
    from calibrate import steps, tables

    result = steps.inspect_path(path, _job(options))
    show(as_json, result.as_dict(), lambda: tables.inspection(result))


@main.command()
@as_json
def doctor(as_json: bool) -> None:
    """What this host is, and what each stage can do on it."""
    from calibrate.host import describe_host, render

    report = describe_host()
    show(as_json, report.as_dict(), lambda: render(report))


def _job(options: dict[str, Any]) -> Any:
    from calibrate.pipeline import JobOptions

    return JobOptions(**options)


def show(as_json: bool, value: dict[str, Any], render: Callable[[], Any]) -> None:
    """Print a result: JSON for machines, else what `render` makes of it. Of a team of processes the first one prints."""
    if not rank_here().leads:
        return
    if as_json:
        click.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        stdout.print(render())


def _finite(value: Any) -> Any:
    """JSON has no infinity: a signal-to-noise without noise becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


main.add_command(cli_export.export)
main.add_command(cli_niah.niah)
main.add_command(cli_niah.reason)
main.add_command(cli_lm_eval.lm_eval)
main.add_command(cli_kvarn.kvarn)
main.add_command(cli_proof.compare)
main.add_command(cli_planning.plan)
main.add_command(cli_planning.bench)
main.add_command(cli_release.gate)
main.add_command(cli_release.report)
main.add_command(cli_recipes.recipes)
main.add_command(cli_weights.quantize)
main.add_command(cli_weights.convert)
main.add_command(cli_fold.fold)
