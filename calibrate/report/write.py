"""Checkpoint in, report out: one HTML file that needs nothing else, and Markdown for the model card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from calibrate.artefact import write_text
from calibrate.gate.material import read_material
from calibrate.gate.policy import load_policy
from calibrate.gate.render import cell
from calibrate.gate.verdict import Verdict
from calibrate.report.content import Content, content_of
from calibrate.report.figures import name

DEFAULT = "kv_calibration/report.html"


@dataclass(frozen=True)
class Written:
    """Files of a report, and the verdict that stands at its top."""

    html: Path
    markdown: Path | None
    verdict: Verdict

    @property
    def sentence(self) -> str:
        files = f"{self.html}" + (f" and {self.markdown}" if self.markdown else "")
        return f"{files}: {self.verdict.sentence}"

    def as_dict(self) -> dict[str, Any]:
        return {"html": str(self.html), "markdown": None if self.markdown is None else str(self.markdown), "verdict": self.verdict.as_dict()}


def write_report(checkpoint: Path, output: Path | None = None, *, markdown: Path | None = None, policy_file: Path | None = None) -> Written:
    """Write the report of a checkpoint.

    Args:
        output: the HTML file; None puts it into the checkpoint's own folder.
        markdown: where a section for the model card goes, if anywhere.

    Raises:
        UsageError: no checkpoint of ours, a bad policy, a file that cannot be written.
    """
    policy = load_policy(policy_file)
    content = content_of(read_material(checkpoint), policy, str(policy_file.name if policy_file else "default"))
    html = output or checkpoint / DEFAULT
    write_text(html, render_html(content))
    if markdown:
        write_text(markdown, render_markdown(content))
    return Written(html, markdown, content.verdict)


def render_html(content: Content) -> str:
    return _environment(autoescape=True).get_template("report.html.j2").render(content=content)


def render_markdown(content: Content) -> str:
    return _environment(autoescape=False).get_template("card.md.j2").render(content=content)


def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("calibrate.report"), autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": cell, "variant": name}
    return environment
