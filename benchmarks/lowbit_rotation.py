"""KVarN with its keys rotated, as published, not rotated, and in the bases of its tables: KL of each preset against the 16-bit cache, row by row.

Prediction, written before the first run: rotation helps, since it evens out what varies between channels. Of the bases, before theirs: KL follows the
square of the noise that the tables tell, so that smooth leaves 0.6 and balanced 0.4 of it on SmolLM2, and on Qwen2.5-Coder less than a tenth.

    python benchmarks/lowbit_rotation.py MODEL [--statistics FILE] [--preset 4,4 --preset 2,2] [--rows 4]
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.evaluate.fidelity import kl_lower_bound
from calibrate.kvarn.solve import variance_tables
from calibrate.kvarn.tile import QuantizedTile, quantize
from calibrate.lowbit.kvarn import KVarN, Static, kvarn
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class KeysAsTheyAre(KVarN):
    """KVarN whose keys are balanced and rounded unrotated."""

    def encode(self, tile: torch.Tensor, kind: str, static: Static | None) -> QuantizedTile:
        return super().encode(tile, kind, static) if kind == "v" else quantize(tile.unflatten(-2, (-1, self.group)).mT, self.key_bits)

    def decode(self, stored: QuantizedTile, kind: str, static: Static | None) -> torch.Tensor:
        return super().decode(stored, kind, static) if kind == "v" else stored.dequantize().mT.flatten(-3, -2)


def unrotated(published: KVarN) -> KeysAsTheyAre:
    return KeysAsTheyAre(**{each.name: getattr(published, each.name) for each in fields(published) if each.init})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--statistics", type=Path, help="collected with --kvarn: the bases of their tables too")
    parser.add_argument("--preset", action="append", help="bits of keys and values; 4,4 and 2,2 by default")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    source = SourceCheckpoint.open(given.model)
    options = CorpusOptions(data="builtin:code", samples=given.rows, sequence_length=given.length)
    corpus = load_corpus(options, load_tokenizer(source), vocab_size=source.vocab_size, context_length=source.context_length)
    engine = TransformersEngine(source, block=128)

    def scores(store: KVarN | None) -> list:
        with engine.session(Variant("16-bit" if store is None else store.name, None, store)) as session:
            return session.score([sample.tokens for sample in corpus.samples])

    tables = None if given.statistics is None else variance_tables(Statistics.load(given.statistics))
    uses = () if tables is None else ("smooth", "balanced", *(("layers",) if tables.sixteen_bit_layers else ()))
    reference, found = scores(None), {}
    for preset in given.preset or ["4,4", "2,2"]:
        setting = (*(int(bits) for bits in preset.split(",")), given.group)
        published = kvarn(*setting)
        stores = {published.name: published, f"{published.name}, keys as they are": unrotated(published)}
        stores |= {store.name: store for store in (kvarn(*setting, use, tables) for use in uses)}
        for name, store in stores.items():
            found[name] = [float(kl_lower_bound(one, other).mean()) for one, other in zip(reference, scores(store), strict=True)]
            print(f"{name:34} KL {np.mean(found[name]):.4f}  by row: {' '.join(f'{value:.4f}' for value in found[name])}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"model": given.model.name, "torch": torch.__version__, "kl": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
