"""Needle and reasoning results in few numbers: shares with their intervals, and the paired test against the 16-bit cache."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from calibrate.errors import UsageError
from calibrate.evaluate.mcnemar import McNemar, compare_cells, mcnemar, wilson
from calibrate.evaluate.results import SIXTEEN_BIT, NeedleResult, Problem, ReasoningResult


def needle_summary(result: NeedleResult) -> list[dict[str, Any]]:
    """One row a variant: recall over all cells and by length, and McNemar against the 16-bit cache where that was asked too."""
    reference = next((each.cells for each in result.variants if each.variant == SIXTEEN_BIT), None)
    rows = []
    for each in result.variants:
        groups = {length: [cell.hit for cell in each.cells if cell.length == length] for length in sorted({cell.length for cell in each.cells})}
        paired = None if reference is None or each.variant == SIXTEEN_BIT else compare_cells(reference, each.cells)
        rows.append(_row(each.variant, [cell.hit for cell in each.cells], {f"{length:,}": hits for length, hits in groups.items()}, paired))
    return rows


def reasoning_summary(result: ReasoningResult) -> list[dict[str, Any]]:
    """One row a variant: solved problems over all and by task, and McNemar against the 16-bit cache where that was asked too."""
    reference = next((each.problems for each in result.variants if each.variant == SIXTEEN_BIT), None)
    rows = []
    for each in result.variants:
        tasks = list(dict.fromkeys(problem.task for problem in each.problems))
        groups = {task: [problem.correct for problem in each.problems if problem.task == task] for task in tasks}
        paired = None if reference is None or each.variant == SIXTEEN_BIT else compare_problems(reference, each.problems)
        rows.append(_row(each.variant, [problem.correct for problem in each.problems], groups, paired))
    return rows


def compare_problems(first: Sequence[Problem], second: Sequence[Problem]) -> McNemar:
    """McNemar over reasoning problems. Raises UsageError where the two variants were not asked the same."""
    if [(each.task, each.number, each.expected) for each in first] != [(each.task, each.number, each.expected) for each in second]:
        raise UsageError("two variants were not asked the same problems: run reason with both at once")
    return mcnemar([each.correct for each in first], [each.correct for each in second])


def _row(variant: str, hits: list[bool], groups: dict[str, list[bool]], paired: McNemar | None) -> dict[str, Any]:
    return {
        "variant": variant,
        "hits": sum(hits),
        "asked": len(hits),
        "share": wilson(sum(hits), len(hits)).model_dump(),
        "by": {name: [sum(group), len(group)] for name, group in groups.items()},
        "against_16_bit": None if paired is None else asdict(paired),
    }
