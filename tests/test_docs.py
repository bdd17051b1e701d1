"""Every command that README and docs show is run here, on a tiny model."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|bash|console|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TEXT = "The quick brown fox jumps over the lazy dog and comes home late at night. " * 6


def commands(page: Path) -> list[str]:
    """Command lines of a page's shell blocks, continuation lines joined, comments dropped."""
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


ALL = [(page.name, command) for page in PAGES for command in commands(page)]
MAKE = sorted({command for _, command in ALL if command.startswith("make ")})


def test_pages_have_commands():
    assert len(ALL) > 10
    known = ("make ", "kv-calibrate ", "env/", "python ", "vllm serve", "git ", "torchrun", "PYTHON", "KV_CALIBRATE", "pip ", ".venv/bin/")
    assert [command for _, command in ALL if not command.startswith(known)] == []


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command):
    """`make -n` resolves the target and its variables without running it; what the targets run is tested elsewhere."""
    words = shlex.split(command, comments=True)
    done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
