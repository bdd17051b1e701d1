"""The commands that decide and tell: `gate` and `report`."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--policy", type=click.Path(path_type=Path), help="Policy file (docs/gate.md). Default: the shipped one, data/policies/default.yaml.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here, one testcase a check.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the verdict as Markdown here.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on stdout.")
def gate(checkpoint: Path, policy: Path | None, junit: Path | None, markdown: Path | None, as_json: bool) -> None:
    """Judge CHECKPOINT by a policy, from the evidence inside it. Exit 0: release. Exit 1: do not; every failing check says why."""
    from calibrate.artefact import write_text
    from calibrate.cli import show
    from calibrate.evaluate.evidence import check_target
    from calibrate.gate import evaluate_gate, load_policy, render

    for target in (junit, markdown):
        check_target(checkpoint, target)
    verdict = evaluate_gate(checkpoint, load_policy(policy), policy_name=str(policy or "default"))
    if junit:
        write_text(junit, render.junit(verdict))
    if markdown:
        write_text(markdown, render.markdown(verdict))
    show(as_json, verdict.as_dict(), lambda: render.terminal(verdict))
    if not verdict.passed:
        sys.exit(1)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="HTML file to write. Default: kv_calibration/report.html in the checkpoint.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write a section for the model card here, as Markdown.")
@click.option("--policy", type=click.Path(path_type=Path), help="Policy of the verdict in the report. Default: the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written, and the verdict, as JSON on stdout.")
def report(checkpoint: Path, output: Path | None, markdown: Path | None, policy: Path | None, as_json: bool) -> None:
    """Write one self-contained HTML file about CHECKPOINT: decision, needles, ranges, fidelity, provenance, what was not tested."""
    from rich.text import Text

    from calibrate.cli import show
    from calibrate.evaluate.evidence import check_target
    from calibrate.report.write import write_report

    for target in (output, markdown):
        check_target(checkpoint, target)
    written = write_report(checkpoint, output, markdown=markdown, policy_file=policy)
    show(as_json, written.as_dict(), lambda: Text(written.sentence))
