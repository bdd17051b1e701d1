"""Calibration of SmolLM2 on the CPU beside a bare forward and beside llm-compressor: time, peak memory, disk, arithmetic; on the same batches.

Three kinds of run, each in a process of its own, in turn, on rows of built-in text without padding, from a loaded model:
- bare: `model.base_model(input_ids, use_cache=False)`: no lm_head, no mask;
- ours: probing, collection, statistics, scales, and the checkpoint with them, all on disk;
- llm-compressor: `oneshot` with `static_minmax` for the cache, and `save_pretrained`, by which its scales get to the disk.
What starting costs is told apart by running a part of the rows as well. Needs the environment that `make llmcompressor` makes; without it the
third kind is left out.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, median, present, row
from gpu.shapes import flops
from peers.llmcompressor_amax import CHILD, E4M3_MAX, answer, compared, padded, ranges_of, saved
from peers.llmcompressor_child import measured
from peers.llmcompressor_child import peak as highest

from calibrate.checkpoint import write_checkpoint
from calibrate.collect import CollectRun, collect
from calibrate.corpus import Corpus, Sample
from calibrate.corpus.builtin import topics
from calibrate.errors import HostError
from calibrate.model import SourceCheckpoint, load_model, load_tokenizer, probe_layout, resolve_model
from calibrate.scales import PolicyOptions, solve
from calibrate.weights.process import find_python

# Written before the first measurement, from llm-compressor's code: each batch passes each layer twice, with eager attention and a mask, and lm_head
# (a fifth of the weights) as well; it saves all weights in the type they were loaded in. Ours hashes the weights beside the forward.
PREDICTED = {
    "float32": {"ours": "1.02", "peer": "2.6", "whole": "2.4 times", "memory": "+6%, +90%", "disk": "540 MB", "equal": "60 of 60"},
    "bfloat16": {"ours": "1.15", "peer": "4", "whole": "3 times", "memory": "+8%, +90%", "disk": "270 MB", "equal": "20 of 60"},
    "ours on disk": "8.5 MB, no weights",
    "flops of ours": "0.972 of bare",
    "flops of the peer": "2.5 of bare",
    "counted": "1.000",
}
BARE, OURS, PEER = "bare", "ours", "llm-compressor"
ROWS_AT_ONCE = 2  # as collection takes of 1,024 tokens on a CPU


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].endswith("job.json"):
        return _child(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    options = arguments(__doc__, model="", rows=8, fewer_rows=2, length=1024, repeats=3, dtypes="float32,bfloat16")
    commands = {BARE: [sys.executable, __file__], OURS: [sys.executable, __file__]}
    try:
        commands[PEER] = [str(find_python()), "-P", str(CHILD)]
    except HostError:
        print("skipped: llm-compressor, whose environment is not here (`make llmcompressor` makes it); measured are a bare forward and ours")
    model = resolve_model(options.model or None)
    rows, data = [], {}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as name:  # weights are linked: a folder of the same disk, most likely
        bench = _Bench(model, commands, Path(name), _text(SourceCheckpoint.open(model), options.rows, options.length))
        for dtype in options.dtypes.split(","):
            runs = bench.in_turn(dtype, (options.fewer_rows, options.rows), options.repeats)
            rows += _rows(dtype, runs, options.rows * options.length, (options.rows - options.fewer_rows) * options.length)
            data[dtype] = runs
        counted = {kind: bench.run(kind, dtype, options.fewer_rows, flops=True) for kind in commands}
        rows += _flops_rows(SourceCheckpoint.open(model).config, counted, options.fewer_rows, options.length)
    present(f"Calibration beside a bare forward and llm-compressor, {model.name}", rows, data | {"flops": counted}, options.json)
    return None


def _text(source: SourceCheckpoint, count: int, length: int) -> np.ndarray:
    """Rows of tokens, int64 [count, length]: the built-in text end to end, so that no row needs padding (which llm-compressor would count)."""
    tokenizer = load_tokenizer(source)
    tokens = np.concatenate([tokenizer(document.text, add_special_tokens=False)["input_ids"] for document in topics()])
    if len(tokens) < count * length:
        raise SystemExit(f"the built-in text has only {len(tokens):,} tokens")
    return tokens[: count * length].reshape(count, length).astype(np.int64)


class _Bench:
    """Starts the processes. `text`: int64 [rows, length]; a run takes the first of them."""

    def __init__(self, model: Path, commands: dict[str, list[str]], folder: Path, text: np.ndarray) -> None:
        self._model, self._commands, self._folder, self._text = model, commands, folder, text

    def in_turn(self, dtype: str, counts: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
        runs = []
        for turn in range(repeats):
            for count in counts:
                runs += [self.run(kind, dtype, count) for kind in list(self._commands)[:: -1 if turn % 2 else 1]]
        return runs

    def run(self, kind: str, dtype: str, count: int, *, flops: bool = False) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder, output = Path(name), Path(name) / "output"
            batches = saved(padded(self._text[:count], ROWS_AT_ONCE, 0), folder / "batches.npz")
            asked = {"kind": kind, "dtype": dtype, "observer": "static_minmax", "batches": batches, "save": str(output), "flops": flops}
            found = answer(self._commands[kind], {"model": str(self._model), "runs": [asked]}, folder)["runs"][0]
            # a file with a second name was there before: the source's weights
            sizes = {str(file.relative_to(output)): file.stat().st_size for file in output.rglob("*") if file.is_file() and file.stat().st_nlink == 1}
        print(f"{dtype}, {count} rows, {kind}: {found['seconds']:.1f} s, peak {found['peak'] / 1e6:,.0f} MB", flush=True)
        return found | {"kind": kind, "dtype": dtype, "rows": count, "files": sizes, "new_bytes": sum(sizes.values())}


def _child(job: dict[str, Any]) -> None:
    """A bare forward or ours, as `llmcompressor_child.py` answers."""
    (run,) = job["runs"]
    source, output = SourceCheckpoint.open(Path(job["model"])), Path(run["save"])
    with np.load(run["batches"]) as file:
        given = np.concatenate([file[f"ids_{number}"] for number in range(len(file.files) // 2)])
    batches = padded(given, ROWS_AT_ONCE, 0)
    samples = tuple(Sample(tokens.astype(np.int32), number, f"row {number}") for number, tokens in enumerate(given))
    corpus = Corpus(samples, len(samples), "peers", {"sources": [{"data": "peers"}]})
    model = load_model(source, device="cpu", dtype=getattr(torch, run["dtype"]))
    ranges = None
    with measured(flops=run["flops"]) as found:
        if run["kind"] == BARE:
            with torch.inference_mode():
                for batch in batches:
                    model.base_model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)
        else:
            statistics = collect(CollectRun(model, source, probe_layout(model), corpus, batches), state=output.with_name("state.safetensors"))
            started, found["peak_calibrating"] = time.perf_counter(), highest()
            scales = solve(statistics, PolicyOptions())
            write_checkpoint(source, scales, output, statistics=statistics)
            found["saving"] = time.perf_counter() - started
    if run["kind"] == OURS:
        ranges = ranges_of(statistics)
    Path(job["result"]).write_text(json.dumps({"runs": [found | {"ranges": ranges}]}), encoding="utf-8")


def _rows(dtype: str, runs: list[dict[str, Any]], tokens: int, further: int) -> list[dict[str, Any]]:
    """The table's rows of one dtype. `tokens`: of the larger runs; `further`: how many they have more than the smaller ones."""
    predicted, most = PREDICTED.get(dtype, {}), max(run["rows"] for run in runs)
    large = {kind: [run for run in runs if run["kind"] == kind and run["rows"] == most] for kind in (BARE, OURS, PEER)}
    large = {kind: of for kind, of in large.items() if of}
    small = {kind: [run for run in runs if run["kind"] == kind and run["rows"] != most] for kind in large}

    def middle(of: dict[str, list[dict[str, Any]]], what: str) -> dict[str, float]:
        return {kind: median([run.get(what, 0) for run in of[kind]]) for kind in of}

    def each(clock: str) -> dict[str, float]:
        """Seconds of each further token: without what starting and saving cost."""
        more, less = middle(large, clock), middle(small, clock)
        return {kind: (more[kind] - less[kind]) / further for kind in more}

    def ratio(kind: str, other: str) -> str:
        of = [(times[kind] / times[other]) for clock in ("seconds", "processor") for times in (middle(large, clock), each(clock))]
        return f"whole {of[0]:.2f}, each further token {of[1]:.2f} (processor {of[2]:.2f}, {of[3]:.2f})"

    whole, further_token, saving = middle(large, "seconds"), each("seconds"), middle(large, "saving")
    peak, before, disk, written = (middle(large, what) for what in ("peak", "resident", "new_bytes", "written"))
    rows = []
    for kind in large:
        spread = [run["seconds"] for run in large[kind]]
        told = f"{whole[kind]:.1f} s ({min(spread):.1f} to {max(spread):.1f})" + ("" if kind == BARE else f", of it {saving[kind]:.1f} to save")
        rows.append(row(f"{dtype}: {kind}, {tokens:,} tokens", "", f"{told}; {1 / further_token[kind]:,.0f} tokens/s for each further token"))
    rows.append(row(f"{dtype}: ours / bare, time", predicted.get("ours", ""), ratio(OURS, BARE)))
    if PEER in large:
        rows.append(row(f"{dtype}: llm-compressor / bare, time", predicted.get("peer", ""), ratio(PEER, BARE)))
        rows.append(row(f"{dtype}: llm-compressor / ours, time", predicted.get("whole", ""), ratio(PEER, OURS)))
    calibrating = middle(large, "peak_calibrating") | {BARE: peak[BARE]}
    for name, sizes in (("before saving", calibrating), ("of the whole", peak)):
        told = ", ".join(f"{kind} {size / 1e6:,.0f} MB ({size / peak[BARE] - 1:+.0%})" for kind, size in sizes.items())
        rows.append(row(f"{dtype}: peak resident memory, {name}", predicted.get("memory", ""), told))
    rows.append(row(f"{dtype}: resident once loaded", "", ", ".join(f"{kind} {size / 1e6:,.0f} MB" for kind, size in before.items())))
    rows.append(row(f"{dtype}: ours, new bytes on disk", PREDICTED["ours on disk"], _disk(disk[OURS], written[OURS])))
    if PEER in large:
        rows.append(row(f"{dtype}: llm-compressor, new bytes on disk", predicted.get("disk", ""), _disk(disk[PEER], written[PEER])))
        theirs = {name: {kind: E4M3_MAX * scale for kind, scale in of.items()} for name, of in large[PEER][0]["scales"].items()}
        same = compared("whole rows", "static_minmax", dtype, large[OURS][0]["ranges"], theirs)
        told = f"{same.equal} of {same.of}, others at most {same.steps} steps of bfloat16 apart"
        rows.append(row(f"{dtype}: its scales × 448 that are our amax", predicted.get("equal", ""), told))
    return rows


def _disk(left: float, written: float) -> str:
    return f"{left / 1e6:,.1f} MB ({written / 1e6:,.1f} MB given to write calls)"


def _flops_rows(config: dict[str, Any], counted: dict[str, dict[str, Any]], count: int, length: int) -> list[dict[str, Any]]:
    """Operations that torch ran, beside those that the model's shape says."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tokens, bare = count * length, counted[BARE]["flops"]
    by_shape = {kind: flops(config | {"head_dim": width}, tokens, length, to_last_cache_write=kind == OURS) for kind in (BARE, OURS)}
    rows = [row("FLOPs a token: bare", "", f"{bare / tokens / 1e6:,.1f} million")]
    for kind, name in ((OURS, "flops of ours"), (PEER, "flops of the peer")):
        if kind in counted:
            rows.append(row(f"FLOPs: {kind}", PREDICTED[name], f"{counted[kind]['flops'] / bare:.3f} of bare"))
    told = ", ".join(f"{kind} {counted[kind]['flops'] / by_shape[kind]:.4f}" for kind in by_shape)
    return [*rows, row("FLOPs: those that ran / those of the shape", PREDICTED["counted"], told)]


if __name__ == "__main__":
    main()
