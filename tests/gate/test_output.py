"""The command `gate`: exit codes, JSON, Markdown, JUnit XML, terminal; hostile text in each."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from rich.console import Console

from calibrate.cli import main
from calibrate.gate import RULES, Check, Verdict, render
from tests.gate.evidence import edit_scales, installed_vllm

HOSTILE = 'a <script>alert("1")</script> & ]]> | [bold]x[/bold] `c` \x00\x1b[31m é\nnext'


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(f"accept_versions: ['{installed_vllm()}']\n")
    return str(path)


def hostile_verdict() -> Verdict:
    checks = tuple(Check(f"c-{status}", status, HOSTILE, HOSTILE) for status in ("pass", "fail", "missing", "waived"))
    return Verdict(HOSTILE, HOSTILE, None, checks)


def test_a_passing_gate_in_every_form(passing, policy, tmp_path):
    junit, markdown = tmp_path / "out" / "gate.xml", tmp_path / "gate.md"
    done = CliRunner().invoke(main, ["gate", str(passing), "--policy", policy, "--junit", str(junit), "--markdown", str(markdown), "--json"])
    assert done.exit_code == 0, done.output
    verdict = json.loads(done.stdout)
    assert (verdict["schema"], verdict["passed"]) == ("kv-calibrate/verdict/1", True)
    assert [check["name"] for check in verdict["checks"]] == list(RULES)
    suite = ET.parse(junit).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(len(RULES)), "0", "1")
    assert [case.get("name") for case in suite.iter("testcase")] == list(RULES)
    assert "Gate: passed" in markdown.read_text()


def test_a_failing_gate_exits_1_and_tells_all(checkpoint, policy, tmp_path):
    edit_scales(checkpoint, lambda tensors: tensors.popitem(), touch_digest=False)
    junit = tmp_path / "gate.xml"
    done = CliRunner().invoke(main, ["gate", str(checkpoint), "--policy", policy, "--junit", str(junit)])
    assert done.exit_code == 1
    assert "Do not release" in done.stdout
    failures = {case.get("name"): case.find("failure") for case in ET.parse(junit).getroot().iter("testcase")}
    assert failures["coverage"].get("type") == "fail"
    assert "1 of 9 scales" in failures["coverage"].get("message")
    assert failures["kl"].get("type") == "missing"
    assert failures["finite_positive"] is None


def test_wrong_usage_exits_2_in_one_line(passing, llama, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("unknown: 1\n")
    cases = [[str(passing), "--policy", str(bad)], [str(tmp_path / "nowhere")], [str(llama)]]
    for arguments, word in zip(cases, ("unknown: Extra inputs", "no checkpoint folder", "not a checkpoint that kv-calibrate wrote"), strict=True):
        done = CliRunner().invoke(main, ["gate", *arguments])
        assert done.exit_code == 2
        assert word in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_hostile_text_survives_xml():
    root = ET.fromstring(render.junit(hostile_verdict()))
    cases = {case.get("name"): case for case in root.iter("testcase")}
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert cases["c-fail"].find("failure").get("message") == shown
    assert cases["c-missing"].find("failure").text.startswith(shown)
    assert cases["c-waived"].find("skipped").get("message") == shown
    assert cases["c-pass"].find("system-out").text.startswith(shown)


def test_hostile_text_stays_in_its_markdown_cell():
    text = render.markdown(hostile_verdict())
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("| c-")]
    assert len(rows) == 4
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


def test_hostile_text_is_no_markup_on_a_terminal():
    console = Console(file=io.StringIO(), width=200)
    console.print(render.terminal(hostile_verdict()))
    assert "[bold]" in console.file.getvalue()
    assert "\x1b[31m" not in console.file.getvalue()
