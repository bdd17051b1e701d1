"""Our amax beside llm-compressor's on the same token batches: equal with its `static_minmax`, and how far its defaults are off.

    python benchmarks/peers/llmcompressor_amax.py [MODEL] [--rows 32] [--length 256] [--json FILE] [--modelopt PYTHON]

Needs the environment that `make llmcompressor` makes; `--modelopt` compares NVIDIA ModelOpt's `max` too, in an environment of your own.
Both sides see the same tokens in the same batches, in the same compute type; the forwards are two programs (transformers 5.19 and 5.17, SDPA
and eager attention), so they agree to rounding.

Predictions, written first: in float32 our amax, which is bfloat16 because the cache is, equals llm-compressor's `static_minmax` range rounded to
bfloat16, but for layers whose value lies on a rounding boundary, where it is one step away. In bfloat16 its scales are bfloat16 too, and layers
differ by a few steps, from the forwards. Its default, a moving average, stays below the maximum on every layer; `memoryless_minmax` keeps the
last batch alone; right padding that is not masked can only raise ranges.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from calibrate.collect import CollectRun, collect
from calibrate.corpus import Batch, Corpus, Sample
from calibrate.corpus.builtin import topics
from calibrate.errors import CheckFailed
from calibrate.model import SourceCheckpoint, load_model, load_tokenizer, probe_layout, resolve_model
from calibrate.statistics import Statistics
from calibrate.weights.process import find_python

CHILD = Path(__file__).with_name("llmcompressor_child.py")
MODELOPT_CHILD = Path(__file__).with_name("modelopt_child.py")
E4M3_MAX = 448.0
Ranges = dict[str, dict[str, float]]  # attention module → kind → amax


@dataclass(frozen=True)
class Row:
    """One comparison over all layers, K and V: llm-compressor's range (448 × its scale) against our amax.

    Attributes:
        least, median, most: of its range / our amax. equal: how many ranges, rounded to bfloat16, are our amax exactly; of: how many there are.
        steps: the most bfloat16 steps between the two.
    """

    case: str
    observer: str
    dtype: str
    least: float
    median: float
    most: float
    equal: int
    of: int
    steps: int


def rows_of_text(source: SourceCheckpoint, count: int, length: int) -> list[np.ndarray]:
    """`count` rows of `length` tokens, each from one document of the built-in English text."""
    tokenizer = load_tokenizer(source)
    rows: list[np.ndarray] = []
    for document in topics():
        tokens = tokenizer(document.text, add_special_tokens=False)["input_ids"][:length]
        if len(tokens) == length:
            rows.append(np.array(tokens, dtype=np.int32))
        if len(rows) == count:
            return rows
    raise SystemExit(f"the built-in text has only {len(rows)} documents of {length} tokens")


def padded(rows: Sequence[np.ndarray], size: int, pad: int) -> tuple[Batch, ...]:
    """Batches of `size` rows in their order, padded on the right to the longest."""
    batches = []
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        lengths = np.array([len(row) for row in group], dtype=np.int64)
        ids = np.full((len(group), lengths.max()), pad, dtype=np.int64)
        for place, row in enumerate(group):
            ids[place, : len(row)] = row
        batches.append(Batch(input_ids=ids, lengths=lengths, samples=np.arange(first, first + len(group)), part=0))
    return tuple(batches)


def our_ranges(source: SourceCheckpoint, rows: Sequence[np.ndarray], batches: tuple[Batch, ...], dtype: str) -> Ranges:
    """amax of K and V of every layer, as `collect` counts them: bfloat16 numbers, padding left out."""
    samples = tuple(Sample(np.asarray(row, dtype=np.int32), number, f"row {number}") for number, row in enumerate(rows))
    corpus = Corpus(samples, len(samples), "peers", {"sources": [{"data": "peers"}]})
    model = load_model(source, device="cpu", dtype=getattr(torch, dtype))
    return ranges_of(collect(CollectRun(model, source, probe_layout(model), corpus, batches)))


def ranges_of(statistics: Statistics) -> Ranges:
    """amax of K and V of every layer with a cache of its own."""
    values = statistics.values()
    return {
        layer["module"]: {kind: float(values[np.flatnonzero(statistics.layers[layer["index"]][kind].counts.any(axis=0))[-1]]) for kind in ("k", "v")}
        for layer in statistics.layout["layers"]
        if layer["target"] == layer["index"]
    }


@dataclass(frozen=True)
class Run:
    """One calibration of llm-compressor's: an observer (None: its default), a compute type, and batches."""

    observer: str | None
    dtype: str
    batches: tuple[Batch, ...]


def their_ranges(model: Path, runs: Sequence[Run], *, python: Path | None = None, child: Path = CHILD) -> tuple[list[Ranges], dict[str, Any]]:
    """448 × the peer's scales after each run, all in one process of its own Python (llm-compressor's), and its versions."""
    python = python or find_python()
    with tempfile.TemporaryDirectory(prefix="kv-calibrate-peers-") as folder:
        jobs = [
            {"observer": run.observer, "dtype": run.dtype, "batches": saved(run.batches, Path(folder) / f"{n}.npz")} for n, run in enumerate(runs)
        ]
        said = answer([str(python), "-P", str(child)], {"model": str(model), "runs": jobs}, Path(folder))
    ranges = [{name: {kind: scale * E4M3_MAX for kind, scale in of.items()} for name, of in run["scales"].items()} for run in said["runs"]]
    return ranges, said["versions"]


