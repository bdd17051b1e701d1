"""Any number of scale policies on vLLM's real FP8 kernels, over the same tokens, against the 16-bit cache.

    python -m benchmarks.quality.run --model DIR --backend FLASH_ATTN --granularity tensor --corpus builtin:code --out JSON

One start of the engine serves all rows: scales are changed in place. The JSON holds, for every row, sums over the tokens of each document, so that
any two rows can be compared later, and is written anew after each row. `--scales NAME=PATH` adds a scales file or a calibrated checkpoint,
`--weights NAME=CHECKPOINT` a calibrated checkpoint whose weights differ too (folded), `--hook FILE.py` a file with `rows(material)`
that returns name → Scales.
"""

import argparse
import fcntl
import json
import multiprocessing
import runpy
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.prove import checkpoints
from benchmarks.quality.kernel import Kernel
from benchmarks.quality.rows import Material, rows_for
from benchmarks.quality.scoring import Reference, Scores
from calibrate.artefact import sha256_bytes, write_json
from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.evaluate.baselines import checkpoint_scales, read_scales
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.pipeline import JobOptions, collect_statistics
from calibrate.recipes import choose_recipe
from calibrate.scales import Scales
from calibrate.statistics import Statistics
from calibrate.trials import RANDOM_ROWS, RANDOM_TOKENS

SCHEMA = "kv-calibrate/scale-quality/1"
AS_LOADED = "mse, as loaded"  # the checkpoint's scales where vLLM's loader put them: what shows that setting them in place is the same
COLUMNS = ("tokens", "nll", "abs_delta_logprob", "kl", "top1_agree")


@dataclass(frozen=True)
class Text:
    """Rows to score: tokens, the document of each row, and where they are from."""

    rows: list[np.ndarray]
    documents: list[int]
    description: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What the two engines share."""

    model: Path  # as it is, for the 16-bit cache
    checkpoint: Path  # with a KV scheme, for FP8
    backend: str | None
    longest: int
    step_tokens: int
    cache_bytes: int
    skip_layers: tuple[str, ...]

    def kernel(self, *, fp8: bool) -> Kernel:
        options = {"backend": self.backend, "longest": self.longest, "step_tokens": self.step_tokens, "cache_bytes": self.cache_bytes}
        return Kernel(self.checkpoint if fp8 else self.model, fp8=fp8, skip_layers=self.skip_layers if fp8 else (), **options)


def setting_of(arguments: argparse.Namespace, checkpoint: Path, texts: Iterable[Text]) -> Setting:
    longest = max(len(row) for text in texts for row in text.rows)
    backend = None if arguments.device == "cpu" else arguments.backend
    return Setting(arguments.model, checkpoint, backend, longest, arguments.step_tokens, arguments.cache_mib << 20, tuple(arguments.skip_layers))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: several runs of one model share what is made once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def material_of(model: Path, granularity: str, work: Path, device: str, statistics: Path | None) -> tuple[Path, Material]:
    """A calibrated checkpoint to start from, and the statistics; both are made once a model."""
    with locked(work / f"{model.name}.lock"):
        checkpoint = checkpoints(model, "base", work, device)[granularity]
        source, random = SourceCheckpoint.open(model), work / f"{model.name}-random.safetensors"
        if not random.exists():
            length = min(RANDOM_TOKENS, source.context_length or RANDOM_TOKENS)
            options = JobOptions(model=str(model), data="random", samples=RANDOM_ROWS, sequence_length=length, device=device)
            collect_statistics(source, options, choose_recipe(source.model_type, None), state=None).save(random)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the engine has its own use for it
    path = statistics or checkpoint / "kv_calibration" / "statistics.safetensors"
    return checkpoint, Material(Statistics.load(path), Statistics.load(random), granularity, model)


def text_of(model: Path, data: str, rows: int, length: int) -> Text:
    source = SourceCheckpoint.open(model)
    options = CorpusOptions(data=data, samples=rows, sequence_length=length)
    corpus = load_corpus(options, load_tokenizer(source), vocab_size=source.vocab_size, context_length=source.context_length)
    samples = [sample for sample in corpus.samples if len(sample.tokens) > 1]
    description = {"digest": corpus.digest, **corpus.description}
    return Text([sample.tokens for sample in samples], [sample.document for sample in samples], description)


def sums_of(scores: Scores, reference: Reference, documents: list[int]) -> dict[str, Any]:
    """Per document the sums of COLUMNS, and the quantiles over tokens that sums do not give."""
    owner = np.repeat(np.unique(documents, return_inverse=True)[1], scores.lengths - 1)
    if not (np.isfinite(scores.logprob).all() and np.isfinite(scores.kl).all()):
        raise ValueError("log probabilities are not finite")
    delta = np.abs(scores.logprob.astype(np.float64) - reference.logprob)
    agree = scores.top1 == reference.top_ids[:, 0]
    columns = (np.ones(len(delta)), -scores.logprob.astype(np.float64), delta, scores.kl.astype(np.float64), agree)
    sums = [np.bincount(owner, column) for column in columns]
    found = {name: [round(value, 6) for value in column.tolist()] for name, column in zip(COLUMNS, sums, strict=True)}
    return found | {"kl_p99": float(np.quantile(scores.kl, 0.99)), "abs_delta_p99": float(np.quantile(delta, 0.99))}


def brief(sums: dict[str, Any]) -> str:
    tokens = sum(sums["tokens"])
    nll, delta, kl, top1 = (sum(sums[name]) / tokens for name in COLUMNS[1:])
    return f"ppl {np.exp(min(nll, 700)):.4f}  |Δlogp| {delta:.4f}  KL {kl:.5f}  top-1 {top1:.4f}"


def sixteen_bit(setting: Setting, texts: dict[str, Text], paths: dict[str, Path], weights: dict[str, Path], out: Path) -> None:
    """In a process of its own: the reference of every text, and what other weights alone do to it."""
    kernel = setting.kernel(fp8=False)
    references = {}
    for name, text in texts.items():
        started = time.monotonic()
        if not paths[name].exists():
            kernel.reference(text.rows).save(paths[name])
        references[name] = Reference.load(paths[name])
        print(f"16-bit, {name}: {time.monotonic() - started:.2f} s", flush=True)
    found = {}
    for label, path in weights.items():
        kernel.set_weights(tensors_of(path))
        found[label] = {name: sums_of(kernel.score(text.rows, references[name]), references[name], text.documents) for name, text in texts.items()}
        kernel.restore_weights()
    write_json(out, {"info": kernel.info(), "weights": found})


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's weights without scales, as its files name them."""
    from safetensors import safe_open

    found = {}
    for name, file in SourceCheckpoint.open(checkpoint).weight_map.items():
        if not name.endswith(("_scale", "_zero_point")):
            with safe_open(checkpoint / file, framework="pt") as tensors:
                found[name] = tensors.get_tensor(name)
    return found


