"""Everything a report says, as values; the templates only place it."""

from dataclasses import dataclass
from typing import Any

from calibrate.artefact import public
from calibrate.evaluate.results import Ladder
from calibrate.gate.evaluate import judge
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy
from calibrate.gate.verdict import Verdict
from calibrate.report import figures, formats, needles, ranges
from calibrate.report.origin import origin
from calibrate.report.results import Shown, shown
from calibrate.report.untested import untested


@dataclass(frozen=True)
class Fidelities:
    """One engine's comparison: its fidelity and held-out tables."""

    engine: str
    corpus: str
    rows: list[figures.FidelityRow]
    held_out: list[figures.HeldOutSummary]
    layers: list[figures.HeldOutRow]


@dataclass(frozen=True)
class Needles:
    """One engine's needles. `fault` says why there are no rows, where there are none."""

    engine: str
    groups: list[needles.Group]
    rows: list[needles.RecallRow]
    fault: str


@dataclass(frozen=True)
class Content:
    title: str
    verdict: Verdict
    stopping: list[tuple[str, str, str]]  # (status, rules, the reason that they share), failures first
    ladder: Ladder | None
    no_ladder: str
    readback: str
    needles: list[Needles]
    reasoning: list[tuple[str, list[tuple[str, str, str]]]]
    formats: list[formats.Formats]
    ranges: list[ranges.RangePlot]
    no_ranges: str
    fidelity: list[Fidelities]
    origin: list[tuple[str, str]]
    untested: list[str]


def content_of(material: Material, policy: Policy, policy_name: str) -> Content:
    """Judge the checkpoint and lay out what is known about it."""
    verdict, results = judge(material, policy, policy_name), shown(material)
    drawable = material.statistics.value is not None and material.scales.value is not None
    return Content(
        title=_title(material, results),
        verdict=verdict,
        stopping=_stopping(verdict),
        ladder=results.ladder,
        no_ladder=results.no_ladder,
        readback=next(check.reason for check in verdict.checks if check.name == "readback"),
        needles=[_needles(result) for result in results.niah.values()],
        reasoning=[(result.variants[0].engine.version, figures.reasoning_rows(result)) for result in results.reasoning.values() if result.variants],
        formats=[formats.formats_of(result) for result in results.formats.values()],
        ranges=ranges.range_plots(material.statistics.value, material.scales.value) if drawable else [],
        no_ranges=material.statistics.fault or material.scales.fault,
        fidelity=[_fidelities(result) for result in results.compare.values()],
        origin=origin(material),
        untested=untested(material, results, verdict),
    )


def _stopping(verdict: Verdict) -> list[tuple[str, str, str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for check in sorted(verdict.stopping, key=lambda check: check.status != "fail"):
        names.setdefault((check.status, check.reason), []).append(check.name)
    return [(status, ", ".join(some), reason) for (status, reason), some in names.items()]


def _title(material: Material, results: Shown) -> str:
    named = [result.model for kind in (results.compare, results.niah) for result in kind.values()]
    return named[0] if named else material.checkpoint.resolve().name


def _needles(result: Any) -> Needles:
    engine = ", ".join(dict.fromkeys(one.engine.version for one in result.variants))
    rows, fault = needles.recall_rows(result)
    return Needles(engine, needles.groups(result, engine), rows, fault)


def _fidelities(result: Any) -> Fidelities:
    sources = ", ".join(public(str(source.get("data"))) for source in result.corpus.get("sources", []))
    return Fidelities(
        engine=figures.engine_line(result),
        corpus=sources or "not recorded",
        rows=figures.fidelity_rows(result),
        held_out=figures.held_out_summary(result),
        layers=figures.held_out_rows(result),
    )
