"""Puts the same prompts to every variant, resumably: what needles and reasoning have in common."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel

from calibrate.artefact import sha256_bytes
from calibrate.engines.session import Engine, EngineInfo, Session, Variant
from calibrate.errors import UsageError
from calibrate.evaluate.evidence import check_evidence_place
from calibrate.evaluate.journal import Journal
from calibrate.evaluate.results import FOLDER
from calibrate.progress import meter

Record = TypeVar("Record", bound=BaseModel)


@dataclass(frozen=True)
class Request:
    """A prompt, int32 [length], and how long its answer may be."""

    tokens: np.ndarray
    max_new_tokens: int

    @property
    def cost(self) -> int:
        return len(self.tokens) + self.max_new_tokens


@dataclass(frozen=True)
class Answers(Generic[Record]):
    """What a variant answered, one record a request."""

    variant: str
    engine: EngineInfo
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Questionnaire(Generic[Record]):
    """What is put to the variants.

    Attributes:
        kind: "niah" or "reasoning"; the result is `<kind>-<engine>.json`.
        requests: in the order in which they are put.
        record: number of the request and the tokens of its answer → a record of type `record_type`.
        stop_ids: tokens that end an answer.
        description: all else that fixes the records, JSON-able.
    """

    kind: str
    requests: Sequence[Request]
    record: Callable[[int, list[int]], Record]
    record_type: type[Record]
    stop_ids: Sequence[int]
    description: dict[str, Any]

    def result_path(self, checkpoint: Path, engine: str) -> Path:
        return checkpoint / FOLDER / f"{self.kind}-{engine}.json"


def digest_of(requests: Sequence[Request]) -> str:
    """Hex SHA-256 over all prompts and the lengths of their answers."""
    return sha256_bytes(*(each.max_new_tokens.to_bytes(4, "little") + each.tokens.astype("<i4").tobytes() for each in requests))


def put_to_all(
    checkpoint: Path, engine: Engine, variants: Sequence[Variant], questionnaire: Questionnaire[Record], batch: int
) -> tuple[list[Answers[Record]], list[Journal[Record]]]:
    """Answers of every variant, and the journals to discard once they are saved.

    batch: prompts that the engine is handed at once; so many at most are asked again after a kill.

    Raises:
        UsageError: no variants, two of one name, or a checkpoint that cannot be written to.
    """
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"variants must be some, each once: {', '.join(names) or 'none given'}")
    check_evidence_place(checkpoint)
    answers, journals = [], []
    for variant in variants:
        with engine.session(variant) as session:
            info = session.info()
            path = questionnaire.result_path(checkpoint, info.engine)
            journal = Journal(path, variant.name, _plan(questionnaire, variant, info), questionnaire.record_type)
            answers.append(Answers(variant.name, info, tuple(_put(session, questionnaire, journal, variant.name, batch))))
            journals.append(journal)
    return answers, journals


def _put(session: Session, questionnaire: Questionnaire[Record], journal: Journal[Record], name: str, batch: int) -> list[Record]:
    requests = questionnaire.requests
    records = journal.open()[: len(requests)]
    costs = [request.cost for request in requests]
    with meter(f"{questionnaire.kind} {name}", sum(costs), done=sum(costs[: len(records)])) as progress:
        for chunk in _chunks(range(len(records), len(requests)), requests, batch):
            prompts = [requests[number].tokens.tolist() for number in chunk]
            outputs = session.generate(prompts, requests[chunk[0]].max_new_tokens, questionnaire.stop_ids)
            new = [questionnaire.record(number, output) for number, output in zip(chunk, outputs, strict=True)]
            journal.add(new, chunk[0])
            records += new
            progress.advance(sum(costs[number] for number in chunk))
    return records


def _chunks(numbers: range, requests: Sequence[Request], batch: int) -> Iterator[list[int]]:
    """Runs of at most `batch` requests whose answers may be equally long."""
    chunk: list[int] = []
    for number in numbers:
        if chunk and (len(chunk) == batch or requests[number].max_new_tokens != requests[chunk[0]].max_new_tokens):
            yield chunk
            chunk = []
        chunk.append(number)
    if chunk:
        yield chunk


def _plan(questionnaire: Questionnaire[Record], variant: Variant, info: EngineInfo) -> str:
    cache = variant.digest()
    fixed = [questionnaire.kind, questionnaire.description, questionnaire.stop_ids, variant.name, cache, info.model_dump()]
    return sha256_bytes(json.dumps(fixed, sort_keys=True).encode())
