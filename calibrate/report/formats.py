"""The comparison of cache formats as the report shows it."""

import base64
from dataclasses import dataclass

from calibrate.evaluate.pareto_plot import picture
from calibrate.evaluate.spectrum_result import FormatRow, Hits, SpectrumResult
from calibrate.report.figures import interval


@dataclass(frozen=True)
class FormatLine:
    """One format. `on_front`: no other is both smaller and closer to the 16-bit cache."""

    variant: str
    on_front: bool
    size: str
    share: str
    kl: str
    ratio: str
    needles: str
    problems: str
    verdict: str
    reasons: str


@dataclass(frozen=True)
class Formats:
    """The largest first. picture: base64 of a PNG."""

    rows: list[FormatLine]
    picture: str
    recommendation: str
    left_out: list[tuple[str, str]]
    about: str


def formats_of(result: SpectrumResult) -> Formats:
    """Lay out a comparison."""
    whole = result.rows[0].bytes_per_token
    first = result.rows[0].fidelity
    tokens = sum(each.tokens for each in first.documents)
    return Formats(
        rows=[_line(row, whole, result.front) for row in sorted(result.rows, key=lambda row: -row.bytes_per_token)],
        picture=base64.b64encode(picture(result)).decode(),
        recommendation=result.recommendation,
        left_out=sorted(result.left_out.items()),
        about=f"{tokens:,} tokens of {len(first.documents)} documents; bytes of the whole cache at {result.context:,} tokens; {first.engine.version}",
    )


def _line(row: FormatRow, whole: float, front: tuple[str, ...]) -> FormatLine:
    return FormatLine(
        variant=row.variant,
        on_front=row.variant in front,
        size=f"{row.bytes_per_token:,.0f}",
        share=f"{row.bytes_per_token / whole:.0%}",
        kl=interval(row.fidelity.kl_mean, ".2g"),
        ratio=interval(row.fidelity.perplexity_ratio, ".4f"),
        needles=_hits(row.needles),
        problems=_hits(row.reasoning),
        verdict=row.verdict,
        reasons="; ".join(row.reasons),
    )


def _hits(hits: Hits | None) -> str:
    return "not asked" if hits is None else f"{hits.hits} of {hits.asked}"
