"""Needle files and matching; each synthetic question's answer follows from its statements alone."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from calibrate.corpus.builtin import standard_library, topics
from calibrate.errors import UsageError
from calibrate.evaluate.needle_tasks import HOPS, KEYS, TASKS, VALUES, make_question
from calibrate.evaluate.needles import contains, found, load_needles, shipped_languages, shipped_needles
from calibrate.resources import resource


@pytest.mark.parametrize("language", ["en", "zh"])
def test_shipped_sets(language):
    needles = shipped_needles(language)
    assert needles.language == language
    assert len(needles.needles) >= 24
    answers = [answer for needle in needles.needles for answer in needle.answers]
    assert len(set(answers)) == len(answers)
    for needle in needles.needles:
        assert needle.statement[-1] in ".。"
        others = [other.statement for other in needles.needles if other is not needle]
        assert not any(contains(other, answer) for other in others for answer in needle.answers)


def test_shipped_answers_stand_in_no_builtin_haystack():
    answers = [answer for language in shipped_languages() for needle in shipped_needles(language).needles for answer in needle.answers]
    for document in (*topics(), *standard_library()):
        text = document.text.casefold()  # cheaper, and finds more than `contains` does
        held = [answer for answer in answers if answer.casefold() in text and contains(document.text, answer)]
        assert not held, (document.source, held)


@pytest.mark.parametrize(
    ("text", "answer", "hit"),
    [
        ("It is Quimbett.", "quimbett", True),
        ("QUIMBETT!", "Quimbett", True),
        ("The toll: 7391 tokens", "7391", True),
        ("7391", "7391", True),
        ("The toll is 7391.", "7391", True),
        ("173910", "7391", False),
        ("73912", "7391", False),
        ("7391.5", "7391", False),
        ("1,7391", "7391", False),
        ("7,391", "7391", False),  # not as it was written
        ("７３９１", "7391", True),  # full width: NFKC
        ("共7391枚", "7391", True),
        ("pickled\n  fennel", "pickled fennel", True),
        ("unpickled fennel", "pickled fennel", False),
        ("the Oxenburys", "Oxenbury", False),
        ("Oxenbury's", "Oxenbury", True),
        ("它叫墨团子。", "墨团子", True),
        ("它叫墨团", "墨团子", False),
        ("BCDF", "BCDF", True),
        ("BCDFG and BCD", "BCDF", False),
        ("", "x", False),
    ],
)
def test_matching(text, answer, hit):
    assert contains(text, answer) is hit


def test_all_expected_and_none_forbidden():
    assert found("1 and 2", ("1", "2"))
    assert not found("only 1", ("1", "2"))
    assert not found("1, 2 and 3", ("1", "2"), ("3",))


def _question(task: str, language: str, seed: int, depth: float = 0.3):
    needles = shipped_needles(language)
    return make_question(task, needles, depth, seed, np.random.default_rng(seed), np.arange(len(needles.needles)))


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("seed", range(20))
def test_answers_follow_from_the_statements(language, seed):
    """An independent parser reads the statements and finds exactly the expected answers."""
    asked = _question("multi-key", language, seed)
    by_key = dict(_facts(asked.hidden, language))
    assert len(by_key) == KEYS
    key = next(key for key in by_key if key in asked.question)
    assert asked.expected == (by_key.pop(key),)
    assert set(asked.forbidden) == set(by_key.values())

    asked = _question("multi-value", language, seed)
    facts = _facts(asked.hidden, language)
    assert len({key for key, _ in facts}) == 1
    assert facts[0][0] in asked.question
    assert str(VALUES) in asked.question
    assert {value for _, value in facts} == set(asked.expected)
    assert len(asked.expected) == VALUES

    asked = _question("variable-tracking", language, seed)
    value = re.search(r"\d{6}", asked.question)[0]
    held: dict[str, str] = {}
    for each in sorted(asked.hidden, key=lambda each: each.depth):  # reading order: every source is assigned before it is used
        name, source = re.findall(r"\b(?:[A-Z]{4}|\d{6})\b", each.statement, re.ASCII)
        held[name] = held.get(source, source)
    assert {name for name, got in held.items() if got == value} == set(asked.expected)
    assert {name for name, got in held.items() if got != value} == set(asked.forbidden)
    assert len(asked.expected) == HOPS


def _facts(hidden, language: str) -> list[tuple[str, str]]:
    form = {"en": r" of the (.+) is (\d+)\.", "zh": r"^(.+?)的(?:柜子密码|票号之一)是(\d+)。"}[language]
    return [re.search(form, each.statement).groups() for each in hidden]


@pytest.mark.parametrize("task", TASKS)
def test_questions_are_seeded(task):
    assert _question(task, "en", 5) == _question(task, "en", 5)
    assert _question(task, "en", 5) != _question(task, "en", 6)


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_the_asked_statement_stands_at_the_depth(depth):
    for task in TASKS:
        asked = _question(task, "en", 1, depth)
        assert asked.hidden[0].depth == depth
        assert all(0 <= each.depth <= 1 for each in asked.hidden)


def _set(tmp_path: Path, change) -> Path:
    content = yaml.safe_load((resource("data") / "needles" / "en.yaml").read_text(encoding="utf-8"))
    change(content)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return path


def test_own_file(tmp_path):
    needle = {"id": "x", "statement": "The plum is called Orzo.", "question": "What is the plum called?", "answers": ["Orzo"]}
    path = _set(tmp_path, lambda content: content.update(language="fr", needles=[needle]))
    assert load_needles(path).needles[0].answers == ("Orzo",)
    assert load_needles(path).digest() != shipped_needles("en").digest()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.update(needles=[]), "needles"),
        (lambda content: content.update(extra=1), "extra"),
        (lambda content: content["needles"][0].update(answers=["Nobody"]), "does not stand in its statement"),
        (lambda content: content["needles"][0].update(question="Is it Quimbett?"), "gives an answer away"),
        (lambda content: content["needles"][0].update(id="bridge-toll"), "two needles have the id bridge-toll"),
        (lambda content: content["templates"]["multi_key"].update(question="Which?"), "multi_key.question must use exactly {key}"),
    ],
)
def test_bad_files_are_one_line(tmp_path, change, says):
    with pytest.raises(UsageError) as caught:
        load_needles(_set(tmp_path, change))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [", encoding="utf-8")
    for path, says in ((tmp_path / "absent.yaml", "no such file"), (broken, "not YAML"), (tmp_path, "cannot read")):
        with pytest.raises(UsageError, match=says):
            load_needles(path)
    with pytest.raises(UsageError, match="en, zh"):
        shipped_needles("tlh")
