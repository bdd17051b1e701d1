"""Does a layer's sensitivity, as KVarN tables give it, foretell what quantizing that layer alone costs? One KL a layer, and their rank correlation.

Prediction, written before the first run: Spearman above 0.5 at 2 bits, since noise in logits is what K's error does; the first layer stands out.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.evaluate.fidelity import fidelity
from calibrate.kvarn.solve import variance_tables
from calibrate.lowbit import make_format
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.progress import meter
from calibrate.statistics import Statistics


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("statistics", type=Path, help="collected with --kvarn")
    parser.add_argument("--format", default="kvarn_k2v2_g128")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    source = SourceCheckpoint.open(given.model)
    tables = variance_tables(Statistics.load(given.statistics))
    options = CorpusOptions(data="builtin:code", samples=given.rows, sequence_length=given.length)
    corpus = load_corpus(options, load_tokenizer(source), vocab_size=source.vocab_size, context_length=source.context_length)
    rows, documents = [sample.tokens for sample in corpus.samples], [sample.document for sample in corpus.samples]
    engine = TransformersEngine(source)
    fmt = make_format(given.format)
    with engine.session(Variant("16-bit", None)) as session:
        reference = session.score(rows)
    found = []
    layers = [layer.index for layer in tables.layers]
    with meter("layers", len(layers)) as progress:
        for index in layers:
            with engine.session(Variant(fmt.name, None, fmt)) as session:
                session._placement.whole &= {index}  # every other layer stays in 16 bits
                session._placement.passing &= {index}
                each = fidelity(fmt.name, session.info(), session.score(rows), reference, documents, resamples=200)
            kl = each.kl_mean.model_dump()
            found.append({"layer": index, "sensitivity": tables[index].sensitivity} | kl)
            progress.advance(1)
    correlation = spearman(np.array([row["sensitivity"] for row in found]), np.array([row["value"] for row in found]))
    for row in sorted(found, key=lambda row: -row["value"]):
        print(f"layer {row['layer']:3}  sensitivity {row['sensitivity']:7.3f}  KL {row['value']:.6f} ({row['low']:.6f} – {row['high']:.6f})")
    print(f"{given.format}, {sum(len(row) for row in rows):,} tokens: Spearman correlation of sensitivity and KL {correlation:.2f}")
    if given.json:
        result = {"model": given.model.name, "format": given.format, "torch": torch.__version__, "spearman": correlation, "layers": found}
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
