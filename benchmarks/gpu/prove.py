"""All variants of a model and its stress twins through vLLM's real FP8 kernels: fidelity and needles for each attention backend and granularity.

One result file a part, `OUT/PART.json`. A part is a model and one of its checkpoints: base, twin-k (K × 64) or twin-v (V × 2^-12).
A part takes two to four minutes on one H200: parts run their sessions side by side, each with a cache of its own.

usage: python benchmarks/gpu/prove.py --out DIR --part SmolLM2-135M-Instruct:base [--part …]
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.artefact import write_json
from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.twins import write_twin
from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.engines.session import EngineInfo, TokenScores, Variant
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.evaluate.baselines import build_variants, checkpoint_scales, overlay
from calibrate.evaluate.evidence import subject_of
from calibrate.evaluate.fidelity import fidelity
from calibrate.evaluate.niah import Asked, NeedleGrid, build_grid
from calibrate.evaluate.prompts import Prompter, stop_ids
from calibrate.evaluate.results import SIXTEEN_BIT, Cell, NeedleVariant
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.pipeline import JobOptions, collect_statistics
from calibrate.recipes import choose_recipe
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import Statistics
from calibrate.trials import EngineChoice, random_statistics

TWINS = {"base": None, "twin-k": ("k", 64.0), "twin-v": ("v", 2.0**-12)}
SETTINGS = ["FLASH_ATTN:tensor", "FLASH_ATTN:head", "TRITON_ATTN:tensor"]
ANSWERS = dict[str, tuple[EngineInfo, list[TokenScores], list[Cell]]]


@dataclass(frozen=True)
class Load:
    """What every variant is given."""

    rows: list[Any]
    documents: list[int]
    asked: list[Asked]
    stop: list[int]
    longest: int
    description: dict[str, Any]


def checkpoints(model: Path, twin: str, work: Path, device: str) -> dict[str, Path]:
    """Granularity → a calibrated checkpoint of the model or its twin; the statistics are collected once."""
    place = work / f"{model.name}-{twin}"
    source_path = model
    if TWINS[twin] is not None:
        source_path = place / "twin"
        if not source_path.exists():
            kind, factor = TWINS[twin]
            write_twin(model, source_path, kind=kind, factor=factor)
    source = SourceCheckpoint.open(source_path)
    recipe = choose_recipe(source.model_type, None)
    options = JobOptions(model=str(source_path), device=device)
    found = {granularity: place / granularity for granularity in ("tensor", "head")}
    if not all(path.exists() for path in found.values()):
        statistics = collect_statistics(source, options, recipe, state=None)
        for granularity, path in found.items():
            policy = options.model_copy(update={"granularity": granularity}).scales(recipe)
            write_checkpoint(source, solve(statistics, policy), path, statistics=statistics, force=True)
    return found


def amax_scales(checkpoint: Path, granularity: str) -> Path:
    """A scales file of amax/448 from the same statistics: what other tools write."""
    path = checkpoint.parent / f"amax-{granularity}.safetensors"
    statistics = Statistics.load(checkpoint / "kv_calibration" / "statistics.safetensors")
    solve(statistics, PolicyOptions(policy="amax", margin=1.0, granularity=granularity)).save(path)
    return path


def load_for(checkpoint: Path, arguments: argparse.Namespace) -> Load:
    source = SourceCheckpoint.open(checkpoint)
    tokenizer = load_tokenizer(source)
    held_out = CorpusOptions(data="builtin:code", samples=arguments.rows, sequence_length=arguments.length)
    corpus = load_corpus(held_out, tokenizer, vocab_size=source.vocab_size, context_length=source.context_length)
    samples = [sample for sample in corpus.samples if len(sample.tokens) > 1]
    grid = NeedleGrid(lengths=tuple(arguments.lengths), needles_per_cell=arguments.needles)
    prompter = Prompter(tokenizer)
    asked, described = build_grid(grid, prompter)
    longest = max(arguments.length, grid.longest)
    description = {"corpus": {"digest": corpus.digest, **corpus.description}, "grid": described}
    rows, documents = [sample.tokens for sample in samples], [sample.document for sample in samples]
    return Load(rows, documents, asked, stop_ids(checkpoint, tokenizer), longest, description)


def answers_of(engine: VllmEngine, variant: Variant, load: Load, prompter: Prompter) -> tuple[EngineInfo, list[TokenScores], list[Cell]]:
    """One session: the held-out rows scored, the needles asked."""
    with engine.session(variant) as session:
        scores = session.score(load.rows)
        most = max(each.request.max_new_tokens for each in load.asked)
        found = session.generate([each.request.tokens for each in load.asked], most, load.stop)
        cells = [
            each.cell(prompter.decode(tokens[: each.request.max_new_tokens]), plain=prompter.form == "plain")
            for each, tokens in zip(load.asked, found, strict=True)
        ]
        return session.info(), scores, cells


def jobs_of(calibrated: dict[str, Path], load: Load, arguments: argparse.Namespace) -> Iterator[tuple[tuple[str, str], VllmEngine, Variant]]:
    device, work = arguments.device, arguments.work
    for backend, granularity in (setting.split(":") for setting in arguments.setting):
        source = SourceCheckpoint.open(calibrated[granularity])
        random = random_statistics(source, EngineChoice("transformers", device=device))
        engine = VllmEngine(
            source,
            folder=work / "variants",
            overlay=lambda variant, base, source=source: overlay(source, variant, base / variant.name),
            attention_backend=None if device == "cpu" else backend,
            max_model_len=load.longest,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=2 << 30,
        )
        amax = {"amax": amax_scales(calibrated[granularity], granularity)}
        for variant in build_variants(source, checkpoint_scales(source), random, extra=amax):
            if not arguments.variants or variant.name in arguments.variants:
                yield (backend, granularity), engine, variant


def prove(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    name, _, twin = part.partition(":")
    calibrated = checkpoints(arguments.models / name, twin, arguments.work, arguments.device)
    load = load_for(calibrated["tensor"], arguments)
    prompter = Prompter(load_tokenizer(SourceCheckpoint.open(calibrated["tensor"])))
    jobs = list(jobs_of(calibrated, load, arguments))
    print(f"{part}: calibrated in {time.monotonic() - started:.0f} s, {len(jobs)} sessions", flush=True)
    with ThreadPoolExecutor(arguments.workers) as pool:
        found = list(pool.map(lambda job: answers_of(job[1], job[2], load, prompter), jobs))
    settings: dict[tuple[str, str], ANSWERS] = {}
    for (setting, _, variant), answer in zip(jobs, found, strict=True):
        settings.setdefault(setting, {})[variant.name] = answer
    results = [_setting(backend, granularity, answers, calibrated[granularity], load) for (backend, granularity), answers in settings.items()]
    seconds = round(time.monotonic() - started, 1)
    return {
        "schema": "kv-calibrate/gpu-proof/1",
        "part": part,
        "model": name,
        "twin": twin,
        "seconds": seconds,
        **load.description,
        "settings": results,
    }


def _setting(backend: str, granularity: str, answers: ANSWERS, checkpoint: Path, load: Load) -> dict[str, Any]:
    reference = answers[SIXTEEN_BIT][1]
    rows = []
    for variant, (info, scores, cells) in answers.items():
        measured = fidelity(variant, info, scores, reference, load.documents)
        hits = sum(cell.hit for cell in cells)
        rows.append((measured, NeedleVariant(variant=variant, engine=info, cells=tuple(cells))))
        ratio, top1 = measured.perplexity_ratio.value, measured.top1_agreement.value
        figures = f"perplexity {measured.perplexity:.3f} (ratio {ratio:.4f}), top-1 {top1:.4f}, needles {hits}/{len(cells)}"
        print(f"  {backend} {granularity} {variant}: {figures}")
    return {
        "backend": backend,
        "granularity": granularity,
        "subject": subject_of(checkpoint).model_dump(),
        "fidelity": [measured.model_dump() for measured, _ in rows],
        "needles": [needles.model_dump() for _, needles in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", required=True, help=f"MODEL:{{{','.join(TWINS)}}}, MODEL a folder in --models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/proof"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8, help="sessions at once")
    parser.add_argument("--setting", nargs="+", default=SETTINGS, help="BACKEND:GRANULARITY; on a CPU the backend is vLLM's own")
    parser.add_argument("--variants", nargs="+", help="16-bit and some others; all by default")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--needles", type=int, default=4, help="questions at each length and depth")
    arguments = parser.parse_args()
    for part in arguments.part:
        if part.partition(":")[2] not in TWINS:
            parser.error(f"{part}: write MODEL:{'|'.join(TWINS)}")
    for part in arguments.part:
        result = prove(part, arguments)
        write_json(arguments.out / f"{part.replace(':', '-')}.json", result)
        print(json.dumps({"part": part, "seconds": result["seconds"]}), flush=True)


if __name__ == "__main__":
    main()