def references_of(setting: Setting, texts: dict[str, Text], weights: dict[str, Path], work: Path) -> tuple[Any, dict[str, Path], Path]:
    """Start the 16-bit engine in its own process. References are kept in `work` and found again by model, backend and rows."""
    model = setting.model.name
    paths, fingerprint = {}, SourceCheckpoint.open(setting.model).fingerprint
    for name, text in texts.items():
        key = sha256_bytes(str((fingerprint, setting.backend, setting.step_tokens, setting.longest, text.description["digest"])).encode())[:16]
        paths[name] = work / f"reference-{model}-{key}.npz"
    out = work / f"sixteen-bit-{model}-{setting.backend}-{time.time_ns()}.json"
    if all(path.exists() for path in paths.values()) and not weights:
        return None, paths, out
    process = multiprocessing.get_context("spawn").Process(target=sixteen_bit, args=(setting, texts, paths, weights, out))
    process.start()
    return process, paths, out


def jobs_of(arguments: argparse.Namespace, material: Material, checkpoint: Path) -> Iterator[tuple[str, str, Any]]:
    """Name, prediction and a function that gives the scales."""
    source, like = SourceCheckpoint.open(checkpoint), material.solved()
    for name, row in rows_for(material.granularity, arguments.only).items():
        yield name, row.prediction, lambda row=row: row.make(material)
    for name, path in (each.split("=", 1) for each in arguments.scales):
        yield name, "", lambda path=path: read_scales(source, Path(path), like)
    for file in arguments.hook:
        made = runpy.run_path(str(file))["rows"](material)
        for name, scales in made.items():
            yield name, "", lambda scales=scales: scales


