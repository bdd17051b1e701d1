"""What the user may ask of a corpus, and the schema of a mix file."""

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibrate.errors import UsageError


class CorpusOptions(BaseModel):
    """Where the text comes from and how much of it is taken. Values are checked by `load_corpus`, whose errors are one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str | None = None
    samples: int = 64
    sequence_length: int = 1024
    seed: int = 0
    text_column: str | None = None
    chat_column: str | None = None
    split: str = "train"


class SourceSpec(BaseModel):
    """One source of a mix: `data` as on the command line, and its share of the rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    weight: float = Field(gt=0, allow_inf_nan=False)
    text_column: str | None = None
    chat_column: str | None = None
    split: str | None = None


class Mix(BaseModel):
    """A file `data/*.yaml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str
    sources: tuple[SourceSpec, ...] = Field(min_length=1)


def load_mix(path: Path) -> Mix:
    """Read a mix file.

    Raises:
        UsageError: unreadable, not UTF-8, not YAML, or not of the schema; the message names the file and the key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist is a ValueError of its own
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{where} is not YAML: {getattr(error, 'problem', None) or error}") from error
    try:
        return Mix.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path} is not a corpus mix: {key}: {first['msg']} (see docs/corpora.md)") from error


def check_options(options: CorpusOptions, context_length: int | None) -> None:
    """Raise UsageError for numbers that no corpus can satisfy, before anything is read."""
    for name in ("samples", "sequence_length"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    if options.seed < 0:
        raise UsageError(f"--seed is {options.seed}: it must not be negative")
    if context_length is not None and options.sequence_length > context_length:
        raise UsageError(
            f"--sequence-length {options.sequence_length} is more than the model's context of {context_length} tokens: give at most that"
        )
    if options.text_column is not None and options.chat_column is not None:
        raise UsageError(f"both a text column ({options.text_column}) and a chat column ({options.chat_column}) are given: give one")
