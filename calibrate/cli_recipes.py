"""The recipe library on the command line: `recipes list`, `show`, `check` and `new`."""

import sys
from pathlib import Path

import click

from calibrate.cli_options import as_json
from calibrate.errors import UsageError


@click.group()
def recipes() -> None:
    """The recipe library."""


@recipes.command("list")
@as_json
def recipes_list(as_json: bool) -> None:
    """All recipes and the model types that they are for."""
    from calibrate import tables
    from calibrate.cli import show
    from calibrate.recipes import all_recipes

    found = all_recipes()
    show(as_json, {name: recipe.model_dump() for name, recipe in found.items()}, lambda: tables.recipe_list(found))


@recipes.command("show")
@click.argument("family")
@as_json
def recipes_show(family: str, as_json: bool) -> None:
    """A recipe as its author wrote it, comments and all."""
    from rich.syntax import Syntax

    from calibrate.cli import show
    from calibrate.recipes import all_recipes
    from calibrate.resources import resource

    found = all_recipes()
    if family not in found:
        raise UsageError(f"no recipe {family}: there are {', '.join(found)}")
    text = resource("recipes", f"{family}.yaml").read_text(encoding="utf-8")
    show(as_json, found[family].model_dump(), lambda: Syntax(text, "yaml", background_color="default"))


@recipes.command("check")
@click.argument("names", nargs=-1, metavar="[FAMILY|FILE]...")
@click.option("--granularity", type=click.Choice(["tensor", "head"]), help="Only this one. Default: both.")
@click.option("--table", type=click.Path(path_type=Path), help="Write the support table here (all families, both granularities).")
@as_json
def recipes_check(names: tuple[str, ...], granularity: str | None, table: Path | None, as_json: bool) -> None:
    """Calibrate a tiny random model of each family, load it in real vLLM, compare every scale. Exit 1 where one is not as its recipe says.

    FAMILY is a shipped recipe, FILE one of your own; without any, the whole library is checked.
    """
    from calibrate import tables
    from calibrate.cli import show
    from calibrate.families.check import GRANULARITIES, check_recipes
    from calibrate.families.table import check_target, write_table
    from calibrate.recipes import FALLBACK, all_recipes, find_recipe

    if table is not None:
        if names or granularity:
            raise UsageError("--table is for the whole library: leave out the families and --granularity")
        check_target(table)
    chosen = [find_recipe(name) for name in names] or [recipe for name, recipe in all_recipes().items() if name != FALLBACK]
    rows = check_recipes(chosen, (granularity,) if granularity else GRANULARITIES)
    if table is not None:
        write_table(rows, table)
    result = {"ok": all(row.ok for row in rows), "rows": [row.as_dict() for row in rows]}
    show(as_json, result, lambda: tables.family_rows(rows))
    if not result["ok"]:
        sys.exit(1)


@recipes.command("new")
@click.argument("family")
@click.option("--model", help="Folder or hub id whose config.json is read; no weights are fetched.")
@click.option("--model-type", help="In its place: a model type of transformers, with its class's defaults.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write. Default: FAMILY.yaml.")
@click.option("--force", is_flag=True, help="Replace the file.")
@as_json
def recipes_new(family: str, model: str | None, model_type: str | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a commented recipe for FAMILY from a model's config, with a tiny model that `recipes check` can try."""
    from rich.text import Text

    from calibrate.artefact import write_text
    from calibrate.cli import show
    from calibrate.families.new import model_config, new_recipe

    target = output or Path(f"{family}.yaml")
    if target.is_dir() or (target.exists() and not force):
        raise UsageError(f"{target} exists: give another file with --output, or --force to replace it")
    made = new_recipe(family, model_config(model, model_type), model or f"the {model_type} class")
    write_text(target, made.text)
    said = f"{target}: its tiny model cannot be calibrated yet ({made.fault}): set its fields under `tiny:`" if made.fault else f"{target}"
    next_step = f"Next: kv-calibrate recipes check {target}"
    show(as_json, {"output": str(target), "fault": made.fault}, lambda: Text(f"{said}. {next_step}"))
    if made.fault:
        sys.exit(1)
