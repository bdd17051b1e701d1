"""What formats need beforehand: the checkpoint's scales, KVarN tables, and codebooks fitted to text that nothing is scored on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.checkpoint.kvarn_reference import read_tables
from calibrate.collect import collect, prepare
from calibrate.collect.watch import observe
from calibrate.corpus import Corpus
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import checkpoint_scales
from calibrate.kvarn import KVarNTables
from calibrate.kvarn.solve import variance_tables
from calibrate.lowbit import Codebooks, Offline, Samples, fit_codebooks, rope_frequencies
from calibrate.model import cache_dtype_of
from calibrate.progress import meter, note
from calibrate.scales import Scales
from calibrate.statistics import CACHE_DTYPES

CODEBOOK_BITS = 2
_CODEBOOK_TOKENS = 4096  # sixteen for each code of a book; the time to fit them grows with it


@dataclass(frozen=True)
class Prepared:
    """What was prepared, what of (for the result), and why something could not be."""

    offline: Offline
    description: dict[str, Any]
    faults: dict[str, str]

    def offline_for(self, name: str) -> Offline:
        """What a format is given: calibrated scales are of the checkpoint's number format alone, others run at scale 1.0."""
        scales = self.offline.scales
        fits = scales is not None and name == f"fp8_{scales.options.number_format}"
        return self.offline if fits else replace(self.offline, scales=None)


def prepare_offline(engine: TransformersEngine, checkpoint: Path, names: tuple[str, ...], text: Corpus, kept: Path) -> Prepared:
    """Prepare what the named formats need and nothing else.

    Args:
        text: what tables and codebooks are made of where the checkpoint brings none; other text than what is scored.
        kept: file that holds the codebooks from run to run.
    """
    scales = checkpoint_scales(engine.source)
    description: dict[str, Any] = {"text": {"digest": text.digest, **text.description}}
    faults: dict[str, str] = {}
    tables = codebooks = None
    reading = [name for name in names if "+" in name]
    if reading:
        try:
            tables = _of_the_checkpoint(checkpoint, scales)
            description["tables"] = "the checkpoint's" if tables is not None else "of the text above"
            tables = tables or _tables(engine, text)
        except UsageError as error:
            faults |= dict.fromkeys(reading, str(error))
    if "additive" in names:
        try:
            codebooks = _codebooks(engine, text, kept)
            description["codebooks"] = codebooks.digest()
        except UsageError as error:
            faults["additive"] = str(error)
    return Prepared(Offline(scales, tables, codebooks), description, faults)


def _of_the_checkpoint(checkpoint: Path, scales: Scales) -> KVarNTables | None:
    tables = read_tables(checkpoint)
    if tables is not None and tables.statistics_digest != scales.statistics_digest:
        raise UsageError(f"{checkpoint}: its KVarN tables are of other statistics than its scales, perhaps of another model: write it again")
    return tables


def _tables(engine: TransformersEngine, text: Corpus) -> KVarNTables:
    note("the checkpoint brings no KVarN tables: they are made now (calibrate with --kvarn to keep them)")
    return variance_tables(collect(prepare(engine.model, engine.source, text, second_moments=True)))


def _codebooks(engine: TransformersEngine, text: Corpus, kept: Path) -> Codebooks:
    origin = {"text": text.digest, "model": engine.source.fingerprint, "tokens_at_most": _CODEBOOK_TOKENS}
    found = _kept(kept)
    if found is not None and {name: found.origin.get(name) for name in origin} == origin:
        return found
    samples = _samples(engine, text)
    note(f"fitting additive codebooks of {CODEBOOK_BITS} bits to {len(next(iter(samples.values())).positions):,} tokens")
    fitted = fit_codebooks(samples, CODEBOOK_BITS, origin=origin, device=engine.model.device)
    fitted.save(kept)
    return fitted


def _kept(path: Path) -> Codebooks | None:
    if not path.is_file():
        return None
    try:
        return Codebooks.load(path)
    except UsageError as error:
        note(f"codebooks are fitted again: {error}")
        return None


def _samples(engine: TransformersEngine, text: Corpus) -> dict[int, Samples]:
    """K and V of every layer as the cache holds them, of tokens spread evenly over the whole text."""
    frequencies = rope_frequencies(engine.model, engine.layout)
    cache_dtype = CACHE_DTYPES[cache_dtype_of(engine.source)].dtype
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def see(index: int, kind: str, values: torch.Tensor) -> None:
        if kind != "q":
            seen.setdefault((index, kind), []).append(values[0].to(cache_dtype).to("cpu", torch.float32).transpose(0, 1))  # [tokens, heads, dim]

    with torch.inference_mode(), meter("sampling", sum(len(sample.tokens) for sample in text.samples)) as progress:
        for sample in text.samples:
            observe(engine.model, engine.layout, torch.from_numpy(sample.tokens.astype(np.int64))[None].to(engine.model.device), see)
            progress.advance(len(sample.tokens))
    positions = torch.cat([torch.arange(len(sample.tokens)) for sample in text.samples])
    every = slice(None, None, -(-len(positions) // _CODEBOOK_TOKENS))
    return {
        index: Samples(torch.cat(seen[index, "k"])[every], torch.cat(seen[index, "v"])[every], positions[every], each)
        for index, each in frequencies.items()
    }
