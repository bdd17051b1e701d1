"""Rules about answers: needles found and problems solved with the calibrated cache against the 16-bit one, question by question."""

from collections.abc import Hashable, Mapping

from calibrate.evaluate.mcnemar import mcnemar
from calibrate.evaluate.results import CALIBRATED, SIXTEEN_BIT, NeedleResult, ReasoningResult
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy, RecallBounds
from calibrate.gate.select import variant
from calibrate.gate.verdict import Outcome

Answers = Mapping[Hashable, bool]


def needle_recall(result: NeedleResult, material: Material, policy: Policy) -> Outcome:
    """Needles, cell by cell."""
    answers = {
        name: {(cell.task, cell.language, cell.length, cell.depth, cell.needle, cell.seed): cell.hit for cell in found.cells}
        for name in (SIXTEEN_BIT, CALIBRATED)
        if (found := variant(result.variants, name)) is not None
    }
    return _paired(answers, policy.needles, "needle cells", "niah")


def reasoning(result: ReasoningResult, material: Material, policy: Policy) -> Outcome:
    """Reasoning problems, one by one."""
    answers = {
        name: {(problem.task, problem.number): problem.correct for problem in found.problems}
        for name in (SIXTEEN_BIT, CALIBRATED)
        if (found := variant(result.variants, name)) is not None
    }
    return _paired(answers, policy.reasoning, "reasoning problems", "reason")


def _paired(answers: dict[str, Answers], bounds: RecallBounds, what: str, command: str) -> Outcome:
    limit = f"drop at most {bounds.max_drop:.0%}, p at least {bounds.significance:g}, {bounds.min_cells} pairs, {bounds.min_hits} of them right"
    absent = [name for name in (SIXTEEN_BIT, CALIBRATED) if name not in answers]
    if absent:
        return Outcome("missing", f"{command} has no answers with the {' and '.join(absent)} cache", limit)
    before, after = answers[SIXTEEN_BIT], answers[CALIBRATED]
    if before.keys() != after.keys():
        return Outcome("fail", f"the 16-bit and the calibrated cache were not asked the same {what}", limit)
    if len(before) < bounds.min_cells:
        return Outcome("fail", f"only {len(before)} {what} were asked, too few to judge", limit)
    hits = sum(before.values())
    if hits < bounds.min_hits:
        return Outcome("fail", f"the 16-bit cache itself got only {hits} of {len(before)} {what} right, too few to lose any: ask easier ones", limit)
    return _compared(before, after, bounds, what, limit)


def _compared(before: Answers, after: Answers, bounds: RecallBounds, what: str, limit: str) -> Outcome:
    test = mcnemar([before[key] for key in before], [after[key] for key in before])
    lost, won, p = test.first_only, test.second_only, test.second_worse
    drop = (lost - won) / len(before)
    figures = (
        f"{sum(after.values())} of {len(before)} {what} right, 16-bit {sum(before.values())}: {lost} lost and {won} won, "
        f"drop {drop:.1%}, McNemar p = {p:.2g}"
    )
    faults = ["the drop is above its bound"] * (drop > bounds.max_drop) + ["the loss is beyond noise"] * (p < bounds.significance)
    return Outcome("fail" if faults else "pass", "; ".join([figures, *faults]), limit)
