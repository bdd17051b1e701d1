"""The command that measures what the scales do: `compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calibrate.evaluate.results import CompareResult, Interval, Ladder


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), help="What computes. Default: transformers, which emulates the FP8 cache.")
@click.option("--data", help="Held-out text, as for `run`. Default: builtin:code.")
@click.option("--samples", type=int, help="Rows to score. Default: 16.")
@click.option("--sequence-length", type=int, help="Tokens a row at most. Default: 512.")
@click.option("--seed", type=int, help="Default: 0.")
@click.option("--text-column", help="Column that holds text.")
@click.option("--chat-column", help="Column that holds chat messages.")
@click.option("--split", help="Split of a hub data set. Default: train.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=PATH", help="Compare this checkpoint or scales file too; may be repeated.")
@click.option("--device", help="cpu, cuda, cuda:1 or auto (transformers). Default: cuda where there is one.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Compute type (transformers). Default: the fast one here.")
@click.option("--quantize-queries/--no-quantize-queries", default=None, help="Quantize Q too, as GPU kernels do (transformers). Default: yes.")
@click.option("--attention-backend", help="vLLM's name of a backend, as FLASH_ATTN. Default: vLLM's choice.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="GPUs that vLLM spreads over. Default: 1.")
@click.option("--timeout", type=click.FloatRange(1), help="Seconds to wait for vLLM. Default: 900.")
@click.option("--formats", metavar="NAMES", help="Compare low-bit formats instead: few, default, all, or names with commas (docs/lowbit.md).")
@click.option("--quick", is_flag=True, help="With --formats: less text, fewer needles, no problems.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that the checkpoint brings.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def compare(checkpoint: Path, variants: tuple[str, ...], formats: str | None, quick: bool, as_json: bool, **options: Any) -> None:
    """Compare CHECKPOINT's cache with the 16-bit one, scale 1.0 and random-token scales on held-out text, and say which level suffices."""
    from calibrate.cli import show
    from calibrate.cli_formats import compare_formats
    from calibrate.evaluate.compare import CompareOptions, evidence_path, run_compare
    from calibrate.evaluate.evidence import gather
    from calibrate.evaluate.ladder import decide

    given = {name: value for name, value in options.items() if value is not None}
    if formats is not None or quick:
        compare_formats(checkpoint, formats, quick, variants, given, as_json)
        return
    chosen = CompareOptions(**given)
    result = run_compare(checkpoint, chosen, _named(variants))
    needles = gather(checkpoint).results.get(f"niah-{chosen.engine}.json")
    ladder = decide(result, needles if needles is not None and needles.subject == result.subject else None)
    path = evidence_path(checkpoint, chosen.engine)
    show(as_json, {"path": str(path), "result": result.model_dump(), "ladder": ladder.model_dump()}, lambda: table(result, ladder, path))


def _named(variants: tuple[str, ...]) -> dict[str, Path]:
    from calibrate.errors import UsageError

    named: dict[str, Path] = {}
    for text in variants:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--variant {text}: write NAME=PATH")
        if name in named:
            raise UsageError(f"--variant {name} is given twice: every variant needs its own name")
        named[name] = Path(path)
    return named


def table(result: "CompareResult", ladder: "Ladder", path: Path) -> "RenderableType":
    """Fidelity of each variant with its intervals, the worst of the held-out ranges, and the ladder."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    documents, tokens = len(result.fidelity[0].documents), sum(each.tokens for each in result.fidelity[0].documents)
    engine = result.fidelity[-1].engine
    title = f"{result.model}: {tokens:,} tokens of {documents} documents ({result.corpus['data']}), {engine.version}, {engine.attention_backend}"
    caption = "95% intervals by paired bootstrap over documents; KL is a lower bound"
    grid = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("cache", "perplexity", "ratio to 16-bit", "|Δ log p|", "KL mean", "KL p99", "top-1", "saturated", "underflow", "least SNR"):
        grid.add_column(name, justify="left" if name == "cache" else "right", no_wrap=name == "cache", overflow="fold")
    for each in result.fidelity:
        rows = [row for row in result.held_out if row.variant == each.variant]
        grid.add_row(
            each.variant,
            f"{each.perplexity:.4g}",
            _interval(each.perplexity_ratio, ".4f"),
            f"{each.mean_abs_delta_logprob.value:.4f}",
            _interval(each.kl_mean, ".2g"),
            _interval(each.kl_p99, ".2g"),
            _interval(each.top1_agreement, ".1%"),
            _most(rows, "saturated"),
            _most(rows, "underflow"),
            _least_snr(rows),
        )
    lines = [Text(ladder.sentence, style="bold"), *(Text(f"  {reason}") for reason in ladder.reasons), Text(f"kept in {path}")]
    return Group(grid, *lines)


def _interval(interval: "Interval", form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} – {interval.high:{form}})"


def _most(rows: list[Any], field: str) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: getattr(row, field))
    share = getattr(worst, field)
    return "0" if share == 0 else f"{share:.1e} ({worst.kind.upper()}{worst.layer})"


def _least_snr(rows: list[Any]) -> str:
    known = [row for row in rows if row.snr_db is not None]
    if not known:
        return ""
    worst = min(known, key=lambda row: row.snr_db)
    return f"{worst.snr_db:.1f} dB ({worst.kind.upper()}{worst.layer})"
