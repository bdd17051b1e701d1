"""Problems of several steps: seeded ones and the user's own, the same prompts for every variant of the cache."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.corpus.files import LocalFile, read_rows
from calibrate.engines.session import Engine, Variant
from calibrate.errors import UsageError
from calibrate.evaluate.asking import Questionnaire, Request, digest_of, put_to_all
from calibrate.evaluate.evidence import subject_of
from calibrate.evaluate.needles import normal
from calibrate.evaluate.prompts import Prompter, stop_ids
from calibrate.evaluate.reasoning_tasks import LEVELS, TASKS, Posed, pose
from calibrate.evaluate.results import Problem, ReasoningResult, ReasoningVariant, save
from calibrate.model import SourceCheckpoint, load_tokenizer

KIND = "reasoning"
SHOTS = 3
_INSTRUCTION = "Solve the problem step by step. Then write the result alone on a last line that begins with 'Answer:'."
_ANSWER = re.compile(r"answer\s*:\s*(.*)", re.IGNORECASE)
_DRESS = "*_`$ \t\"'.。"  # what models put round an answer


@dataclass(frozen=True)
class ReasoningPlan:
    """What is asked.

    Attributes:
        tasks, levels: seeded problems (docs/reasoning.md); no tasks where only the user's problems are wanted.
        problems: of each task and level.
        files: the user's own, JSONL of {prompt, answer}.
        max_new_tokens: length of a solution at most.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    levels: tuple[int, ...] = LEVELS
    problems: int = 8
    files: tuple[Path, ...] = ()
    seed: int = 0
    max_new_tokens: int = 256

    def check(self) -> None:
        """Raise UsageError for an empty plan or impossible values."""
        if not self.files and (not self.tasks or not self.levels or self.problems < 1):
            raise UsageError("no reasoning problems: give tasks, levels and at least one problem each, or a --problem-file")
        for name, values, known in (("task", self.tasks, tuple(TASKS)), ("level", self.levels, LEVELS)):
            wrong = next((value for value in values if value not in known), None)
            if wrong is not None or len(set(values)) < len(values):
                raise UsageError(f"each reasoning {name} once, of {', '.join(map(str, known))}: {', '.join(map(str, values))}")
        if self.seed < 0 or self.max_new_tokens < 1:
            raise UsageError(f"seed {self.seed} must not be negative, and an answer of {self.max_new_tokens} tokens must have at least 1")


@dataclass(frozen=True)
class Asked:
    """A problem before anybody answered."""

    task: str
    number: int
    answer: str
    request: Request

    def problem(self, output: str) -> Problem:
        said = extract(output)
        return Problem(task=self.task, number=self.number, expected=self.answer, output=output, correct=said is not None and same(said, self.answer))


def extract(output: str) -> str | None:
    """The answer that an output gives: what follows the last "Answer:" on its line, without the marks that dress it; None where there is none.

    A model without chat template goes on to invent further problems: what follows a line "Problem:" does not count.
    """
    own = re.split(r"^\s*problem\s*:", output, maxsplit=1, flags=re.IGNORECASE | re.MULTILINE)[0]
    said = _ANSWER.findall(own)
    answer = said[-1].strip(_DRESS) if said else ""
    return answer or None


def same(said: str, expected: str) -> bool:
    """Equal as text (Unicode NFKC, any case), or as numbers: 1,200 is 1200.0. "12 apples" is not 12."""
    if normal(said) == normal(expected):
        return True
    numbers = [_number(said), _number(expected)]
    return None not in numbers and numbers[0] == numbers[1]


def _number(text: str) -> Decimal | None:
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", normal(text))
    try:
        return Decimal(plain) if re.fullmatch(r"[+-]?\d+(\.\d+)?", plain) else None
    except InvalidOperation:
        return None


