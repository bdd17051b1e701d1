"""What collection costs on a GPU beside a bare forward and beside llm-compressor: time, device memory, disk, arithmetic; and how it grows.

Models have random weights of a shape, made on the device. Bare is `model.base_model(input_ids, use_cache=False)`: no lm_head, no mask, the same
batches, batch by batch in turn. llm-compressor runs as a child with its own packages (`--peer-site FOLDER`, or `--peer-python FILE`).
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median, present, row
from gpu.shapes import build, flops, rows, shape, source_of
from transformers import PreTrainedModel

from calibrate.collect import CollectRun, collect, prepare
from calibrate.collect.ledger import upload
from calibrate.collect.observer import Observer
from calibrate.collect.watch import observe
from calibrate.corpus import Batch
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import CACHE_DTYPES

# Written before the first run, from: 34.8k tokens/s bare and 30.2k with torch.bincount, once measured at this shape; llm-compressor 3.8k; 7 ms a
# layer, of which the kernel was predicted to take 0.2 (90 µs for 8,192 tokens); the last layer's 1.8% of the arithmetic not done.
PREDICTED = {
    "dense": {"ratio": "1.01", "plain": "1.15", "nothing": "0.98", "share": "62%", "memory": "+0.5 GB", "peer": "9 times"},
    "moe": {"ratio": "1.06", "plain": "1.4", "nothing": "0.97", "share": "35%", "memory": "+0.3 GB", "peer": "30 times"},
    "whole": "1.01",
    "disk": "25 MB",
    "32k": "24 GB",
    "128k": "36 GB",
    "compile": "0.93",
}
LENGTH, LONG = 2048, {"32k": 32768, "128k": 131072}
Work = Callable[[Batch], None]


class Bench:
    """Parts write what they find into `data` and `rows`; the file is renewed after each."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.rows: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {"predicted": PREDICTED, "torch": torch.__version__, "options": {k: str(v) for k, v in vars(options).items()}}
        self.started = time.perf_counter()
        self.models: dict[str, PreTrainedModel] = {}

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.started:6.1f} s  {text}", flush=True)

    def add(self, *args: Any) -> None:
        self.rows.append(row(*args))
        self.say(f"{args[0]}: {args[2]}")

    def save(self) -> None:
        if self.options.json:
            self.options.json.write_text(json.dumps({"rows": self.rows, **self.data}, indent=1) + "\n", encoding="utf-8")

    def sync(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        self.sync()
        started = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - started

    def peak(self, work: Callable[[], Any]) -> int:
        """Device bytes that were allocated at once while it ran."""
        if self.device == "cpu":
            work()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.sync()
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Give the model's memory back."""
        self.models.clear()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def fields(self, name: str) -> dict[str, Any]:
        return shape(name, tiny=self.options.tiny)

    def model(self, name: str) -> PreTrainedModel:
        if name not in self.models:
            self.release()
            seconds = self.timed(lambda: self.models.__setitem__(name, build(self.fields(name), self.device)))
            self.say(f"{name}: built in {seconds:.1f} s")
        return self.models[name]

    def run(self, name: str, count: int, length: int, tokens_per_batch: int | None = None) -> CollectRun:
        fields = self.fields(name)
        source = source_of(fields, self.folder / name)
        return prepare(self.model(name), source, rows(count, length, fields["vocab_size"]), tokens_per_batch=tokens_per_batch or 8 * LENGTH)


def works_of(run: CollectRun) -> dict[str, Work]:
    """What is compared, each of one batch."""
    kernel, plain = (Observer(run.layout, CACHE_DTYPES["bfloat16"], kernel=kernel) for kernel in (True, False))

    def bare(batch: Batch) -> None:
        with torch.inference_mode():
            run.model.base_model(input_ids=upload(batch.input_ids, run.model.device), use_cache=False)

    def counted(observer: Observer) -> Work:
        def work(batch: Batch) -> None:
            observer.begin(batch.lengths, batch.input_ids.shape[1], run.model.device)
            observe(run.model, run.layout, upload(batch.input_ids, run.model.device), observer.see)
            observer.end(batch.part)

        return work

    def nothing(batch: Batch) -> None:
        observe(run.model, run.layout, upload(batch.input_ids, run.model.device), lambda *_: None)

    return {"bare": bare, "collect": counted(kernel), "bincount": counted(plain), "nothing counted": nothing}


def in_turn(bench: Bench, works: dict[str, Work], batches: tuple[Batch, ...]) -> dict[str, list[float]]:
    """Seconds of each batch; every other batch in the opposite order."""
    for work in works.values():
        work(batches[0])
    times: dict[str, list[float]] = {name: [] for name in works}
    for number, batch in enumerate(batches):
        for name in list(works)[:: -1 if number % 2 else 1]:
            times[name].append(bench.timed(lambda name=name, batch=batch: works[name](batch)))
    return times


def matmul_rate(bench: Bench) -> float:
    """FLOP/s of bf16 8192³ on random data, median."""
    size = 8192 if bench.device != "cpu" else 256
    a, b = (torch.randn((size, size), device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / median([bench.timed(lambda: a @ b) for _ in range(20)])


def beside_bare(bench: Bench, name: str) -> None:
    """Time, memory and arithmetic against the bare forward."""
    run, predicted, fields = bench.run(name, bench.options.rows, LENGTH), PREDICTED[name], bench.fields(name)
    works = works_of(run)
    slow = {"bare, beside bincount": works["bare"], "bincount": works.pop("bincount")}
    before = matmul_rate(bench)
    times = in_turn(bench, works, run.batches)
    times |= in_turn(bench, slow, run.batches)  # by itself: a slow work that draws little power leaves a faster clock to what comes next
    rate = (before + matmul_rate(bench)) / 2
    del works, slow  # their tables of counts
    memory = {what: bench.peak(lambda what=what: _each(works_of(run)[what], run.batches[:2])) for what in ("bare", "collect")}
    of = {what: median(values) for what, values in times.items()}
    tokens = run.batches[0].input_ids.size
    done = flops(fields, tokens, LENGTH, to_last_cache_write=True) / of["collect"]
    bench.data[name] = {
        "batch_tokens": tokens,
        "seconds": times,
        "memory": memory,
        "matmul_flops": rate,
        "collect_flops": done,
        "bare_flops": flops(fields, tokens, LENGTH, to_last_cache_write=False) / of["bare"],
        "experts": getattr(run.model.config, "_experts_implementation", None),
    }
    ratio, share, more = of["collect"] / of["bare"], done / rate, memory["collect"] - memory["bare"]
    bench.add(f"{name}: bare forward", "", f"{tokens / of['bare']:,.0f} tokens/s, {len(run.batches)} batches of {tokens:,} tokens")
    bench.add(
        f"{name}: collection / bare",
        predicted["ratio"],
        f"{ratio:.3f} (of least {min(times['collect']) / min(times['bare']):.3f})",
        *(("≤ 1.03", ratio <= 1.03) if name == "dense" else ()),
    )
    bench.add(f"{name}: the same by torch.bincount", predicted["plain"], f"{of['bincount'] / of['bare, beside bincount']:.3f}")
    bench.add(f"{name}: the same, nothing counted", predicted["nothing"], f"{of['nothing counted'] / of['bare']:.3f}")
    target, met = ("≥ 65%", share >= 0.65) if name == "dense" else ("", None)
    bench.add(f"{name}: of the matmul rate of {rate / 1e12:,.0f} TFLOP/s", predicted["share"], f"{share:.1%}", target, met)
    text = f"{more / 1e9:+.2f} GB ({memory['bare'] / 1e9:.2f} → {memory['collect'] / 1e9:.2f} GB)"
    bench.add(f"{name}: peak device memory", predicted["memory"], text, "≤ +1 GB", more <= 1e9)


def _each(work: Work, batches: tuple[Batch, ...]) -> None:
    for batch in batches:
        work(batch)


def whole(bench: Bench, name: str = "dense") -> None:
    """The whole job on many tokens without loading: layout, collection, statistics on disk, scales."""
    per_batch = median(bench.data[name]["seconds"]["bare"]) if name in bench.data else None
    file = bench.folder / "statistics.safetensors"
    parts = {}

    def job() -> None:
        started = time.perf_counter()
        run = bench.run(name, bench.options.whole_rows, LENGTH)
        parts["prepare"] = time.perf_counter() - started
        statistics = collect(run, state=bench.folder / "state.safetensors")
        parts["collect"] = time.perf_counter() - started - parts["prepare"]
        statistics.save(file)
        solve(statistics, PolicyOptions())
        parts["save and solve"] = time.perf_counter() - started - parts["prepare"] - parts["collect"]
        parts["batches"] = len(run.batches)

    bench.model(name)
    seconds = bench.timed(job)
    tokens = bench.options.whole_rows * LENGTH
    bench.data["whole"] = {"seconds": seconds, "tokens": tokens, "parts": parts, "file_bytes": file.stat().st_size}
    text = f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s ({', '.join(f'{what} {spent:.1f}' for what, spent in parts.items())})"
    bench.add(f"{name}: {bench.options.whole_rows} × {LENGTH} tokens, whole job", "", text)
    if per_batch:
        ratio = seconds / (per_batch * parts["batches"])
        bench.data["whole"]["ratio"] = ratio
        bench.add("of it / bare forwards of as many batches", PREDICTED["whole"], f"{ratio:.3f}", "≤ 1.03", ratio <= 1.03)
    bench.add("statistics on disk", PREDICTED["disk"], f"{file.stat().st_size / 1e6:.1f} MB")


def growth(bench: Bench) -> None:
    """With layers and with context: µs a token above bare."""
    name, found = "dense", []
    model, layers = bench.model(name), bench.model(name).model.layers
    lengths = [64, 128, 256] if bench.options.tiny else [512, 8192, 32768]
    cases = [(len(layers), length) for length in lengths] + [(max(1, len(layers) // 4), LENGTH), (max(1, len(layers) // 2), LENGTH)]
    for count, length in cases:
        try:
            model.model.layers, model.config.num_hidden_layers = layers[:count], count
            length = min(length, 256) if bench.options.tiny else length
            budget = max(length, 8 * LENGTH)
            run = bench.run(name, max(1, budget // length) * (4 if length < budget else 2), length, budget)
            works = works_of(run)
            times = in_turn(bench, {what: works[what] for what in ("bare", "collect")}, run.batches)
            tokens, of = run.batches[0].input_ids.size, {what: median(values) for what, values in times.items()}
            found.append({"layers": count, "length": length, "tokens": tokens, "bare": of["bare"], "collect": of["collect"]})
            above = 1e6 * (of["collect"] - of["bare"]) / tokens
            text = f"{of['collect'] / of['bare']:.3f} of bare, {tokens / of['collect']:,.0f} tokens/s, {above:+.2f} µs a token"
            bench.add(f"{count} layers, rows of {length:,} tokens", "", text)
        finally:
            model.model.layers, model.config.num_hidden_layers = layers, len(layers)
    bench.data["growth"] = found


def long(bench: Bench) -> None:
    """One row of many tokens: peak memory, and that nothing grows with its square."""
    for name, length in LONG.items():
        length = 1024 if bench.options.tiny else length
        run = bench.run("dense", 1, length, length)
        work, spent = works_of(run)["collect"], []
        peak = bench.peak(lambda work=work, run=run, spent=spent: spent.append(bench.timed(lambda: work(run.batches[0]))))
        bench.data[name] = {"tokens": length, "seconds": spent[0], "peak_bytes": peak}
        bench.add(
            f"dense: a row of {length:,} tokens, peak memory", PREDICTED[name], f"{peak / 1e9:.1f} GB, {spent[0]:.1f} s", "< 40 GB", peak < 40e9
        )
        bench.save()


def compiled(bench: Bench) -> None:
    """Norms and MLPs by torch.compile: does it pay?"""
    run = bench.run("dense", 8 * 8, LENGTH)
    works = works_of(run)
    before = median(in_turn(bench, {"collect": works["collect"]}, run.batches[:4])["collect"])
    for layer in run.model.model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.compile(dynamic=False)
    seconds = bench.timed(lambda: works["collect"](run.batches[0]))
    after = median(in_turn(bench, {"collect": works["collect"]}, run.batches[:4])["collect"])
    pays = seconds / max(1e-9, before - after) * run.batches[0].input_ids.size
    bench.data["compile"] = {"before": before, "after": after, "seconds": seconds}
    text = f"{after / before:.3f} of the time, compiled in {seconds:.1f} s" + (f", pays from {pays:,.0f} tokens on" if after < before else "")
    bench.add("dense: norms and MLPs by torch.compile", PREDICTED["compile"], text)
    bench.models.clear()  # its modules stay compiled


def peer(bench: Bench, name: str) -> None:
    """llm-compressor (static_minmax) on the same batches of the same model, in a child that has the device to itself."""
    options = bench.options
    counts = [8, 24] if name == "dense" else [8, 16]
    length = 64 if options.tiny else LENGTH
    folder = bench.folder / f"peer-{name}"
    folder.mkdir()
    np.save(
        folder / "rows.npy",
        np.stack([sample.tokens for sample in rows(max(counts), length, bench.fields(name)["vocab_size"]).samples]).astype(np.int64),
    )
    job = {"config": bench.fields(name), "device": bench.device, "rows": str(folder / "rows.npy"), "counts": counts, "rows_at_once": 8}
    (folder / "job.json").write_text(json.dumps(job | {"result": str(folder / "result.json")}))
    bench.release()
    environment = os.environ | ({"PYTHONPATH": str(options.peer_site)} if options.peer_site else {})
    child = [
        str(options.peer_python or sys.executable),
        str(Path(__file__).parent / "gpu" / "llmcompressor_speed_child.py"),
        str(folder / "job.json"),
    ]
    with (folder / "log").open("w") as log:
        try:
            code = subprocess.run(child, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=options.peer_seconds).returncode
        except subprocess.TimeoutExpired:
            code = "too slow"
    if not (folder / "result.json").exists():
        raise RuntimeError(f"llm-compressor: exit {code}: {(folder / 'log').read_text()[-1500:]}")
    found = json.loads((folder / "result.json").read_text())
    bench.data.setdefault(name, {})["peer"] = found
    runs = found["runs"]
    rates = [one["tokens"] / one["seconds"] for one in runs]
    if len(runs) > 1:  # what each further token costs: its fixed costs (tracing, moving the model) are left out, in its favour
        rates.append((runs[-1]["tokens"] - runs[0]["tokens"]) / (runs[-1]["seconds"] - runs[0]["seconds"]))
    told = ", ".join(f"{one['tokens']:,} tokens in {one['seconds']:.1f} s, peak {one['peak_bytes'] / 1e9:.1f} GB" for one in runs)
    bench.add(f"{name}: llm-compressor {found['versions']['llmcompressor']}", "", f"{rates[-1]:,.0f} tokens/s ({told})")
    if "seconds" in bench.data[name]:
        ours = bench.data[name]["batch_tokens"] / median(bench.data[name]["seconds"]["collect"])
        least = 8 if name == "dense" else 20
        bench.add(
            f"{name}: collection / llm-compressor", PREDICTED[name]["peer"], f"{ours / rates[-1]:.1f} times", f"≥ {least}", ours / rates[-1] >= least
        )


PARTS: dict[str, Callable[[Bench], None]] = {
    "dense": lambda bench: beside_bare(bench, "dense"),
    "whole": whole,
    "long": long,
    "growth": growth,
    "compile": compiled,
    "dense-peer": lambda bench: peer(bench, "dense"),
    "moe": lambda bench: beside_bare(bench, "moe"),
    "moe-peer": lambda bench: peer(bench, "moe"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too, renewed after each part")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in order; all by default")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {LENGTH} tokens that are compared batch by batch")
    parser.add_argument("--whole-rows", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a look at the benchmark itself; runs on a CPU too")
    parser.add_argument("--peer-site", type=Path, help="folder with llm-compressor's packages, for this Python")
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that has llm-compressor")
    parser.add_argument("--peer-seconds", type=int, default=120)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        print("skipped: torch sees no CUDA device here (--tiny runs tiny models on a CPU)")
        return
    with tempfile.TemporaryDirectory(prefix="kv-calibrate-bench-") as name:
        bench = Bench(options, Path(name))
        for part in options.parts.split(","):
            try:
                PARTS[part](bench)
            except Exception as error:  # one that fails leaves the others their place in the table
                bench.data.setdefault("errors", {})[part] = traceback.format_exc()[-3000:]
                bench.add(part, "", f"failed: {type(error).__name__}: {error}"[:1700])
            bench.save()
    present("Collection on a GPU", bench.rows, bench.data, options.json)


if __name__ == "__main__":
    main()
