"""Every command that README and docs show: it parses, and what can run on a tiny model runs here."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from calibrate.cli import main
from tests.tiny import tiny_checkpoint
from tests.weights import foreign

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|bash|console|shell|yaml)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
KNOWN = ("for part", "done", "make ", "env/", "bash benchmarks/", "python benchmarks/", "vllm serve")
# a page's stand-in → what it stands for on the tiny model; longest first
STAND_INS = {
    r"calibrated/…|calibrated/[\w.-]+|calibrated-model|CHECKPOINT|\"\$OUT\"": "calibrated",
    r"model-AWQ": "awq",
    r"\bshape\b|MODEL|\"\$MODEL\"|path/or/hub-id": "model",
    r"/models/other-fp8": "calibrated",
    r"chats\.jsonl|data/ours\.yaml": "chats.jsonl",
    r"release\.yaml": "policy.yaml",
}


def commands(page: Path) -> list[str]:
    """Command lines of a page's code blocks: continuation lines joined, comments and [optional parts] dropped, the `run:` of CI jobs too."""
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines:
        text = re.sub(r"^\s*(?:run: |\$ )?", "", line).replace(".venv/bin/", "")
        text = re.sub(r"\s+#.*$", "", text)
        text = re.sub(r"^torchrun .* -m calibrate ", "kv-calibrate ", text)  # the same command, shared out (tests/collect/test_team.py)
        if text.startswith(("kv-calibrate ", *KNOWN)):
            found.append(re.sub(r"\s*\[[^\]]*\]", "", text).split(" > ")[0].strip())
    return found


ALL = [(page.name, command) for page in PAGES for command in commands(page)]
MAKE = sorted({command for _, command in ALL if command.startswith("make ")})
OURS = list(dict.fromkeys(command for _, command in ALL if command.startswith("kv-calibrate ")))
# verify and vLLM's engine are run on real vLLM in tests/engines; bench needs a server's time; quantize its own environment (tests/weights);
# recipes are checked in tests/families; lm-eval needs its extra and tasks; maps, plots and the like are written into the folder
RUN = [command for command in OURS if not re.search(r"--engine vllm|kv-calibrate (verify|bench|run|lm-eval|quantize|recipes check)", command)]


def test_the_pages_show_commands():
    assert len(OURS) > 12
    assert not [page.name for page in PAGES if re.search(r"^@[A-Z]+@$", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert {command.split()[1] for command in OURS} >= {"collect", "solve", "write", "verify", "inspect", "compare", "niah", "gate", "report", "plan"}


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command):
    """`make -n` resolves the target and its variables without running it; what the targets run is tested elsewhere."""
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", OURS)
def test_commands_parse(command):
    """Every option exists and takes its value."""
    words = shlex.split(_substituted(command))[1:]
    context = main.make_context("kv-calibrate", words[:], resilient_parsing=True)
    name, chosen, rest = main.resolve_command(context, words)
    while hasattr(chosen, "commands"):  # a group, as `recipes`
        name, chosen, rest = chosen.resolve_command(context, rest)
    chosen.make_context(name, rest, parent=context).close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model, its calibrated checkpoint, chats, statistics and a policy: what the pages' commands are given."""
    folder = tmp_path_factory.mktemp("docs")
    tiny_checkpoint(folder / "model", max_position_embeddings=32768)
    foreign.awq(folder / "awq")
    text = "The quick brown fox jumps over the lazy dog and comes home late at night. " * 40
    (folder / "chats.jsonl").write_text("".join(f'{{"text": "{number} {text}"}}\n' for number in range(8)))
    for number in (1, 2):
        (folder / f"part-{number}.jsonl").write_text("".join(f'{{"text": "{number} {line} {text}"}}\n' for line in range(4)))
    (folder / "policy.yaml").write_text((ROOT / "data" / "policies" / "default.yaml").read_text())
    words = ["run", f"{folder}/model", "--data", f"{folder}/chats.jsonl", "-o", f"{folder}/calibrated", "--no-verify"]
    made = CliRunner().invoke(main, [*words, "--samples", "4", "--sequence-length", "64"])
    assert made.exit_code == 0, made.stderr
    return folder


@pytest.mark.parametrize("command", RUN)
def test_commands_run(command, place, monkeypatch):
    """Exit 0, or 1 where a gate says no to a random model; shorter than shown where a page's numbers mean hours."""
    monkeypatch.chdir(place)
    words = shlex.split(_substituted(command))[1:]
    small = {"collect": ["--samples", "4", "--sequence-length", "160"], "compare": ["--samples", "2", "--sequence-length", "64"]}
    small["niah"] = ["--lengths", "400", "--depths", "0.5", "--needles", "1"]
    small["reason"] = ["--problems", "1", "--tasks", "arithmetic", "--levels", "1"]
    forced = ["--force"] if words[0] in ("collect", "merge", "solve", "write", "kvarn") else []
    if words[0] == "write":
        words = [word if word != "calibrated" else "written" for word in words]
    result = CliRunner().invoke(main, [*words, *small.get(words[0], []), *forced])
    assert result.exit_code in ((0, 1) if words[0] == "gate" else (0,)), (result.stderr, result.exception)


def _substituted(command: str) -> str:
    for pattern, word in STAND_INS.items():
        command = re.sub(pattern, word, command)
    return command
