"""Options → corpus: open the sources, share the rows out, number the documents."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import sha256_bytes
from calibrate.corpus.encode import Encoder, tokenizer_digest
from calibrate.corpus.options import CorpusOptions, SourceSpec, check_options, load_mix
from calibrate.corpus.sources import Setting, Source, is_mix, open_source
from calibrate.corpus.types import Corpus, Rows, Sample
from calibrate.errors import UsageError
from calibrate.progress import note
from calibrate.resources import resource

_DEFAULT_MIX = "default.yaml"


def load_corpus(options: CorpusOptions, tokenizer: Any, *, vocab_size: int, context_length: int | None) -> Corpus:
    """Draw and tokenize the rows that `options` asks for. The same input gives the same corpus, bit for bit.

    vocab_size: the model's, every token id is below it. context_length: the model's, None where it has no limit.

    Fewer rows than asked for are a note on stderr and stand in the description.

    Raises:
        UsageError: options that cannot be met, a source that is missing, unreadable, malformed or empty, text that is shorter than one
            sequence, or a tokenizer that is not the model's. One line with the place; nothing is written in any case.
    """
    check_options(options, context_length)
    specs, base, about = _specs(options)
    setting = Setting(
        encoder=Encoder(tokenizer, vocab_size),
        special_ids=list(tokenizer.all_special_ids),
        vocab_size=vocab_size,
        samples=options.samples,
        sequence_length=options.sequence_length,
        split=options.split,
    )
    sources = [open_source(spec, base, setting, [options.seed, index]) for index, spec in enumerate(specs)]
    taken = share_out(sources, specs, options.samples)
    _check_length(sources, specs, options.sequence_length)
    samples = number(interleave(taken, options.seed))
    if len(samples) < options.samples:
        note(f"corpus: {len(samples)} rows, fewer than the {options.samples} asked for: there is no more text")
    description = {
        "data": _shown(options.data or "default"),
        "description": about,
        "sources": [_describe(*each) for each in zip(specs, sources, taken, strict=True)],
        "samples": len(samples),
        "samples_asked": options.samples,
        "tokens": sum(len(sample.tokens) for sample in samples),
        "documents": sum(len(documents) for documents in taken),
        "sequence_length": options.sequence_length,
        "seed": options.seed,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    return Corpus(samples, description["documents"], corpus_digest(samples), description)


def _specs(options: CorpusOptions) -> tuple[tuple[SourceSpec, ...], Path | None, str | None]:
    """The sources, where their relative paths start, and the mix's own words."""
    columns = {"text_column": options.text_column, "chat_column": options.chat_column}
    if options.data is not None and not is_mix(options.data):
        return (SourceSpec(data=options.data, weight=1.0, **columns),), None, None
    path = _mix_path(options.data)
    mix = load_mix(path)
    for spec in mix.sources:
        if is_mix(spec.data):
            raise UsageError(f"{path} names the mix {spec.data}: a mix holds sources, not mixes; list its sources instead")
        if spec.text_column is not None and spec.chat_column is not None:
            raise UsageError(f"{path}: source {spec.data} has both text_column and chat_column: give one")
    named = tuple(spec if spec.text_column or spec.chat_column else spec.model_copy(update=columns) for spec in mix.sources)
    return named, path.parent, mix.description


def _mix_path(data: str | None) -> Path:
    """The mix file: the default, the user's, or for a bare name without such a file a shipped one."""
    if data is None:
        return resource("data", _DEFAULT_MIX)
    path = Path(data)
    if path.name != data or path.exists():
        return path
    shipped = sorted(entry.name for entry in resource("data").glob("*.yaml"))
    if data not in shipped:
        raise UsageError(f"no such file: {data}, and no mix of this name is shipped; shipped are: {', '.join(shipped)}")
    return resource("data", data)


def apportion(rows: int, weights: list[float]) -> list[int]:
    """Whole shares of `rows` in proportion to `weights`, by largest remainder; equal remainders go to the earlier source."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [rows * weight / sum(exact) for weight in exact]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (shares[index] - quotas[index], index))
    for index in by_remainder[: rows - sum(shares)]:
        shares[index] += 1
    return shares


def share_out(sources: list[Source], specs: tuple[SourceSpec, ...], rows: int) -> list[list[Rows]]:
    """The documents of each source, by weight; what a source lacks of its share comes from those that have more, with a note."""
    shares = wanted = apportion(rows, [spec.weight for spec in specs])
    more = list(range(len(sources)))  # those that have given all they were asked for so far
    while True:
        taken = [source.take(want) for source, want in zip(sources, wanted, strict=True)]
        counts = [_rows(documents) for documents in taken]
        more = [index for index in more if counts[index] == wanted[index]]
        missing = rows - sum(counts)
        if not missing or not more:
            break
        extra = dict(zip(more, apportion(missing, [specs[index].weight for index in more]), strict=True))
        wanted = [count + extra.get(index, 0) for index, count in enumerate(counts)]
    for spec, share, count in zip(specs, shares, counts, strict=True):
        if count < share and len(specs) > 1:
            note(f"corpus: {spec.data} has {count} rows, fewer than its share of {share}: the other sources fill in as far as they can")
    return taken


def _rows(documents: list[Rows]) -> int:
    return sum(len(document.chunks) for document in documents)


def _check_length(sources: list[Source], specs: tuple[SourceSpec, ...], sequence_length: int) -> None:
    total = 0
    for source, spec in zip(sources, specs, strict=True):
        if not source.count_tokens(1):
            raise UsageError(f"{spec.data} holds no text: every document in it is empty")
        total += source.count_tokens(sequence_length - total) if total < sequence_length else 0
    if total < sequence_length:
        raise UsageError(f"corpus has {total} tokens, shorter than one sequence of {sequence_length}: give more text or a lower --sequence-length")


def interleave(taken: list[list[Rows]], seed: int) -> list[Rows]:
    """The documents of all sources in a seeded order, so that every quarter of them holds every source; one source keeps its own order."""
    documents = [document for each in taken for document in each]
    if len(taken) == 1:
        return documents
    order = np.random.Generator(np.random.PCG64([seed, len(taken)])).permutation(len(documents))
    return [documents[index] for index in order]


def number(documents: list[Rows]) -> tuple[Sample, ...]:
    """Samples with their document's index: first chunks of all documents, then second chunks, and so on."""
    order = sorted((place, index) for index, document in enumerate(documents) for place in range(len(document.chunks)))
    return tuple(Sample(documents[index].chunks[place], index, documents[index].source) for place, index in order)


def corpus_digest(samples: tuple[Sample, ...]) -> str:
    """Hex SHA-256 over tokens (int32), lengths (int64) and document indices (int64), little-endian."""
    tokens = np.concatenate([sample.tokens for sample in samples]).astype("<i4")
    lengths = np.array([len(sample.tokens) for sample in samples], dtype="<i8")
    documents = np.array([sample.document for sample in samples], dtype="<i8")
    return sha256_bytes(tokens.tobytes(), lengths.tobytes(), documents.tobytes())


def _describe(spec: SourceSpec, source: Source, documents: list[Rows]) -> dict:
    return {"data": _shown(spec.data), "weight": spec.weight, "documents": len(documents), "rows": _rows(documents), **source.describe()}


def _shown(data: str) -> str:
    """A source's name for provenance, which is published with the checkpoint: of a local path only the last part."""
    path = Path(data).expanduser()
    return path.resolve().name if path.exists() else data
