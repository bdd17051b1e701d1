"""The command that runs lm-eval's tasks: `lm-eval`, an optional extra."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrate.cli_niah import _WORDS, _choice, _evidence, _shared

if TYPE_CHECKING:
    from rich.table import Table

    from calibrate.evaluate.results import LmEvalResult


@click.command("lm-eval")
@click.option("--tasks", type=_WORDS, required=True, help="Tasks, groups or tags of lm-eval, with commas between.")
@click.option("--include-path", type=click.Path(path_type=Path), help="Folder of your own task YAML files; Python that they name is run.")
@click.option("--limit", type=int, help="Documents of a task at most. Default: all.")
@click.option("--num-fewshot", type=int, help="Worked examples. Default: as the task says.")
@_shared
def lm_eval(checkpoint: Path, as_json: bool, **options: Any) -> None:
    """lm-eval's tasks, the same requests with every cache of CHECKPOINT. Needs the extra kv-calibrate[lm-eval]."""
    from calibrate import trials
    from calibrate.cli import show

    choice, variants = _choice(options)
    result = trials.harness(checkpoint, choice, variants, **options)
    path = _evidence(checkpoint, "lm-eval", choice.name)
    shown = {"result": path, "settings": result.settings, "variants": [each.model_dump() for each in result.variants]}
    show(as_json, shown, lambda: _table(result))


def _table(result: "LmEvalResult") -> "Table":
    from rich.table import Table

    caption = f"lm-eval {result.settings['lm_eval']}, ± its standard error; the requests are the same with every cache"
    table = Table(title="lm-eval", title_justify="left", caption=caption, caption_justify="left")
    for name in ("task", "documents", "metric", *(each.variant for each in result.variants)):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for task in result.variants[0].tasks:
        for place, metric in enumerate(task.metrics):
            name = metric.metric if metric.filter == "none" else f"{metric.metric} ({metric.filter})"
            same = (next(row for row in each.tasks if row.task == task.task).metrics[place] for each in result.variants)
            table.add_row(task.task, f"{task.documents:,}", name, *(_number(each.value, each.stderr) for each in same))
    return table


def _number(value: float | None, stderr: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {stderr:.2g}"
