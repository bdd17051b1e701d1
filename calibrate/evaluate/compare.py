"""`kv-calibrate compare`: the calibrated cache against the 16-bit one, scale 1.0 and random-token scales, on text that no calibration saw."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from calibrate.artefact import read_header, read_tensors, sha256_bytes, write_tensors
from calibrate.checkpoint.write import FOLDER as RECORD
from calibrate.collect import collect, prepare
from calibrate.corpus import Corpus, CorpusOptions, load_corpus
from calibrate.engines.session import Engine, EngineInfo, TokenScores, Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import build_variants, checkpoint_scales, overlay
from calibrate.evaluate.evidence import check_evidence_place, subject_of
from calibrate.evaluate.fidelity import fidelity
from calibrate.evaluate.heldout import attention_errors, held_out, observe_documents
from calibrate.evaluate.results import FOLDER, CompareResult, Fidelity, HeldOut, save
from calibrate.model import SourceCheckpoint, cache_dtype_of, load_tokenizer
from calibrate.progress import meter, note
from calibrate.scales import Scales
from calibrate.statistics import CACHE_DTYPES, Statistics

EngineName = Literal["transformers", "vllm"]
_SCHEMA = "kv-calibrate/scores/1"
_ROWS_AT_ONCE = {"transformers": 8, "vllm": 64}


class CompareOptions(BaseModel):
    """What is compared, on what, and with what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineName = "transformers"
    data: str = Field("builtin:code", description="held-out text, as --data; of another kind than the default calibration text")
    samples: int = 16
    sequence_length: int = 512
    seed: int = 0
    text_column: str | None = None
    chat_column: str | None = None
    split: str = "train"
    random_samples: int = Field(2, ge=1, description="rows of random tokens for the random and old-formula baselines")
    random_length: int = Field(1024, ge=1)
    attention_rows: int = Field(4, ge=0, description="held-out rows on which the attention's output error is measured")
    device: str | None = None
    dtype: str | None = None
    block: int = Field(512, ge=1, description="tokens of a prefill step")
    quantize_queries: bool = True
    attention_backend: str | None = None
    tensor_parallel_size: int = Field(1, ge=1)
    timeout: float = Field(900.0, gt=0)
    trust_remote_code: bool = False

    def corpus(self) -> CorpusOptions:
        return CorpusOptions(**{name: getattr(self, name) for name in CorpusOptions.model_fields})


@dataclass(frozen=True)
class _Subjects:
    """All that is compared, what the model itself showed, and the digests of its weight files."""

    variants: tuple[Variant, ...]
    held_out: tuple[HeldOut, ...]
    weights: list[dict[str, Any]]


def evidence_path(checkpoint: Path, engine: EngineName) -> Path:
    """Where a comparison is kept: one file an engine, so that emulation and real kernels stand side by side."""
    return checkpoint / FOLDER / f"compare-{engine}.json"


def run_compare(checkpoint: Path, options: CompareOptions, extra: Mapping[str, Path] | None = None) -> CompareResult:
    """Compare, and keep the result in the checkpoint. A killed run that is started again with the same options goes on after the last
    variant that was finished.

    Args:
        extra: the user's variants, name → checkpoint folder or scales file.

    Raises:
        UsageError: no checkpoint of ours or one that cannot be written to, a corpus that cannot be used or that the scales were calibrated on, a
            variant with other layers.
        HostError: engine "vllm" on a host whose vLLM cannot run an FP8 cache.
    """
    source = SourceCheckpoint.open(checkpoint, trust_remote_code=options.trust_remote_code)
    subject, calibrated = subject_of(checkpoint), checkpoint_scales(source)
    if options.engine == "vllm":
        _check_vllm(source)
    check_evidence_place(checkpoint)
    corpus = scored_corpus(source, options, calibrated)
    local = TransformersEngine(
        source,
        device=options.device,
        dtype=options.dtype,
        block=options.block,
        quantize_queries=options.quantize_queries,
        trust_remote_code=options.trust_remote_code,
    )
    subjects = _look_inside(source, local, corpus, options, extra or {})
    path = evidence_path(checkpoint, options.engine)
    with _engine(source, local, options) as engine:
        fidelities, parts = score_all(engine, subjects.variants, corpus, path, score_plan(subjects.weights, corpus, options), options)
    result = CompareResult(
        subject=subject,
        model=checkpoint.resolve().name,
        corpus={"digest": corpus.digest, **corpus.description},
        number_format=calibrated.options.number_format,
        fidelity=fidelities,
        held_out=subjects.held_out,
    )
    save(result, path)
    for part in parts:
        part.unlink(missing_ok=True)
    return result


