"""Formats that rotate keys, before and after `fold --fold smooth`: KL of each against the same weights' own 16-bit cache, row by row.

Prediction, written before the first run: int4_per_token_head and TurboQuant's 4-bit and 3-bit keys lose a quarter to two thirds of their KL on
SmolLM2 and half to three quarters on Qwen2.5-Coder, whose keys have large biases. The factors, not rounded to powers of two, gave 0.25, 0.32 and
0.51 of the KL there; rounding them costs less than a tenth of that. FP8's KL stays to the digits shown, since E4M3's relative error repeats with
every factor of two. The 16-bit scores stay to the bit.

    python -m benchmarks.lowbit_smooth MODEL [--format int4_per_token_head --format fp8_e4m3] [--rows 4] [--folded FOLDER]

Without a folder that was folded before, the model is folded in memory, on the built-in text, which the rows of code are no part of.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from calibrate.corpus import Corpus, CorpusOptions, load_corpus
from calibrate.engines.session import TokenScores, Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.evaluate.fidelity import kl_lower_bound
from calibrate.fold import Fold
from calibrate.fold.apply import fold_model
from calibrate.fold.job import chosen_folds
from calibrate.fold.parts import parts_of
from calibrate.fold.sample import chosen_rows
from calibrate.lowbit import make_format
from calibrate.model import SourceCheckpoint, cache_dtype_of, load_tokenizer
from calibrate.statistics import CACHE_DTYPES

FORMATS = ("int4_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc", "fp8_e4m3")


def corpus_of(source: SourceCheckpoint, **options) -> Corpus:
    return load_corpus(CorpusOptions(**options), load_tokenizer(source), vocab_size=source.vocab_size, context_length=source.context_length)


def fold_in_memory(engine: TransformersEngine) -> float:
    """Fold the engine's model. Returns the predicted noise in logits of all layers as a share of what it was."""
    source = engine.source
    parts = parts_of(engine.model, engine.layout, ("smooth",))
    rows = chosen_rows(corpus_of(source))
    chosen = chosen_folds(engine.model, engine.layout, parts, rows, CACHE_DTYPES[cache_dtype_of(source)].dtype, ("smooth",))
    fold_model(engine.model, Fold(("smooth",), tuple(layer for layer, _ in chosen), source.fingerprint), parts)
    before, after = (sum(side["k"] for side in sides) for sides in zip(*((each.before, each.after) for _, each in chosen), strict=True))
    return after / before


def measured(engine: TransformersEngine, corpus: Corpus, formats: list[str]) -> tuple[list[TokenScores], dict[str, list[float]]]:
    """Scores with a 16-bit cache, and each format's mean KL against them by row."""

    def scores(name: str | None) -> list[TokenScores]:
        with engine.session(Variant(name or "16-bit", None, make_format(name) if name else None)) as session:
            return session.score([sample.tokens for sample in corpus.samples])

    reference = scores(None)
    return reference, {name: [float(kl_lower_bound(a, b).mean()) for a, b in zip(reference, scores(name), strict=True)] for name in formats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--format", action="append", help=f"{', '.join(FORMATS)} by default")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--folded", type=Path, help="the same model, folded before")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    source, formats = SourceCheckpoint.open(given.model), given.format or list(FORMATS)
    corpus = corpus_of(source, data="builtin:code", samples=given.rows, sequence_length=given.length)
    engine = TransformersEngine(source, block=128)
    reference, before = measured(engine, corpus, formats)
    if given.folded:
        engine.release()
        engine = TransformersEngine(SourceCheckpoint.open(given.folded), block=128)
    else:
        print(f"predicted noise in logits: {fold_in_memory(engine):.3f} of what it was", flush=True)
    again, after = measured(engine, corpus, formats)
    moved = max(float(np.abs(a.logprob - b.logprob).max()) for a, b in zip(reference, again, strict=True))
    print(f"largest change of log p with a 16-bit cache, {engine.model.dtype} arithmetic: {moved:g}")
    for name in formats:
        for when, rows in (("before", before[name]), ("after", after[name])):
            print(f"{name:24} {when:6} KL {np.mean(rows):.4f}  by row: {' '.join(f'{value:.4f}' for value in rows)}")
    if given.json:
        found = {"model": given.model.name, "torch": torch.__version__, "moved": moved, "before": before, "after": after}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
