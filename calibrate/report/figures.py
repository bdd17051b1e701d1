"""Figures as the report's tables show them."""

from collections.abc import Iterable
from dataclasses import dataclass

from calibrate.evaluate.results import CALIBRATED, UNIT, CompareResult, Fidelity, HeldOut, Interval, ReasoningResult
from calibrate.evaluate.summary import reasoning_summary

NAMES = {
    "16-bit": "16-bit cache",
    "unit": "FP8 at scale 1.0",
    "random": "FP8, random tokens",
    "old-formula": "FP8, vLLM's old formula",
    "calibrated": "FP8, calibrated",
}


def name(variant: str) -> str:
    """A variant in words; the user's own as they called it."""
    return NAMES.get(variant, variant)


@dataclass(frozen=True)
class FidelityRow:
    variant: str
    ours: bool
    perplexity: str
    ratio: str
    delta: str
    kl: str
    kl_p99: str
    top1: str


@dataclass(frozen=True)
class HeldOutRow:
    layer: int
    kind: str
    scale: str
    amax: str
    snr: str
    unit_snr: str
    saturated: str
    underflow: str
    attention: str


@dataclass(frozen=True)
class HeldOutSummary:
    """One variant and kind over all layers."""

    variant: str
    kind: str
    layers: int
    snr: str
    saturated: str
    underflow: str


def interval(one: Interval, form: str) -> str:
    """value (low to high)."""
    return f"{one.value:{form}} ({one.low:{form}} to {one.high:{form}})"


def fidelity_rows(result: CompareResult) -> list[FidelityRow]:
    return [_fidelity_row(one) for one in result.fidelity]


def _fidelity_row(one: Fidelity) -> FidelityRow:
    return FidelityRow(
        variant=name(one.variant),
        ours=one.variant == CALIBRATED,
        perplexity=f"{one.perplexity:.4g}",
        ratio=interval(one.perplexity_ratio, ".4f"),
        delta=interval(one.mean_abs_delta_logprob, ".3g"),
        kl=interval(one.kl_mean, ".2g"),
        kl_p99=interval(one.kl_p99, ".2g"),
        top1=interval(one.top1_agreement, ".2%"),
    )


def engine_line(result: CompareResult) -> str:
    """What computed these figures, each setting once, and over how much text."""
    infos = [one.engine for one in result.fidelity]
    versions, backends = _each(info.version for info in infos), _each(info.attention_backend for info in infos)
    devices, ranks = _each(info.device for info in infos), _each(f"{info.tensor_parallel_size}" for info in infos)
    scored = result.fidelity[0].documents if result.fidelity else ()
    text = f"{len(scored)} documents, {sum(one.tokens for one in scored):,} tokens"
    return f"{versions}; attention {backends}; {devices}; tensor parallel {ranks}; {text}"


def _each(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def held_out_rows(result: CompareResult) -> list[HeldOutRow]:
    """The calibrated cache's layers, the worst first: most saturation, then least signal to noise."""
    unit = {(row.layer, row.kind): row for row in result.held_out if row.variant == UNIT}
    ours = [row for row in result.held_out if row.variant == CALIBRATED]
    ours.sort(key=lambda row: (-row.saturated, _db(row)))
    return [_held_out_row(row, unit.get((row.layer, row.kind))) for row in ours]


def _held_out_row(row: HeldOut, unit: HeldOut | None) -> HeldOutRow:
    return HeldOutRow(
        layer=row.layer,
        kind=row.kind.upper(),
        scale=f"{max(row.scale):.4g}",
        amax=f"{max(row.amax):.4g}",
        snr=decibels(_db(row)) if row.snr_interval is None else interval(row.snr_interval, ".1f"),
        unit_snr="–" if unit is None else decibels(_db(unit)),
        saturated=_share_interval(row.saturated, row.saturated_interval),
        underflow=_share_interval(row.underflow, row.underflow_interval),
        attention="–" if row.attention_error is None else interval(row.attention_error, ".2%"),
    )


def held_out_summary(result: CompareResult) -> list[HeldOutSummary]:
    """A line for each variant and kind."""
    keys = dict.fromkeys((row.variant, row.kind) for row in result.held_out)
    return [_summary_row(variant, kind, [row for row in result.held_out if (row.variant, row.kind) == (variant, kind)]) for variant, kind in keys]


def _summary_row(variant: str, kind: str, rows: list[HeldOut]) -> HeldOutSummary:
    levels = [_db(row) for row in rows]
    return HeldOutSummary(
        variant=name(variant),
        kind=kind.upper(),
        layers=len(rows),
        snr=f"{decibels(min(levels))}, {decibels(sum(levels) / len(levels))}",
        saturated=share(max(row.saturated for row in rows)),
        underflow=share(max(row.underflow for row in rows)),
    )


def _db(row: HeldOut) -> float:
    return float("inf") if row.snr_db is None else row.snr_db


def decibels(value: float) -> str:
    return "exact" if value == float("inf") else f"{value:.1f}"


def _share_interval(value: float, one: Interval | None) -> str:
    return share(value) if one is None or one.high == 0 else f"{share(value)} ({share(one.low)} to {share(one.high)})"


def share(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def reasoning_rows(result: ReasoningResult) -> list[tuple[str, str, str]]:
    """(variant, solved, lost and won against the 16-bit cache)."""
    rows = []
    for row in reasoning_summary(result):
        paired = row["against_16_bit"]
        lost = "–" if paired is None else f"{paired['first_only']} / {paired['second_only']}"
        rows.append((name(row["variant"]), f"{row['hits']} of {row['asked']}", lost))
    return rows
