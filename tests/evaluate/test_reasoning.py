"""Reasoning problems: answers that an independent solver finds in the text, strict extraction, the user's own, resume."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from calibrate.cli import main
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.prompts import Prompter
from calibrate.evaluate.reasoning import ReasoningPlan, build_problems, extract, read_problems, run_reasoning, same
from calibrate.evaluate.reasoning_tasks import LEVELS, STEPS, TASKS, pose
from calibrate.evaluate.results import ReasoningResult, load
from calibrate.model import SourceCheckpoint
from tests.evaluate.calibrated import calibrated_copy
from tests.tiny import tiny_checkpoint, tiny_tokenizer


def _solve(task: str, text: str) -> tuple[str, int]:
    """The answer and the number of steps, from the text alone."""
    *told, question = re.split(r"(?<=\.) ", text) if task != "boxes" else re.split(r"(?<=\.) (?!Give)", text)
    if task == "arithmetic":
        value = int(re.search(r"\d+", told[0])[0])
        for step in told[1:]:
            number = int(re.search(r"\d+", step)[0])
            value = {"Add": value + number, "Subtract": value - number, "Multiply": value * number}[step.split()[0]]
        return str(value), len(told) - 1
    if task == "chain":
        name, value = re.match(r"(.+) has (\d+) apples\.", told[0]).groups()
        held = {name: int(value)}
        for step in told[1:]:
            name, relation, before = re.match(r"(.+) has (.+) (?:than|as) (.+)\.", step).groups()
            number = int(re.search(r"\d+", relation)[0]) if "twice" not in relation else held[before]
            held[name] = held[before] + (-number if "fewer" in relation else number)
        assert all(count >= 0 for count in held.values())
        return str(held[re.match(r"How many apples does (.+) have\?", question)[1]]), len(told) - 1
    form = {"counters": r"The (\w+) counter (shows|goes up by|goes down by) (\d+)\.", "boxes": r"The (\w+) is (in|moved to) the (\w+) box\."}[task]
    state: dict[str, str] = {}
    for step in told:
        name, verb, value = re.match(form, step).groups()
        change = {"goes up by": 1, "goes down by": -1}.get(verb)
        state[name] = value if change is None else str(int(state[name]) + change * int(value))
    asked = re.search(r"the (\w+) counter show|is the (\w+)\?", question)
    return state[asked[1] or asked[2]], len(told) - 3


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", LEVELS)
def test_answers_follow_from_the_text(task, level):
    for seed in range(60):
        posed = pose(task, level, np.random.default_rng(seed))
        assert _solve(task, posed.text) == (posed.answer, STEPS[level])
        assert posed.working.endswith(f"{posed.answer}.")  # the examples' working leads to the answer


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_seeded_and_different(task):
    first = [pose(task, 2, np.random.default_rng(seed)) for seed in range(30)]
    assert first == [pose(task, 2, np.random.default_rng(seed)) for seed in range(30)]
    assert len({each.text for each in first}) == 30
    assert len({each.answer for each in first}) >= 4


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("12 + 3 = 15.\nAnswer: 15", "15"),
        ("ANSWER : 15.", "15"),
        ("Answer: 4\nNo, wait.\nAnswer: **15**", "15"),
        ("Answer: $15$\n\nProblem: another\nAnswer: 3", "15"),
        ("The result is 15.", None),
        ("Answer:", None),
        ("", None),
        ("Answer: 15 apples", "15 apples"),
        ("Answer: 15\nthat is it", "15"),
    ],
)
def test_extraction(output, answer):
    assert extract(output) == answer


@pytest.mark.parametrize(
    ("said", "expected", "equal"),
    [
        ("15", "15", True),
        ("15.0", "15", True),
        ("1,200", "1200", True),
        ("1,20", "120", False),
        ("+15", "15", True),
        ("１５", "15", True),
        ("15 apples", "15", False),
        ("Blue", "blue", True),
        ("blue box", "blue", False),
        ("115", "15", False),
        ("-3", "3", False),
    ],
)
def test_comparison(said, expected, equal):
    assert same(said, expected) is equal


def test_forms():
    tokenizer = tiny_tokenizer()
    encoded = []
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        asked, described = build_problems(ReasoningPlan(tasks=("chain",), levels=(1,), problems=2), Prompter(tokenizer), None)
        assert described["form"] == ("chat" if template else "plain")
        assert [(each.task, each.number) for each in asked] == [("chain-1", 0), ("chain-1", 1)]
        encoded.append("".join(tokenizer.convert_ids_to_tokens(asked[0].request.tokens.tolist())).replace("Ġ", " ").replace("Ċ", "\n"))
    assert encoded[0].count("Problem: ") == encoded[1].count("Problem: ") == 4  # three worked ones and the one asked
    assert not encoded[0].endswith("Solution:")
    assert encoded[1].endswith("Solution:")


def test_own_problems(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "2 + 2?", "answer": 4}\n\n{"prompt": "Capital?", "answer": "Zort"}\n', encoding="utf-8")
    assert [(line, posed.text, posed.answer) for line, posed in read_problems(path)] == [(1, "2 + 2?", "4"), (3, "Capital?", "Zort")]
    asked, _ = build_problems(ReasoningPlan(tasks=(), files=(path,)), Prompter(tiny_tokenizer()), None)
    assert [each.task for each in asked] == ["mine", "mine"]
    assert asked[1].problem("Answer: zort.").correct
    assert not asked[1].problem("zort").correct


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no problems"),
        ("{", "broken JSON"),
        ("[1]", "mine.jsonl:1: a problem is an object"),
        ('{"prompt": "a"}', "with exactly prompt and answer"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": true}', "mine.jsonl:2: prompt must be text"),
        ('{"prompt": " ", "answer": "b"}', "neither of them empty"),
    ],
)
def test_bad_files_are_one_line(tmp_path, content, says):
    path = tmp_path / "mine.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_problems(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_bad_input(tmp_path):
    prompter = Prompter(tiny_tokenizer())
    for plan, says in (
        (ReasoningPlan(tasks=()), "no reasoning problems"),
        (ReasoningPlan(problems=0), "no reasoning problems"),
        (ReasoningPlan(tasks=("chess",)), "each reasoning task once"),
        (ReasoningPlan(levels=(1, 1)), "each reasoning level once"),
        (ReasoningPlan(max_new_tokens=0), "at least 1"),
    ):
        with pytest.raises(UsageError, match=says):
            plan.check()
    with pytest.raises(UsageError, match=r"more than the .*context of 512"):
        build_problems(ReasoningPlan(), prompter, 512)
    for path, says in ((tmp_path / "absent.jsonl", "no such file"), (tmp_path / "a.txt", "is no JSONL file")):
        (tmp_path / "a.txt").write_text("x", encoding="utf-8")
        with pytest.raises(UsageError, match=says):
            read_problems(path)


@pytest.fixture
def checkpoint(tmp_path):
    source = tiny_checkpoint(tmp_path / "llama", max_position_embeddings=4096)
    return calibrated_copy(source, tmp_path / "calibrated")


def test_results_and_resume(checkpoint):
    plan = ReasoningPlan(tasks=("boxes",), levels=(1,), problems=3, max_new_tokens=4)
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")
    whole = run_reasoning(checkpoint, engine, (Variant("16-bit", None),), plan)
    path = checkpoint / "kv_calibration" / "evidence" / "reasoning-transformers.json"
    expected = path.read_bytes()
    assert load(ReasoningResult, path) == whole
    assert [each.number for each in whole.variants[0].problems] == [0, 1, 2]
    run_reasoning(checkpoint, engine, (Variant("16-bit", None),), plan)
    assert path.read_bytes() == expected


def test_command(checkpoint):
    arguments = ["reason", str(checkpoint), "--task", "boxes", "--levels", "1", "--problems", "1", "--max-new-tokens", "4", "--device", "cpu"]
    done = CliRunner().invoke(main, [*arguments, "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert [row["variant"] for row in shown["variants"]] == ["16-bit", "unit", "calibrated"]
    failed = CliRunner().invoke(main, [*arguments, "--task", ""])
    assert failed.exit_code == 2
    assert "no reasoning problems" in failed.stderr
