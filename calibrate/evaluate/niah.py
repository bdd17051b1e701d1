"""Needle in a haystack: lengths × depths × needles, the same prompts for every variant of the cache."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.session import Engine, Variant
from calibrate.errors import UsageError
from calibrate.evaluate.asking import Questionnaire, Request, digest_of, put_to_all
from calibrate.evaluate.evidence import subject_of
from calibrate.evaluate.haystack import BUILTIN, Haystack, place, read_haystack
from calibrate.evaluate.needle_tasks import MAX_NEW_TOKENS, TASKS, Question, make_question
from calibrate.evaluate.needles import NeedleSet, contains, found, load_needles, shipped_needles
from calibrate.evaluate.prompts import Prompter, stop_ids
from calibrate.evaluate.results import Cell, NeedleResult, NeedleVariant, save
from calibrate.model import SourceCheckpoint, load_tokenizer

KIND = "niah"


@dataclass(frozen=True)
class NeedleGrid:
    """What is asked.

    Attributes:
        lengths: tokens of whole prompts. depths: 0 … 1.
        needles_per_cell: questions of each task and language at each length and depth.
        languages: shipped needle sets, or one language only where `needle_file` is the user's set (then it is that file's).
        haystack: `builtin`, or any source of text (docs/corpora.md). repeat_haystack: repeat one that is too short.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles_per_cell: int = 4
    tasks: tuple[str, ...] = ("single",)
    languages: tuple[str, ...] = ("en",)
    seed: int = 0
    haystack: str = BUILTIN
    repeat_haystack: bool = False
    needle_file: Path | None = None

    def check(self, context: int | None) -> None:
        """Raise UsageError for a grid that is empty, has impossible values, or is longer than the model's context."""
        for name in ("lengths", "depths", "tasks", "languages"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UsageError(f"the needle grid's {name} must be some, each once: {', '.join(map(str, values)) or 'none given'}")
        if min(self.lengths) < 1:
            raise UsageError(f"lengths are tokens of whole prompts, at least 1: {', '.join(map(str, self.lengths))}")
        if self.needles_per_cell < 1:
            raise UsageError(f"an empty needle grid: {self.needles_per_cell} needles a cell")
        unknown = next((task for task in self.tasks if task not in TASKS), None)
        if unknown is not None:
            raise UsageError(f"no needle task {unknown!r}; there are: {', '.join(TASKS)}")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(f"depths are from 0 (the beginning) to 1 (the end): {', '.join(map(str, self.depths))}")
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}: it must not be negative")
        if context is not None and self.longest > context:
            answer = self.longest - max(self.lengths)
            raise UsageError(f"a prompt of {max(self.lengths):,} tokens and its answer of {answer} exceed the model's context of {context:,}")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(self.lengths) + max(MAX_NEW_TOKENS[task] for task in self.tasks)

    def needle_sets(self) -> dict[str, NeedleSet]:
        """Language → its needles. Raises UsageError where a set is missing or damaged."""
        if self.needle_file is not None:
            needles = load_needles(self.needle_file)
            return {needles.language: needles}
        return {language: shipped_needles(language) for language in self.languages}


@dataclass(frozen=True)
class Asked:
    """A cell of the grid before anybody answered."""

    task: str
    language: str
    length: int
    depth: float
    seed: int
    question: Question
    request: Request

    def cell(self, output: str, *, plain: bool) -> Cell:
        """With the answer. A model without chat template goes on writing after it, so there only the first line with letters counts."""
        answer = next((line for line in output.splitlines() if line.strip()), "") if plain else output
        return Cell(
            task=self.task,
            language=self.language,
            length=self.length,
            depth=self.depth,
            needle=self.question.needle,
            seed=self.seed,
            hit=found(answer, self.question.expected, self.question.forbidden),
            expected=self.question.expected,
            output=output,
        )


