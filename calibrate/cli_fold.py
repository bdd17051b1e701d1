"""The command for folding, and `run`'s option."""

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from calibrate.cli_options import as_json, device, new_folder, recipe, row_options, trust_remote_code

_SWITCHES = "turn, k or both with a comma between, for FP8; smooth, for low-bit formats that rotate keys (docs/folding.md)."
fold_option = click.option("--fold", help=f"Fold the weights first: {_SWITCHES}")


@click.command()
@click.argument("model", required=False)
@click.option("--fold", required=True, help=f"What to fold: {_SWITCHES}")
@new_folder
@recipe
@device
@trust_remote_code
@row_options
@as_json
def fold(output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Write another set of weights of MODEL for the same function, whose K and Q lose less in a quantized cache. `run` then calibrates the result."""
    from calibrate import steps
    from calibrate.cli import show
    from calibrate.pipeline import JobOptions

    made = steps.fold_to_folder(JobOptions(**options), output, force=force)
    plain = {"path": str(made.path), "switches": list(made.fold.switches), "digest": made.fold.digest(), **made.fold.report}
    show(as_json, plain, lambda: Text(f"{made.path}: {made.summary()}"))