def scored_corpus(source: SourceCheckpoint, options: CompareOptions, calibrated: Scales) -> Corpus:
    """The rows to score. Raises UsageError where there is nothing to score in them, or where they are what the scales were calibrated on."""
    corpus = held_out_corpus(source, options, options.corpus())
    if all(len(sample.tokens) < 2 for sample in corpus.samples):
        raise UsageError("nothing to score: rows need at least 2 tokens, give a greater --sequence-length or longer text")
    if corpus.digest in {run["corpus"]["digest"] for run in calibrated.provenance}:
        raise UsageError(f"{options.data} with these options is the very text that was calibrated on: held-out text must be other text")
    return corpus


def held_out_corpus(source: SourceCheckpoint, options: CompareOptions, wanted: CorpusOptions) -> Corpus:
    """The rows of a source of text for this model."""
    tokenizer = load_tokenizer(source, trust_remote_code=options.trust_remote_code)
    return load_corpus(wanted, tokenizer, vocab_size=source.vocab_size, context_length=source.context_length)


def _look_inside(
    source: SourceCheckpoint, local: TransformersEngine, corpus: Corpus, options: CompareOptions, extra: Mapping[str, Path]
) -> _Subjects:
    """The variants (two need statistics of random tokens), and what each does to K, V, Q and attention on the held-out text."""
    length = min(options.random_length, source.context_length or options.random_length)
    tokens = CorpusOptions(data="random", samples=options.random_samples, sequence_length=length, seed=options.seed)
    random = collect(prepare(local.model, source, held_out_corpus(source, options, tokens)))
    variants = build_variants(source, checkpoint_scales(source), random, extra=extra)
    note(f"variants: {', '.join(each.name for each in variants)}; held-out ranges of {len(corpus.samples)} rows of {options.data}")
    observed, documents = observe_documents(prepare(local.model, source, corpus), variants)
    rows = [sample.tokens for sample in corpus.samples[: options.attention_rows]]
    cache_dtype = CACHE_DTYPES[cache_dtype_of(source)].dtype
    errors = attention_errors(local.model, local.layout, rows, variants, cache_dtype, seed=options.seed) if rows else None
    before = _calibration(source)
    rows_held_out = held_out(observed, variants, calibration=before, attention=errors, documents=documents, seed=options.seed)
    return _Subjects(variants, rows_held_out, observed.provenance[0]["model"]["weights"])


def _calibration(source: SourceCheckpoint) -> Statistics | None:
    path = source.path / RECORD / "statistics.safetensors"
    return Statistics.load(path) if path.is_file() else None


@contextmanager
def _engine(source: SourceCheckpoint, local: TransformersEngine, options: CompareOptions) -> Iterator[Engine]:
    if options.engine == "transformers":
        yield local
        return
    from calibrate.engines.vllm_engine import VllmEngine

    local.release()

    def linked(variant: Variant, folder: Path) -> Path:
        return overlay(source, variant, folder / quote(variant.name, safe=""))

    with tempfile.TemporaryDirectory(prefix=f".{source.path.resolve().name}.variants-", dir=source.path.resolve().parent) as folder:
        yield VllmEngine(
            source=source,
            folder=Path(folder),
            overlay=linked,
            attention_backend=options.attention_backend,
            tensor_parallel_size=options.tensor_parallel_size,
            max_model_len=options.sequence_length,
            max_num_batched_tokens=options.block,
            timeout=options.timeout,
        )