def run_reasoning(
    checkpoint: Path, engine: Engine, variants: Sequence[Variant], plan: ReasoningPlan, *, batch: int = 1, trust: bool = False, kind: str = KIND
) -> ReasoningResult:
    """Put the plan's problems to every variant, greedily, and write `kv_calibration/evidence/<kind>-<engine>.json` into the checkpoint.

    A run that was killed goes on where it was when it is started again with the same arguments.

    Args:
        batch: prompts a call of the engine. trust: run the Python code that the checkpoint brings. kind: what the result is called.

    Raises:
        UsageError: an empty plan, a problem file that cannot be used, a problem longer than the context, or no calibrated checkpoint.
    """
    subject = subject_of(checkpoint)
    plan.check()
    source = SourceCheckpoint.open(checkpoint, trust_remote_code=trust)
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    prompter = Prompter(tokenizer)
    asked, description = build_problems(plan, prompter, source.context_length)

    def record(number: int, tokens: list[int]) -> Problem:
        return asked[number].problem(prompter.decode(tokens))

    described = {"subject": subject.model_dump(), **description}
    questions = Questionnaire(kind, [each.request for each in asked], record, Problem, stop_ids(checkpoint, tokenizer), described)
    answers, journals = put_to_all(checkpoint, engine, variants, questions, batch)
    solved = tuple(ReasoningVariant(variant=each.variant, engine=each.engine, problems=each.records) for each in answers)
    result = ReasoningResult(subject=subject, model=source.path.resolve().name, tasks=description, variants=solved)
    save(result, questions.result_path(checkpoint, answers[0].engine.engine))
    for journal in journals:
        journal.discard()
    return result


def longest_problem(source: SourceCheckpoint, plan: ReasoningPlan, *, trust: bool = False) -> int:
    """Tokens of the longest prompt with its answer. Raises UsageError as `run_reasoning`."""
    asked, _ = build_problems(plan, Prompter(load_tokenizer(source, trust_remote_code=trust)), source.context_length)
    return max(each.request.cost for each in asked)


def build_problems(plan: ReasoningPlan, prompter: Prompter, context: int | None) -> tuple[list[Asked], dict[str, Any]]:
    """All problems with their prompts, and the description that stands in the result."""
    posed = [
        (f"{task}-{level}", number, pose(task, level, _generator(plan.seed, task, level, number)), _shots(task))
        for task, level, number in product(plan.tasks, plan.levels, range(plan.problems))
    ]
    names = [path.stem for path in plan.files]
    twice = next((name for name in names if names.count(name) > 1 or any(name == task for task, *_ in posed)), None)
    if twice is not None:
        raise UsageError(f"two sets of problems are called {twice}: rename a --problem-file")
    posed += [(path.stem, number, problem, []) for path in plan.files for number, problem in read_problems(path)]
    asked = [_ask(task, number, problem, shots, prompter, plan.max_new_tokens) for task, number, problem, shots in posed]
    for each in asked:
        if context is not None and each.request.cost > context:
            raise UsageError(
                f"problem {each.number} of {each.task} takes {each.request.cost:,} tokens with its answer, more than the context of {context:,}"
            )
    return asked, {
        "tasks": list(plan.tasks),
        "levels": list(plan.levels),
        "problems": plan.problems,
        "files": names,
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
        "form": prompter.form,
        "prompts": digest_of([each.request for each in asked]),
    }


def read_problems(path: Path) -> list[tuple[int, Posed]]:
    """The user's problems with their lines. Raises UsageError with the line for anything but {prompt, answer}."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    file = LocalFile(path, path.name)
    if file.kind not in (".jsonl", ".ndjson"):
        raise UsageError(f"{path} is no JSONL file (.jsonl, also compressed) of {{prompt, answer}}")
    found = []
    for line, row in read_rows(file):
        if not isinstance(row, dict) or set(row) != {"prompt", "answer"}:
            raise UsageError(f"{path}:{line}: a problem is an object with exactly prompt and answer")
        prompt, answer = row["prompt"], row["answer"]
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = json.dumps(answer)
        if not all(isinstance(text, str) and text.strip() for text in (prompt, answer)):
            raise UsageError(f"{path}:{line}: prompt must be text, and answer text or a number, neither of them empty")
        found.append((line, Posed(prompt.strip(), "", answer.strip())))
    if not found:
        raise UsageError(f"{path} holds no problems")
    return found


def _ask(task: str, number: int, problem: Posed, shots: list[Posed], prompter: Prompter, max_new_tokens: int) -> Asked:
    examples = "".join(f"Problem: {each.text}\nSolution: {each.working}\nAnswer: {each.answer}\n\n" for each in shots)
    text = f"{_INSTRUCTION}\n\n{examples}Problem: {problem.text}"
    tokens = prompter.encode(text, f"{text}\nSolution:")
    return Asked(task, number, problem.answer, Request(np.array(tokens, dtype=np.int32), max_new_tokens))


def _shots(task: str) -> list[Posed]:
    """Worked examples of a task, the same for every problem and seed, from draws that no problem uses."""
    return [pose(task, level, _generator("shot", task, level, 0)) for level in LEVELS[:SHOTS]]


def _generator(*parts: Any) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "little"))
