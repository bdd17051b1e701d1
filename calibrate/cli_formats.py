"""What `compare --formats` prints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calibrate.evaluate.spectrum_result import Hits, SpectrumResult, StorageError


_IDLE = ("quantize_queries", "attention_backend", "tensor_parallel_size", "timeout")  # of vLLM, or of the FP8 cache with its queries


def compare_formats(checkpoint: Path, formats: str | None, short: bool, variants: tuple[str, ...], given: dict[str, Any], as_json: bool) -> None:
    """Run the comparison of formats, draw it, and print it."""
    from calibrate.cli import show
    from calibrate.errors import UsageError
    from calibrate.evaluate.compare import CompareOptions
    from calibrate.evaluate.pareto_plot import draw
    from calibrate.evaluate.spectrum import DEFAULT_FORMATS, FEW_FORMATS, SpectrumOptions, evidence_path, quick, run_spectrum
    from calibrate.lowbit import FORMATS

    if formats is None:
        raise UsageError("--quick is for --formats: say which, as --formats few")
    if variants:
        raise UsageError("--variant does not go with --formats: compare scales without it")
    idle = next((name for name in _IDLE if name in given), None)
    if idle is not None:
        raise UsageError(f"--{idle.replace('_', '-')} changes nothing with --formats (transformers engine, Q in 16 bits): leave it away")
    sets = {"few": FEW_FORMATS, "default": DEFAULT_FORMATS, "all": tuple(FORMATS)}
    named = [name.strip() for name in formats.split(",") if name.strip()]
    names = sets[named[0]] if len(named) == 1 and named[0] in sets else tuple(named)
    if len(named) > 1 and (group := next((name for name in named if name in sets), None)):
        raise UsageError(f"--formats {group} stands alone: it is {', '.join(sets[group])}")
    plain = SpectrumOptions()
    compare = CompareOptions(**plain.compare.model_dump() | given)
    offline = CompareOptions(**plain.offline.model_dump() | {name: given[name] for name in ("seed", "device", "dtype") if name in given})
    options = plain.model_copy(update={"formats": names, "compare": compare, "offline": offline})
    if short:
        options = quick(options, keep=frozenset(given))
    result = run_spectrum(checkpoint, options)
    path = evidence_path(checkpoint)
    picture = draw(result, path.with_suffix(".png"))
    shown = {"path": str(path), "picture": str(picture), "result": result.model_dump()}
    show(as_json, shown, lambda: table(result, path, picture))


def table(result: "SpectrumResult", path: Path, picture: Path) -> "RenderableType":
    """A row a format, the smallest last, and what follows."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = result.rows[0].fidelity
    tokens = sum(each.tokens for each in first.documents)
    title = f"{result.model}: {tokens:,} tokens of {len(first.documents)} documents ({result.corpus['data']}), {first.engine.version}"
    caption = f"size of the whole cache at {result.context:,} tokens; KL to: end of its interval; norm: error of a vector's length; *: Pareto front"
    grid = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("format", "B/token", "KL", "KL to", "ratio", "top-1", "K norm", "V norm", "needles", "problems", "verdict"):
        grid.add_column(name, justify="left" if name in ("format", "verdict") else "right", no_wrap=True)
    for row in sorted(result.rows, key=lambda row: -row.bytes_per_token):
        each = row.fidelity
        grid.add_row(
            row.variant + (" *" if row.variant in result.front else ""),
            f"{row.bytes_per_token:,.0f}",
            _short(each.kl_mean.value),
            _short(each.kl_mean.high),
            f"{each.perplexity_ratio.value:.3f}",
            f"{each.top1_agreement.value:.1%}",
            _norm_error(row.key_error),
            _norm_error(row.value_error),
            _hits(row.needles),
            _hits(row.reasoning),
            row.verdict,
        )
    lines = [Text(result.recommendation, style="bold")]
    lines += [Text(f"  {name} is left out: {reason}") for name, reason in result.left_out.items()]
    return Group(grid, *lines, Text(f"kept in {path}, drawn in {picture}"))


def _norm_error(error: "StorageError | None") -> str:
    return "–" if error is None else f"{error.norm_error:.4f}"


def _short(value: float) -> str:
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _hits(hits: "Hits | None") -> str:
    return "–" if hits is None else f"{hits.hits}/{hits.asked}"
