"""From a needle set and a seed to a question: what is hidden where, what is asked, and what must be answered."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from calibrate.evaluate.needles import NeedleSet

KEYS = 4  # statements of multi-key, one of them asked
VALUES = 3  # values of multi-value, all asked
HOPS = 3  # variables of a chain; a second chain as long stands in the same text
MAX_NEW_TOKENS = {"single": 32, "multi-key": 32, "multi-value": 64, "variable-tracking": 64}
_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"  # names without vowels are no words


@dataclass(frozen=True)
class Hidden:
    """A statement and its depth, 0 … 1."""

    statement: str
    depth: float


@dataclass(frozen=True)
class Question:
    """What a cell asks.

    Attributes:
        needle: its id in the set, or for synthetic tasks the key or variable asked for.
        hidden: the statements in reading order where their depths are equal.
        expected: strings that must all be in the output.
        forbidden: answers to what was not asked, which must not be.
    """

    needle: str
    hidden: tuple[Hidden, ...]
    question: str
    expected: tuple[str, ...]
    forbidden: tuple[str, ...] = ()


def make_question(task: str, needles: NeedleSet, depth: float, number: int, generator: np.random.Generator, order: np.ndarray) -> Question:
    """The `number`-th question of a cell.

    generator: drives all that is drawn. order: int [needles], the order in which the cell takes the set's needles.
    """
    if task == "single":
        needle = needles.needles[int(order[number % len(order)])]
        return Question(needle.id, (Hidden(needle.statement, depth),), needle.question, needle.answers)
    return _SYNTHETIC[task](needles, depth, generator)


def _multi_key(needles: NeedleSet, depth: float, generator: np.random.Generator) -> Question:
    """The asked key stands at the depth; the others are spread evenly round it."""
    keys, values = _keys(needles, KEYS, generator), _numbers(KEYS, generator)
    form = needles.templates.multi_key
    statements = [form.statement.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    return Question(keys[0], _spread(statements, depth), form.question.format(key=keys[0]), (values[0],), tuple(values[1:]))


def _multi_value(needles: NeedleSet, depth: float, generator: np.random.Generator) -> Question:
    """The first value stands at the depth; the others are spread evenly round it."""
    (key,), values = _keys(needles, 1, generator), _numbers(VALUES, generator)
    form = needles.templates.multi_value
    statements = [form.statement.format(key=key, value=value) for value in values]
    return Question(key, _spread(statements, depth), form.question.format(key=key, count=VALUES), tuple(values))


def _variable_tracking(needles: NeedleSet, depth: float, generator: np.random.Generator) -> Question:
    """The asked chain begins at the depth and goes on evenly to the end; the other chain runs over the whole text."""
    names, (value, other) = _variables(2 * HOPS, generator), _numbers(2, generator)
    form = needles.templates.variable_tracking
    asked, distracting = _chain(needles, names[:HOPS], value), _chain(needles, names[HOPS:], other)
    hidden = [Hidden(text, depth + (1 - depth) * place / HOPS) for place, text in enumerate(asked)]
    hidden += [Hidden(text, (place + 0.5) / HOPS) for place, text in enumerate(distracting)]
    return Question(names[0], tuple(hidden), form.question.format(value=value, count=HOPS), tuple(names[:HOPS]), tuple(names[HOPS:]))


_SYNTHETIC: dict[str, Callable[[NeedleSet, float, np.random.Generator], Question]] = {
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "variable-tracking": _variable_tracking,
}
TASKS = ("single", *_SYNTHETIC)


def _spread(statements: list[str], depth: float) -> tuple[Hidden, ...]:
    return tuple(Hidden(text, depth if not place else (depth + place / len(statements)) % 1.0) for place, text in enumerate(statements))


def _chain(needles: NeedleSet, names: list[str], value: str) -> list[str]:
    form = needles.templates.variable_tracking
    links = [form.link.format(name=name, source=source) for source, name in pairwise(names)]
    return [form.head.format(name=names[0], value=value), *links]


def _keys(needles: NeedleSet, count: int, generator: np.random.Generator) -> list[str]:
    """Keys that share neither adjective nor noun."""
    words = needles.templates
    adjectives = generator.permutation(len(words.adjectives))[:count]
    nouns = generator.permutation(len(words.nouns))[:count]
    return [words.key.format(adjective=words.adjectives[a], noun=words.nouns[n]) for a, n in zip(adjectives, nouns, strict=True)]


def _numbers(count: int, generator: np.random.Generator) -> list[str]:
    """Distinct numbers of six digits."""
    return [str(100_000 + int(number)) for number in generator.choice(900_000, size=count, replace=False)]


def _variables(count: int, generator: np.random.Generator) -> list[str]:
    """Distinct names of four consonants."""
    numbers = generator.choice(len(_CONSONANTS) ** 4, size=count, replace=False)
    return ["".join(_CONSONANTS[int(number) // len(_CONSONANTS) ** place % len(_CONSONANTS)] for place in range(4)) for number in numbers]