def run_niah(
    checkpoint: Path, engine: Engine, variants: Sequence[Variant], grid: NeedleGrid, *, batch: int = 1, trust: bool = False, kind: str = KIND
) -> NeedleResult:
    """Ask every variant the grid's questions, greedily, and write `kv_calibration/evidence/<kind>-<engine>.json` into the checkpoint.

    A run that was killed goes on where it was when it is started again with the same arguments.

    Args:
        batch: prompts a call of the engine. trust: run the Python code that the checkpoint brings. kind: what the result is called.

    Raises:
        UsageError: an impossible grid, a haystack or needle file that cannot be used, or a folder that is no calibrated checkpoint.
    """
    subject = subject_of(checkpoint)
    source = SourceCheckpoint.open(checkpoint, trust_remote_code=trust)
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    prompter = Prompter(tokenizer)
    grid.check(source.context_length)
    asked, description = build_grid(grid, prompter)

    def record(number: int, tokens: list[int]) -> Cell:
        return asked[number].cell(prompter.decode(tokens), plain=prompter.form == "plain")

    described = {"subject": subject.model_dump(), **description}
    questions = Questionnaire(kind, [each.request for each in asked], record, Cell, stop_ids(checkpoint, tokenizer), described)
    answers, journals = put_to_all(checkpoint, engine, variants, questions, batch)
    cells = tuple(NeedleVariant(variant=each.variant, engine=each.engine, cells=each.records) for each in answers)
    result = NeedleResult(subject=subject, model=source.path.resolve().name, grid=description, variants=cells)
    save(result, questions.result_path(checkpoint, answers[0].engine.engine))
    for journal in journals:
        journal.discard()
    return result


def build_grid(grid: NeedleGrid, prompter: Prompter) -> tuple[list[Asked], dict[str, Any]]:
    """All prompts of a grid, the shortest first, and the description that stands in the result."""
    sets = grid.needle_sets()
    haystack = read_haystack(grid.haystack, prompter, max(grid.lengths), seed=grid.seed, repeat=grid.repeat_haystack)
    asked = [
        _ask(sets[language], task, language, length, depth, number, grid.seed, haystack, prompter)
        for length, task, language, depth, number in product(
            sorted(grid.lengths), grid.tasks, sets, sorted(grid.depths), range(grid.needles_per_cell)
        )
    ]
    return asked, {
        "lengths": sorted(grid.lengths),
        "depths": sorted(grid.depths),
        "needles_per_cell": grid.needles_per_cell,
        "tasks": list(grid.tasks),
        "languages": list(sets),
        "needle_sets": {language: needles.digest() for language, needles in sets.items()},
        "haystack": haystack.describe(),
        "repeat_haystack": grid.repeat_haystack,
        "seed": grid.seed,
        "form": prompter.form,
        "prompts": digest_of([each.request for each in asked]),
    }


def _ask(
    needles: NeedleSet, task: str, language: str, length: int, depth: float, number: int, seed: int, haystack: Haystack, prompter: Prompter
) -> Asked:
    """One question. It depends on its own place in the grid only: another grid with this cell asks the same."""
    cell_seed = _derived(seed, task, language, length, depth, number)
    order = np.random.default_rng(_derived(seed, task, language, length, depth)).permutation(len(needles.needles))
    generator = np.random.default_rng(cell_seed)
    question = make_question(task, needles, depth, number, generator, order)
    words = needles.templates
    task_text = f"{question.question} {words.reply}"

    def render(text: str) -> list[int]:
        message = f"{words.instruction}\n\n{text}\n\n{task_text}"
        return prompter.encode(message, f"{words.instruction}\n\n{text}\n\n{words.question_label}: {task_text}\n{words.answer_label}:")

    placed = place(haystack, question.hidden, render, length, prompter, generator)
    for answer in (*question.expected, *question.forbidden):
        if contains(placed.bare, answer):
            raise UsageError(f"the answer {answer!r} of needle {question.needle!r} stands in the haystack {haystack.data} itself: use another")
    request = Request(np.array(placed.tokens, dtype=np.int32), MAX_NEW_TOKENS[task])
    return Asked(task, language, length, depth, cell_seed, question, request)


def _derived(*parts: Any) -> int:
    """A seed of 32 bits from anything JSON-able."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "little")
