"""Rows of `recipes check` as the support table of docs/families.md."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from calibrate.artefact import write_text
from calibrate.checkpoint import check_creatable
from calibrate.engines.host import vllm_distribution
from calibrate.errors import UsageError
from calibrate.families.check import GRANULARITIES, Row

BEGIN, END = "<!-- families: begin, written by `make families` -->", "<!-- families: end -->"
_COUNTED = {"refused": "refused", "not checked": "not checked here", "failed": "failed"}
_SAYS = {"loads": "yes", "refused": "no", "not checked": "not checked", "failed": "**failed**"}


def markdown(rows: Sequence[Row]) -> str:
    """The table, between its markers: a line for each model type, with the versions that it was checked with."""
    types = list(dict.fromkeys((row.family, row.model_type) for row in rows))
    outcomes = {one: {row.outcome for row in rows if (row.family, row.model_type) == one} for one in types}
    loads = [one for one, found in outcomes.items() if found == {"loads"}]
    others = {say: sum(outcome in found for found in outcomes.values()) for outcome, say in _COUNTED.items()}
    rest = "".join(f", {number} {say}" for say, number in others.items() if number)
    versions = f"{vllm_distribution()}, transformers {version('transformers')}"
    head = f"{len(loads)} model types of {len({family for family, _ in loads})} families load{rest}; {versions}."
    lines = [BEGIN, head, "", "| family | model type | per tensor | per head | scales compared | why not |", "|---|---|---|---|---|---|"]
    for family, kind in types:
        found = {row.granularity: row for row in rows if (row.family, row.model_type) == (family, kind)}
        said = [_SAYS[found[each].outcome] if each in found else "not checked" for each in GRANULARITIES]
        compared = " + ".join(str(found[each].scales) for each in GRANULARITIES if each in found and found[each].outcome == "loads") or "–"
        reason = next((row.reason for row in found.values() if row.reason), "").replace("|", "\\|")
        lines.append(f"| {family} | `{kind}` | {said[0]} | {said[1]} | {compared} | {reason} |")
    return "\n".join([*lines, END])


def write_table(rows: Sequence[Row], target: Path) -> None:
    """Put the table between the markers of `target`, or into a new file. Raises UsageError: the file exists and has no markers."""
    table = markdown(rows)
    if not target.exists():
        write_text(target, table + "\n")
        return
    check_target(target)
    text = target.read_text(encoding="utf-8")
    write_text(target, text[: text.index(BEGIN)] + table + text[text.index(END) + len(END) :])


def check_target(target: Path) -> None:
    """Raise UsageError where a table could not be put into `target`, before anything is checked."""
    check_creatable(target)
    if not target.exists():
        return
    try:
        text = target.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {target}: {error}") from error
    if BEGIN not in text or END not in text[text.index(BEGIN) :]:
        raise UsageError(f"{target} has no place for the table: put the lines {BEGIN} and {END} there, or name a new file")
