"""The command for engines that read other forms: `export`."""

from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from calibrate.cli_options import as_json


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["sglang-json", "modelopt"]), required=True, help="What to write (docs/exports.md).")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="File (sglang-json) or folder (modelopt) to write.")
@click.option("--model", help="The checkpoint that was calibrated, where CHECKPOINT is a scales file: a folder or a hub id.")
@click.option("--statistics", type=click.Path(path_type=Path), help="Statistics file that the scales were solved from, with --model.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks that sglang-json lists.")
@click.option("--force", is_flag=True, help="Replace the output.")
@click.option("--trust-remote-code", is_flag=True, help="Accept a checkpoint that brings Python code.")
@as_json
def export(
    checkpoint: Path, form: str, output: Path, model: str | None, statistics: Path | None, tensor_parallel_size: int, force: bool, as_json: bool,
    trust_remote_code: bool,
) -> None:  # fmt: skip
    """Write the scales of CHECKPOINT (a folder that kv-calibrate wrote, or a scales file with --model) in another engine's form."""
    from calibrate import steps
    from calibrate.cli import show
    from calibrate.pipeline import JobOptions

    options = JobOptions(model=model, trust_remote_code=trust_remote_code)
    made = steps.export_checkpoint(checkpoint, options, form, output, statistics=statistics, tensor_parallel_size=tensor_parallel_size, force=force)
    show(as_json, made.as_dict(), lambda: _lines(made))


def _lines(made: Any) -> RenderableType:
    files = ", ".join(f"{number} {how}" for how, number in sorted(made.how.items()))
    lines = [f"{made.path}: {made.format}, {made.layers} layers" + (f"; files of the source: {files}" if files else "")]
    for kind in ("k", "v") if made.losses else ():
        worst = max(made.losses, key=lambda loss: loss.loss_db(kind))
        mean = sum(loss.loss_db(kind) for loss in made.losses) / len(made.losses)
        lines.append(
            f"  one scale for K and V, the larger: {kind.upper()} loses {mean:.2f} dB on average, {worst.loss_db(kind):.2f} dB at most "
            f"(layer {worst.layer}: {worst.snr_db[kind]:.2f} → {worst.shared_snr_db[kind]:.2f} dB)"
        )
    return Group(*map(Text, [*lines, *(f"  note: {text}" for text in made.notes)]))