def answer(command: Sequence[str], job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a child process, `command` and the job's file, writes to the job's `result`. The two files lie in `folder`."""
    job_file, result = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job | {"result": str(result)}), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, str(job_file)], capture_output=True, text=True, check=False, cwd=folder, env=env)
    if done.returncode != 0:
        why = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
        raise CheckFailed(f"{Path(command[-1]).stem} could not calibrate {job['model']}: {why}")
    return json.loads(result.read_text(encoding="utf-8"))


def saved(batches: Sequence[Batch], path: Path) -> str:
    """The file from which a child reads batches."""
    masks = {f"mask_{n}": (np.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]).astype(np.int64) for n, batch in enumerate(batches)}
    np.savez(path, **{f"ids_{n}": batch.input_ids for n, batch in enumerate(batches)}, **masks)
    return str(path)


def compared(case: str, observer: str | None, dtype: str, ours: Ranges, theirs: Ranges) -> Row:
    """One row. Raises CheckFailed where the two do not speak of the same layers."""
    if ours.keys() != theirs.keys():
        raise CheckFailed(f"{case}: the peer calibrated {sorted(theirs)}, we {sorted(ours)}")
    mine = torch.tensor([ours[name][kind] for name in ours for kind in ("k", "v")], dtype=torch.float64)
    other = torch.tensor([theirs[name][kind] for name in ours for kind in ("k", "v")], dtype=torch.float64)
    ratio = other / mine
    codes = [one.to(torch.bfloat16).view(torch.int16).to(torch.int64) for one in (mine, other)]  # positive: codes are in the order of values
    apart = (codes[0] - codes[1]).abs()
    figures = (float(ratio.min()), float(ratio.median()), float(ratio.max()))
    return Row(case, observer or "default", dtype, *figures, int((apart == 0).sum()), len(mine), int(apart.max()))


def measure(
    model: Path, rows: Sequence[np.ndarray], *, pad: int, batch_size: int, dtypes: Sequence[str], modelopt: Path | None = None, seed: int = 0
) -> tuple[list[Row], dict[str, Any]]:
    """All comparisons on one model: `static_minmax` in each dtype, and in the first its default, the last batch alone, and padding."""
    source = SourceCheckpoint.open(model)
    generator = np.random.default_rng(seed)
    cut = [row[: generator.integers(len(row) // 8, len(row) + 1)] for row in rows]
    whole, uneven = padded(rows, 1, pad), padded(cut, batch_size, pad)
    runs = [Run("static_minmax", dtype, whole) for dtype in dtypes]
    runs += [Run(observer, dtypes[0], whole) for observer in (None, "memoryless_minmax")] + [Run("static_minmax", dtypes[0], uneven)]
    theirs, versions = their_ranges(model, runs)
    ours = {dtype: our_ranges(source, rows, whole, dtype) for dtype in dtypes}
    ours_uneven = our_ranges(source, cut, uneven, dtypes[0])
    found = []
    for run, ranges in zip(runs, theirs, strict=True):
        case, mine = ("whole rows", ours[run.dtype]) if run.batches is whole else (f"right-padded, {batch_size} rows", ours_uneven)
        found.append(compared(case, run.observer, run.dtype, mine, ranges))
    if modelopt is not None:
        (whole_ranges, uneven_ranges), more = their_ranges(model, [runs[0], runs[-1]], python=modelopt, child=MODELOPT_CHILD)
        found.append(compared("whole rows", "ModelOpt max", dtypes[0], ours[dtypes[0]], whole_ranges))
        found.append(compared(f"right-padded, {batch_size} rows", "ModelOpt max", dtypes[0], ours_uneven, uneven_ranges))
        versions = more | versions
    return found, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint folder; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a padded batch")
    parser.add_argument("--modelopt", type=Path, help="Python of an environment with nvidia-modelopt 0.47")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model = resolve_model(asked.model)
    source = SourceCheckpoint.open(model)
    tokens = rows_of_text(source, asked.rows, asked.length)
    pad = load_tokenizer(source).pad_token_id or 0
    found, versions = measure(model, tokens, pad=pad, batch_size=asked.batch_size, dtypes=("float32", "bfloat16"), modelopt=asked.modelopt)
    title = f"{model.name}, {asked.rows} rows of at most {asked.length} tokens; llm-compressor {versions['llmcompressor']}: its range / our amax"
    table = Table("batches", "its observer", "compute", "least", "median", "most", "equal in bfloat16", "most steps apart", title=title)
    for row in found:
        table.add_row(
            row.case, row.observer, row.dtype, f"{row.least:.4f}", f"{row.median:.4f}", f"{row.most:.4f}", f"{row.equal} of {row.of}", str(row.steps)
        )
    Console(width=150).print(table)
    if asked.json:
        asked.json.write_text(json.dumps({"title": title, "versions": versions, "rows": [asdict(row) for row in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