def _check_vllm(source: SourceCheckpoint) -> None:
    from calibrate.engines.host import check_runs_fp8, uses_cuda, vllm_distribution

    check_runs_fp8(source.config, uses_cuda(vllm_distribution()))


def score_all(
    engine: Engine, variants: Sequence[Variant], corpus: Corpus, path: Path, plan: dict[str, Any], options: CompareOptions
) -> tuple[tuple[Fidelity, ...], list[Path]]:
    """Score every row with every variant, the 16-bit cache first. Returns the figures, and the files to delete once those are safe.

    path: where the result will be; a variant's scores are kept beside it until then. plan: of `score_plan`.
    """
    rows = [sample.tokens for sample in corpus.samples if len(sample.tokens) > 1]
    documents = [sample.document for sample in corpus.samples if len(sample.tokens) > 1]
    files = {each.name: path.with_name(f".{path.stem}.{quote(each.name, safe='')}.safetensors") for each in variants}
    plans = {each.name: _digest(plan, each) for each in variants}
    ready = {name for name, file in files.items() if file.is_file() and _same(file, plans[name])}
    tokens = sum(len(row) for row in rows)
    if ready:
        note(f"resuming: {', '.join(sorted(ready))} are done")
    results: list[Fidelity] = []
    reference: list[TokenScores] = []
    with meter("comparing", tokens * len(variants), done=tokens * len(ready)) as progress:
        for variant in variants:
            if variant.name in ready:
                info, scores = _read_scores(files[variant.name])
            else:
                scores = []
                with engine.session(variant) as session:
                    info = session.info()
                    step = _ROWS_AT_ONCE[options.engine]
                    for start in range(0, len(rows), step):
                        chunk = rows[start : start + step]
                        scores += session.score(chunk)
                        progress.advance(sum(len(row) for row in chunk))
                _write_scores(files[variant.name], plans[variant.name], info, scores)
            reference = reference or scores
            results.append(fidelity(variant.name, info, scores, reference, documents, seed=options.seed))
    return tuple(results), list(files.values())


def score_plan(weights: Sequence[Mapping[str, Any]], corpus: Corpus, options: CompareOptions) -> dict[str, Any]:
    """All that fixes the scores of a variant, but for the variant."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    if options.engine == "vllm":
        from calibrate.engines.host import vllm_distribution

        versions["vllm"] = vllm_distribution()
    together = _ROWS_AT_ONCE[options.engine]  # moves rounding
    return {
        "weights": weights,
        "corpus": corpus.digest,
        "options": options.model_dump(exclude={"timeout"}),
        "versions": versions,
        "rows_at_once": together,
    }


def _digest(plan: dict[str, Any], variant: Variant) -> str:
    cache = variant.digest()
    return sha256_bytes(json.dumps([plan, variant.name, cache], sort_keys=True).encode())


def _same(file: Path, plan: str) -> bool:
    try:
        header = read_header(file)
    except UsageError as error:
        note(f"{error}: scored anew")
        return False
    return header.get("schema") == _SCHEMA and header.get("plan") == plan


def _write_scores(file: Path, plan: str, info: EngineInfo, scores: Sequence[TokenScores]) -> None:
    tensors = {name: np.concatenate([getattr(each, name) for each in scores]) for name in ("logprob", "top_ids", "top_logprobs")}
    tensors["lengths"] = np.array([len(each.logprob) for each in scores], dtype=np.int64)
    write_tensors(file, tensors, {"schema": _SCHEMA, "plan": plan, "info": info.model_dump()})


def _read_scores(file: Path) -> tuple[EngineInfo, list[TokenScores]]:
    tensors, header = read_tensors(file, _SCHEMA)
    ends = np.cumsum(tensors["lengths"])[:-1]
    parts = zip(*(np.split(tensors[name], ends) for name in ("logprob", "top_ids", "top_logprobs")), strict=True)
    return EngineInfo(**header["info"]), [TokenScores(*part) for part in parts]
