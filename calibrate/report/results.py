"""The results that a report shows: those about this very checkpoint. The others are named with the reason why they are not shown."""

from dataclasses import dataclass
from typing import Any

from calibrate.errors import UsageError
from calibrate.evaluate.evidence import ENGINES, READBACK_FILE
from calibrate.evaluate.ladder import decide
from calibrate.evaluate.results import Ladder
from calibrate.gate.material import Material


@dataclass(frozen=True)
class Shown:
    """Results by engine, vLLM's first.

    Attributes:
        readback: Readback.as_dict(), or None.
        left_out: a sentence for each file that is not shown.
        ladder: which level suffices; None with `no_ladder` saying why.
    """

    readback: dict[str, Any] | None
    compare: dict[str, Any]
    niah: dict[str, Any]
    reasoning: dict[str, Any]
    formats: dict[str, Any]
    left_out: tuple[str, ...]
    ladder: Ladder | None
    no_ladder: str


def shown(material: Material) -> Shown:
    """Sort out what can be shown."""
    mine = {name: result for name, result in material.evidence.results.items() if result.subject == material.subject.value}
    foreign = [f"{name} is about another checkpoint: not shown" for name in material.evidence.results if name not in mine]
    kinds = ("compare", "niah", "reasoning", "formats")
    by_kind = {kind: {engine: mine[name] for engine in ENGINES if (name := f"{kind}-{engine}.json") in mine} for kind in kinds}
    ladder, why = _ladder(by_kind)
    return Shown(
        readback=mine[READBACK_FILE].readback if READBACK_FILE in mine else None,
        **by_kind,
        left_out=(*foreign, *material.evidence.faults.values()),
        ladder=ladder,
        no_ladder=why,
    )


def _ladder(by_kind: dict[str, dict[str, Any]]) -> tuple[Ladder | None, str]:
    engine = next(iter(by_kind["compare"]), None)
    if engine is None:
        return None, "Which level suffices is not known: there is no comparison of this very checkpoint (kv-calibrate compare)."
    try:
        return decide(by_kind["compare"][engine], by_kind["niah"].get(engine)), ""
    except UsageError as error:
        return None, f"Which level suffices is not known: {error}."
