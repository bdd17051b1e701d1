"""A verdict for people: on the terminal, as Markdown, and for CI systems as JUnit XML."""

import html
import re
import xml.etree.ElementTree as ET

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from calibrate.gate.verdict import Check, Verdict

_STYLES = {"pass": "green", "fail": "bold red", "missing": "bold yellow", "waived": "dim"}
_MARKS = {"pass": "✓ pass", "fail": "✗ fail", "missing": "? missing", "waived": "– waived"}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def terminal(verdict: Verdict) -> RenderableType:
    """One row a check. All of it is plain text to rich: nothing in a reason is taken as markup."""
    title = Text(_printable(f"{verdict.checkpoint}, policy {verdict.policy}"))
    table = Table("check", "status", "reason", "limit", title=title, title_justify="left")
    for check in verdict.checks:
        told = (Text(_printable(text)) for text in (check.reason, check.limit))
        table.add_row(Text(check.name), Text(_MARKS[check.status], style=_STYLES[check.status]), *told)
    return Group(table, Text(verdict.sentence, style="bold green" if verdict.passed else "bold red"))


def markdown(verdict: Verdict) -> str:
    """A heading with the verdict, and the table of checks."""
    rows = [f"| {check.name} | {_MARKS[check.status]} | {cell(check.reason)} | {cell(check.limit)} |" for check in verdict.checks]
    head = f"## Gate: {'passed' if verdict.passed else 'not passed'}\n\n{cell(verdict.sentence)}\n"
    about = f"Checkpoint {code(verdict.checkpoint)}, policy {code(verdict.policy)}."
    return "\n".join([head, about, "", "| check | status | reason | limit |", "|---|---|---|---|", *rows]) + "\n"


def cell(text: str) -> str:
    """Text that stays in its Markdown table cell and is no HTML."""
    flat = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)


def code(text: str) -> str:
    """Text as inline code."""
    return f"<code>{cell(text)}</code>"


def junit(verdict: Verdict) -> str:
    """One testcase a check: `fail` and `missing` are failures of that type, `waived` is skipped."""
    waived = sum(check.status == "waived" for check in verdict.checks)
    counts = {"tests": str(len(verdict.checks)), "failures": str(len(verdict.stopping)), "errors": "0", "skipped": str(waived)}
    suites = ET.Element("testsuites", name="kv-calibrate", **counts)
    suite = ET.SubElement(suites, "testsuite", name="kv-calibrate gate", **counts)
    properties = ET.SubElement(suite, "properties")
    for name, value in (("checkpoint", verdict.checkpoint), ("policy", verdict.policy), ("verdict", verdict.sentence)):
        ET.SubElement(properties, "property", name=name, value=_printable(value))
    for check in verdict.checks:
        _testcase(suite, check)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _testcase(suite: ET.Element, check: Check) -> None:
    case = ET.SubElement(suite, "testcase", name=check.name, classname="kv-calibrate.gate", time="0")
    reason = _printable(check.reason)
    limit = f"\nlimit: {_printable(check.limit)}" if check.limit else ""
    if check.stops:
        ET.SubElement(case, "failure", message=reason, type=check.status).text = reason + limit
    elif check.status == "waived":
        ET.SubElement(case, "skipped", message=reason)
    else:
        ET.SubElement(case, "system-out").text = reason + limit


def _printable(text: str) -> str:
    """Without control characters: XML 1.0 has none, escaped or not, and a terminal obeys them."""
    return _NOT_XML.sub("\ufffd", text)