def measure(kernel: Kernel, scales: Scales | None, texts: dict[str, Text], references: dict[str, Reference]) -> dict[str, Any]:
    """One row: all texts with these scales, None for those that are there."""
    started = time.monotonic()
    if scales is not None:
        kernel.set_scales(scales)
    found = {name: sums_of(kernel.score(text.rows, references[name]), references[name], text.documents) for name, text in texts.items()}
    return {"scales_digest": None if scales is None else scales.digest(), "seconds": round(time.monotonic() - started, 2), "texts": found}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    checkpoint, material = material_of(arguments.model, arguments.granularity, arguments.work, arguments.device, arguments.statistics)
    texts = {name: text_of(arguments.model, name, arguments.rows, arguments.length) for name in arguments.corpus}
    setting = setting_of(arguments, checkpoint, texts.values())
    weights = {name: Path(path) for name, path in (each.split("=", 1) for each in arguments.weights)}
    print(f"{arguments.model.name}: prepared in {time.monotonic() - started:.0f} s", flush=True)
    process, paths, out = references_of(setting, texts, weights, arguments.work)
    kernel = setting.kernel(fp8=True)
    if process is not None:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the 16-bit engine ended with {process.exitcode}")
    references = {name: Reference.load(path) for name, path in paths.items()}
    print(f"engines started in {time.monotonic() - started:.0f} s: {kernel.info()}", flush=True)
    result = {
        "schema": SCHEMA,
        "model": arguments.model.name,
        "granularity": arguments.granularity,
        "engine": kernel.info(),
        "rows_asked": [arguments.rows, arguments.length],
        "skip_layers": arguments.skip_layers,
        "texts": {name: described(text, references[name]) for name, text in texts.items()},
        "rows": {},
    }
    write_json(arguments.out, result)
    if not arguments.only or AS_LOADED in arguments.only:
        record(result, arguments.out, AS_LOADED, "mse to the last digit", lambda: measure(kernel, None, texts, references))
    for name, prediction, scales in jobs_of(arguments, material, checkpoint):
        record(result, arguments.out, name, prediction, lambda scales=scales: measure(kernel, scales(), texts, references))
    if weights:
        for name, found in json.loads(out.read_text())["weights"].items():
            record(result, arguments.out, f"{name}, 16-bit cache", "", lambda found=found: {"texts": found})
    for name, path in weights.items():
        kernel.set_weights(tensors_of(path))
        record(result, arguments.out, name, "", lambda path=path: measure(kernel, checkpoint_scales(SourceCheckpoint.open(path)), texts, references))
        kernel.restore_weights()
    print(f"{len(result['rows'])} rows, {time.monotonic() - started:.0f} s in all, {arguments.out}", flush=True)
    return result


def described(text: Text, reference: Reference) -> dict[str, Any]:
    owner = np.repeat(np.unique(text.documents, return_inverse=True)[1], reference.lengths - 1)
    nll = np.bincount(owner, -reference.logprob.astype(np.float64)).round(6).tolist()
    return {"description": text.description, "rows": len(text.rows), "tokens": np.bincount(owner).tolist(), "reference_nll": nll}


def record(result: dict[str, Any], out: Path, name: str, prediction: str, work: Any) -> None:
    """One row into the result; one that fails leaves its error there and the run goes on."""
    started = time.monotonic()
    try:
        row = {"prediction": prediction, **work()}
        told = "; ".join(f"{text} {brief(sums)}" for text, sums in row["texts"].items())
    except Exception as error:
        row = {"prediction": prediction, "error": " ".join(f"{type(error).__name__}: {error}".split())}
        told = row["error"]
    result["rows"][name] = row
    write_json(out, result)
    print(f"{name:26} {time.monotonic() - started:6.2f} s  {told}", flush=True)


def parser() -> argparse.ArgumentParser:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("--model", type=Path, required=True)
    wanted.add_argument("--backend", default="FLASH_ATTN", help="on a CPU vLLM's own is taken")
    wanted.add_argument("--granularity", choices=["tensor", "head"], default="tensor")
    wanted.add_argument("--corpus", nargs="+", default=["builtin:code"], help="as for --data of `kv-calibrate collect`; not what was calibrated on")
    wanted.add_argument("--rows", type=int, default=40)
    wanted.add_argument("--length", type=int, default=2048)
    wanted.add_argument("--only", nargs="*", help="names of rows; all by default, none where nothing follows")
    wanted.add_argument("--scales", action="append", default=[], metavar="NAME=PATH")
    wanted.add_argument("--weights", action="append", default=[], metavar="NAME=CHECKPOINT")
    wanted.add_argument("--hook", action="append", default=[], type=Path)
    wanted.add_argument("--statistics", type=Path, help="instead of the default job's")
    wanted.add_argument("--skip-layers", nargs="*", default=[], help="layers with a 16-bit cache, as vLLM names them")
    wanted.add_argument("--device", default="cuda")
    wanted.add_argument("--step-tokens", type=int, default=16384)
    wanted.add_argument("--cache-mib", type=int, default=1024)
    wanted.add_argument("--work", type=Path, default=Path("/tmp/quality"))
    wanted.add_argument("--out", type=Path, required=True)
    return wanted


if __name__ == "__main__":
    run(parser().parse_args())
