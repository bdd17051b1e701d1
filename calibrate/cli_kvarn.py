"""The command that makes KVarN tables of statistics."""

from pathlib import Path

import click


@click.command()
@click.argument("statistics", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Tables file to write (.safetensors); without it they are only shown.")
@click.option("--force", is_flag=True, help="Replace the output file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def kvarn(statistics: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """KVarN variance tables of a statistics file that was collected with --kvarn: channel means and variances, before and after the Hadamard
    rotation, prescales, and how sensitive each layer is."""
    from calibrate import steps, tables
    from calibrate.cli import show
    from calibrate.kvarn.solve import as_dict

    made = steps.kvarn_to_file(statistics, output, force=force)
    show(as_json, as_dict(made), lambda: tables.kvarn(made))
