"""Seeded problems of several steps whose answers are known: arithmetic, counters and boxes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_NAMES = ("Ada", "Boris", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "purple")
_THINGS = ("coin", "key", "stamp", "button", "marble", "feather", "thimble", "pebble")
LEVELS = (1, 2, 3)
STEPS = {1: 2, 2: 4, 3: 8}


@dataclass(frozen=True)
class Posed:
    """A problem, its way to the answer as the few-shot examples show it, and the answer."""

    text: str
    working: str
    answer: str


def _arithmetic(steps: int, generator: np.random.Generator) -> Posed:
    """A number, changed step by step."""
    value = int(generator.integers(2, 20))
    told, working = [f"Start with {value}."], []
    for _ in range(steps):
        kind = _operation(value, generator)
        number = int(generator.integers(2, 5)) if kind == 2 else _change(kind, value, 20, generator)
        before, value = value, (value + number, value - number, value * number)[kind]
        told.append((f"Add {number}.", f"Subtract {number}.", f"Multiply by {number}.")[kind])
        working.append(f"{before} {'+-*'[kind]} {number} = {value}.")
    return Posed(f"{' '.join(told)} What is the result?", " ".join(working), str(value))


def _operation(value: int, generator: np.random.Generator) -> int:
    """0 adds, 1 subtracts, 2 multiplies; what keeps values between 1 and a few hundred."""
    allowed = [0, *([1] if value > 1 else []), *([2] if value < 200 else [])]
    return allowed[int(generator.integers(len(allowed)))]


def _change(kind: int, value: int, most: int, generator: np.random.Generator) -> int:
    """A number to add, or to subtract with something left."""
    return int(generator.integers(1, (min(value - 1, most) if kind == 1 else most) + 1))


def _chain(steps: int, generator: np.random.Generator) -> Posed:
    """People whose numbers depend on each other's; the last one's is asked."""
    names = [_NAMES[index] for index in generator.permutation(len(_NAMES))] + [f"Guest {number}" for number in range(1, steps)]
    value = int(generator.integers(2, 20))
    told, working = [f"{names[0]} has {value} apples."], [f"{names[0]} has {value}."]
    for before, name in pairwise(names[: steps + 1]):
        kind = _operation(value, generator)
        number = _change(kind, value, 10, generator)
        value = (value + number, value - number, value * 2)[kind]
        relation = (f"{number} more than", f"{number} fewer than", "twice as many as")[kind]
        told.append(f"{name} has {relation} {before}.")
        working.append(f"{name} has {value}.")
    return Posed(f"{' '.join(told)} How many apples does {names[steps]} have?", " ".join(working), str(value))


def _counters(steps: int, generator: np.random.Generator) -> Posed:
    """Three counters are changed in turns; one is asked."""
    names = [_COLOURS[index] for index in generator.permutation(len(_COLOURS))[:3]]
    values = {name: int(generator.integers(5, 15)) for name in names}
    asked = names[0]
    told = [f"The {name} counter shows {value}." for name, value in values.items()]
    working = [f"{asked}: {values[asked]}."]
    for step in range(steps):
        name = asked if step % 2 else names[int(generator.integers(3))]
        up = bool(generator.integers(2)) or values[name] < 2
        number = int(generator.integers(1, 10 if up else min(values[name], 9) + 1))
        values[name] += number if up else -number
        told.append(f"The {name} counter goes {'up' if up else 'down'} by {number}.")
        if name == asked:
            working.append(f"{asked}: {values[asked]}.")
    return Posed(f"{' '.join(told)} What does the {asked} counter show?", " ".join(working), str(values[asked]))


def _boxes(steps: int, generator: np.random.Generator) -> Posed:
    """Things are moved between boxes; the place of one is asked."""
    boxes = [_COLOURS[index] for index in generator.permutation(len(_COLOURS))[:4]]
    things = [_THINGS[index] for index in generator.permutation(len(_THINGS))[:3]]
    places = {thing: boxes[int(generator.integers(4))] for thing in things}
    asked = things[0]
    told = [f"The {thing} is in the {box} box." for thing, box in places.items()]
    working = [f"{asked}: {places[asked]}."]
    for step in range(steps):
        thing = asked if step % 2 else things[int(generator.integers(3))]
        others = [box for box in boxes if box != places[thing]]
        places[thing] = others[int(generator.integers(3))]
        told.append(f"The {thing} is moved to the {places[thing]} box.")
        if thing == asked:
            working.append(f"{asked}: {places[asked]}.")
    return Posed(f"{' '.join(told)} In which box is the {asked}? Give its colour.", " ".join(working), places[asked])


TASKS: dict[str, Callable[[int, np.random.Generator], Posed]] = {
    "arithmetic": _arithmetic,
    "chain": _chain,
    "counters": _counters,
    "boxes": _boxes,
}


def pose(task: str, level: int, generator: np.random.Generator) -> Posed:
    """A problem of a task of TASKS at a level of LEVELS: 2, 4 or 8 steps."""
    return TASKS[task](STEPS[level], generator)
