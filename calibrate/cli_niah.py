"""The commands that ask the model itself: `niah` and `reason`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

VARIANTS = "16-bit,unit,calibrated"


class _Listed(click.ParamType):
    """Values with commas between."""

    name = "list"

    def __init__(self, kind: Callable[[str], Any], what: str) -> None:
        self._kind, self._what = kind, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple:
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(self._kind(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is no list of {self._what} with commas between", param, ctx)


_NUMBERS, _SHARES, _WORDS = _Listed(int, "whole numbers"), _Listed(float, "numbers"), _Listed(str, "words")


_SEED = click.option("--seed", type=int, default=0, show_default=True)


def _shared(command: Callable) -> Callable:
    options = (
        click.argument("checkpoint", type=click.Path(path_type=Path)),
        click.option("--engine", type=click.Choice(["transformers", "vllm"]), default="transformers", show_default=True),
        click.option("--variants", type=_WORDS, default=VARIANTS, show_default=True, help="Also random, old-formula, and NAME=PATH."),
        click.option("--device", help="Of transformers: cpu, cuda, cuda:1 or auto."),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of transformers. Default: what this host is fast in."),
        click.option("--attention-backend", help="Of vLLM, as FLASH_ATTN. Default: vLLM chooses."),
        click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True, help="Of vLLM."),
        click.option("--trust-remote-code", is_flag=True, help="Run the Python code that the checkpoint brings."),
        click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout."),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


@click.command()
@click.option("--lengths", "--length", type=_NUMBERS, default="512,1024,2048,4096", show_default=True, help="Tokens of whole prompts.")
@click.option("--depths", type=_SHARES, default="0,0.25,0.5,0.75,1", show_default=True, help="Where the needle stands, 0 … 1.")
@click.option("--needles", "needles_per_cell", type=int, default=4, show_default=True, help="Questions a cell.")
@click.option("--tasks", "--task", type=_WORDS, default="single", show_default=True, help="single, multi-key, multi-value, variable-tracking.")
@click.option("--languages", "--language", type=_WORDS, default="en", show_default=True, help="Shipped needles: en, zh.")
@click.option("--needle-file", type=click.Path(path_type=Path), help="Your own needles (docs/needles.md), in place of the shipped ones.")
@click.option("--haystack", default="builtin", show_default=True, help="Text to hide needles in: a file, folder or hub id (docs/corpora.md).")
@click.option("--repeat-haystack", is_flag=True, help="Repeat a haystack that is too short.")
@click.option("--heatmaps", type=click.Path(path_type=Path), help="Folder for heatmaps, PNG and SVG, light and dark.")
@_SEED
@_shared
def niah(checkpoint: Path, heatmaps: Path | None, as_json: bool, **options: Any) -> None:
    """Needles in haystacks: recall of CHECKPOINT by prompt length and depth, the same prompts with every cache. Resumes where it was killed."""
    from calibrate import trials
    from calibrate.cli import show
    from calibrate.evaluate.heatmap import write_heatmaps
    from calibrate.evaluate.niah import KIND, NeedleGrid
    from calibrate.evaluate.summary import needle_summary

    choice, variants = _choice(options)
    result = trials.needles(checkpoint, choice, variants, NeedleGrid(**options))
    drawn = write_heatmaps(result, heatmaps) if heatmaps else []
    rows = needle_summary(result)
    shown = {"result": _evidence(checkpoint, KIND, choice.name), "grid": result.grid, "variants": rows, "heatmaps": [str(path) for path in drawn]}
    show(as_json, shown, lambda: _table("needles found", rows))


@click.command()
@click.option("--tasks", "--task", type=_WORDS, default="arithmetic,chain,counters,boxes", show_default=True, help="Seeded problems; '' for none.")
@click.option("--levels", type=_NUMBERS, default="1,2,3", show_default=True, help="2, 4 or 8 steps.")
@click.option("--problems", type=int, default=8, show_default=True, help="Of each task and level.")
@click.option("--problem-file", "files", type=click.Path(path_type=Path), multiple=True, help="Your own, JSONL of {prompt, answer}; may be repeated.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Length of a solution at most.")
@_SEED
@_shared
def reason(checkpoint: Path, as_json: bool, **options: Any) -> None:
    """Problems of several steps with known answers: how many CHECKPOINT solves with every cache. Resumes where it was killed."""
    from calibrate import trials
    from calibrate.cli import show
    from calibrate.evaluate.reasoning import KIND, ReasoningPlan
    from calibrate.evaluate.summary import reasoning_summary

    choice, variants = _choice(options)
    result = trials.reasoning(checkpoint, choice, variants, ReasoningPlan(**options))
    rows = reasoning_summary(result)
    shown = {"result": _evidence(checkpoint, KIND, choice.name), "tasks": result.tasks, "variants": rows}
    show(as_json, shown, lambda: _table("problems solved", rows))


def _choice(options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Take the engine's options and the variants out of `options`."""
    from calibrate.trials import EngineChoice

    names = ("device", "dtype", "attention_backend", "tensor_parallel_size", "trust_remote_code")
    choice = EngineChoice(name=options.pop("engine"), **{name: options.pop(name) for name in names})
    return choice, options.pop("variants")


def _evidence(checkpoint: Path, kind: str, engine: str) -> str:
    from calibrate.evaluate.results import FOLDER

    return str(checkpoint / FOLDER / f"{kind}-{engine}.json")


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("cache")
    for name in (*rows[0]["by"], "all", "95% interval", "lost", "won", "p (worse)"):
        table.add_column(name, justify="right")
    for row in rows:
        shares = [f"{hits}/{asked}" for hits, asked in row["by"].values()]
        share, paired = row["share"], row["against_16_bit"]
        test = ["", "", ""] if paired is None else [str(paired["first_only"]), str(paired["second_only"]), f"{paired['second_worse']:.3g}"]
        table.add_row(row["variant"], *shares, f"{row['hits']}/{row['asked']}", f"{share['low']:.0%} – {share['high']:.0%}", *test)
    return table
