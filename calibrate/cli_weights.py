"""The commands for weights: `quantize` and `convert` make checkpoints that carry KV scales."""

from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from calibrate.cli_options import as_json, device, new_folder, recipe, row_options, trust_remote_code

SCHEMES = ("fp8", "w8a8", "awq", "gptq", "w4a16", "nvfp4")

weights_option = click.option(
    "--weights", type=click.Choice(SCHEMES), help="Quantize the weights first, with llmcompressor in its own environment (docs/weights.md)."
)


@click.command()
@click.argument("model", required=False)
@click.option("--scheme", type=click.Choice(SCHEMES), required=True, help="How (docs/weights.md).")
@new_folder
@recipe
@device
@trust_remote_code
@row_options
@as_json
def quantize(scheme: str, output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Quantize MODEL's weights with llmcompressor, in its own environment (`make llmcompressor`). `run` then calibrates the result."""
    from calibrate import steps
    from calibrate.cli import show
    from calibrate.pipeline import JobOptions

    made = steps.quantize_to_folder(JobOptions(**options, weights=scheme), output, force=force)
    show(as_json, _plain(made), lambda: _text(made, f"quantized: {made.scheme}" + (f", groups of {made.group_size}" if made.group_size else "")))


@click.command()
@click.argument("checkpoint")
@new_folder
@trust_remote_code
@as_json
def convert(checkpoint: str, output: Path, force: bool, trust_remote_code: bool, as_json: bool) -> None:
    """Rewrite an AWQ, GPTQ or FP8 CHECKPOINT as compressed-tensors, whose KV scales vLLM loads. Every weight stays equal, bit for bit."""
    from calibrate import steps
    from calibrate.cli import show
    from calibrate.pipeline import JobOptions

    made = steps.convert_to_folder(JobOptions(model=checkpoint, trust_remote_code=trust_remote_code), output, force=force)
    zeros = "symmetric" if made.symmetric else "with zero points"
    order = ", columns in activation order (vLLM 0.32 and newer does not load these)" if made.reordered else ""
    show(as_json, _plain(made), lambda: _text(made, f"converted from {made.method}: {made.modules} weights equal, bit for bit; {zeros}{order}"))


def _plain(made: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(made).items()}


def _text(made: Any, what: str) -> RenderableType:
    return Text(f"{made.path}: {what}; weight files {made.bytes_before / 1e6:,.1f} MB before, {made.bytes_after / 1e6:,.1f} MB now")
