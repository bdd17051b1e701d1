"""Needle sets: facts to hide in a long text, with their questions and answers, as YAML (docs/needles.md); and when an output holds an answer."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from string import Formatter

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from calibrate.artefact import sha256_bytes
from calibrate.errors import UsageError
from calibrate.resources import resource

_FOLDER = "needles"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Needle(_Strict):
    """One fact. All of `answers` must occur in an output."""

    id: str = Field(min_length=1)
    statement: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answers: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _answerable(self) -> "Needle":
        if not all(answer.strip() and contains(self.statement, answer) for answer in self.answers):
            raise ValueError(f"needle {self.id}: an answer does not stand in its statement")
        if any(contains(self.question, answer) for answer in self.answers):
            raise ValueError(f"needle {self.id}: its question gives an answer away")
        return self


class Pair(_Strict):
    """A statement and its question, with fields to fill in."""

    statement: str
    question: str


class Chain(_Strict):
    """Assignments: the head gives a value, a link passes it on."""

    head: str
    link: str
    question: str


class Templates(_Strict):
    """The words around needles, and the forms of the synthetic tasks, in the set's language."""

    instruction: str
    reply: str
    question_label: str
    answer_label: str
    key: str
    multi_key: Pair
    multi_value: Pair
    variable_tracking: Chain
    adjectives: tuple[str, ...] = Field(min_length=4)
    nouns: tuple[str, ...] = Field(min_length=4)

    @model_validator(mode="after")
    def _fields(self) -> "Templates":
        wanted = {
            "key": (self.key, {"adjective", "noun"}),
            "multi_key.statement": (self.multi_key.statement, {"key", "value"}),
            "multi_key.question": (self.multi_key.question, {"key"}),
            "multi_value.statement": (self.multi_value.statement, {"key", "value"}),
            "multi_value.question": (self.multi_value.question, {"key", "count"}),
            "variable_tracking.head": (self.variable_tracking.head, {"name", "value"}),
            "variable_tracking.link": (self.variable_tracking.link, {"name", "source"}),
            "variable_tracking.question": (self.variable_tracking.question, {"value", "count"}),
        }
        for name, (text, fields) in wanted.items():
            found = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
            if found != fields:
                raise ValueError(f"{name} must use exactly {', '.join(f'{{{field}}}' for field in sorted(fields))}")
        return self


class NeedleSet(_Strict):
    """A file of `data/needles/`, or the user's."""

    language: str = Field(min_length=1)
    description: str
    templates: Templates
    needles: tuple[Needle, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> "NeedleSet":
        ids = [needle.id for needle in self.needles]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two needles have the id {twice}")
        return self

    def digest(self) -> str:
        """Hex SHA-256 over its content."""
        return sha256_bytes(self.model_dump_json().encode())


def shipped_languages() -> list[str]:
    """Languages of the shipped needle sets."""
    return sorted(path.stem for path in (resource("data") / _FOLDER).glob("*.yaml"))


def shipped_needles(language: str) -> NeedleSet:
    """The shipped set of a language. Raises UsageError where there is none."""
    if language not in shipped_languages():
        raise UsageError(f"no needles in {language!r} are shipped; there are: {', '.join(shipped_languages())} (or give --needle-file)")
    return load_needles(resource("data") / _FOLDER / f"{language}.yaml")


def load_needles(path: Path) -> NeedleSet:
    """Read a needle file.

    Raises:
        UsageError: unreadable, not YAML, or not of the schema; the message names the file and the key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist is a ValueError of its own
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return NeedleSet.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path} is not a needle set: {where}: {first['msg']} (see docs/needles.md)") from error


def normal(text: str) -> str:
    """Text as it is compared: Unicode NFKC, case folded, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def contains(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text`, whole: a number not inside a longer number, a Latin word not inside a longer word.

    Chinese writes no borders between words, so there any occurrence counts.
    """
    wanted = normal(answer)
    before = r"(?<![a-z0-9_])(?<!\d[.,])" if re.match(r"[a-z0-9]", wanted) else ""
    after = r"(?![a-z0-9_])(?![.,]\d)" if re.search(r"[a-z0-9]$", wanted) else ""
    return re.search(before + re.escape(wanted) + after, normal(text)) is not None


def found(output: str, expected: Sequence[str], forbidden: Sequence[str] = ()) -> bool:
    """Whether an output holds every expected answer and none of the wrong ones that stand in the same text."""
    return all(contains(output, answer) for answer in expected) and not any(contains(output, answer) for answer in forbidden)
