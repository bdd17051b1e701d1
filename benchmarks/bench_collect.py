"""What collection costs beside a bare forward: time, memory, file size; and how far another batch shape moves what is collected.

Bare is `model.base_model(input_ids, use_cache=False)`: no lm_head, no mask, the same batches, batch by batch in turn.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, median, present, row, timed

from calibrate.collect import CollectRun, collect, prepare
from calibrate.collect.observer import Observer
from calibrate.collect.watch import observe
from calibrate.corpus import Batch, CorpusOptions, load_corpus, plan_batches
from calibrate.model import SourceCheckpoint, load_model, load_tokenizer
from calibrate.model.default import default_model
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import CACHE_DTYPES, Statistics

# Written before the first full measurement, from timings of single operations.
PREDICTED = {
    "float32": {
        "ratio": "1.05",
        "end": "1.08",
        "histogram": "0.05",
        "moments": "0.02",
        "stop": "0.03",
        "memory": "+4%",
        "moved": "0.5%",
        "amax": "0.4%",
    },
    "bfloat16": {
        "ratio": "1.09",
        "end": "1.12",
        "histogram": "0.08",
        "moments": "0.03",
        "stop": "0.03",
        "memory": "+6%",
        "moved": "30%",
        "amax": "2%",
    },
    "file": "13 MB",
}
TARGET_TIME, TARGET_MEMORY = 1.10, 0.10
SHAPES = (512, 2048, 8192)  # tokens per batch
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _WithoutSums(Observer):
    """Counts, but adds up no channels: what is missing in its time is the moments'."""

    def _channel_sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros((2, values.shape[0], values.shape[-1]), dtype=torch.float64)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return print(json.dumps(_memory(sys.argv[2], sys.argv[3])))
    options = arguments(__doc__, samples=12, sequence_length=1024, repeats=2, shape_samples=16, shape_length=512)
    rows, data = [], {}
    for name, dtype in DTYPES.items():
        run = _run(dtype, options.samples, options.sequence_length)
        times = _times(run, options.repeats)
        memory = {what: _child(name, what) for what in ("bare", "collect")}
        shapes = _shapes(run, options.shape_samples, options.shape_length)
        rows += [*_time_rows(name, times), *_memory_rows(name, memory), *_shape_rows(name, shapes)]
        data[name] = {"seconds_per_token": times, "memory": memory, "shapes": shapes}
        if dtype == torch.bfloat16:
            sizes = _file_sizes(run)
            rows.append(row("statistics file", PREDICTED["file"], ", ".join(f"{size / 1e6:.1f} MB at {n:,} tokens" for n, size in sizes.items())))
            data["file_bytes"] = sizes
    present("Collection beside a bare forward, SmolLM2-135M-Instruct", rows, data, options.json)
    return None


def _run(dtype: torch.dtype, samples: int, length: int) -> CollectRun:
    source = SourceCheckpoint.open(default_model())
    model = load_model(source, device="cpu", dtype=dtype)
    options = CorpusOptions(samples=samples, sequence_length=length)
    text = load_corpus(
        options, load_tokenizer(source), vocab_size=source.config["vocab_size"], context_length=source.config["max_position_embeddings"]
    )
    return prepare(model, source, text)


def _bare(run: CollectRun, batch: Batch) -> None:
    with torch.inference_mode():
        run.model.base_model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)


def _observe(run: CollectRun, observer: Observer, batch: Batch, *, to_the_end: bool = False) -> None:
    observer.begin(batch.lengths, batch.input_ids.shape[1], run.model.device)
    observe(run.model, run.layout, torch.from_numpy(batch.input_ids), observer.see, to_the_end=to_the_end)
    observer.end(batch.part)


def _times(run: CollectRun, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds a token of each batch, all kinds of run in turn on one batch before the next."""
    whole, plain = (kind(run.layout, CACHE_DTYPES["bfloat16"]) for kind in (Observer, _WithoutSums))
    works = {
        "bare": lambda batch: _bare(run, batch),
        "collect": lambda batch: _observe(run, whole, batch),
        "to the end": lambda batch: _observe(run, whole, batch, to_the_end=True),
        "no moments": lambda batch: _observe(run, plain, batch),
        "nothing counted": lambda batch: observe(run.model, run.layout, torch.from_numpy(batch.input_ids), lambda *_: None),
    }
    for work in works.values():
        work(run.batches[0])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for turn in range(repeats):
        for batch in run.batches:
            for name in list(works)[:: 1 if turn % 2 == 0 else -1]:
                wall, processor = timed(lambda name=name, batch=batch: works[name](batch))
                times[name].append((wall / batch.input_ids.size, processor / batch.input_ids.size))
    return times


def _time_rows(name: str, times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Wall ratios of medians, with the same of the least and of processor time in parentheses."""
    predicted = PREDICTED[name]

    def share(what: str, less: str | None = None) -> tuple[float, str]:
        values = []
        for summary, clock in ((median, 0), (min, 0), (median, 1), (min, 1)):
            of = {key: summary([each[clock] for each in times[key]]) for key in times}
            values.append((of[what] - (of[less] if less else 0.0)) / of["bare"])
        return values[0], f"{values[0]:.3f} (least {values[1]:.3f}; processor {values[2]:.3f}, least {values[3]:.3f})"

    ratio, text = share("collect")
    bare = median([wall for wall, _ in times["bare"]])
    return [
        row(f"{name}: bare forward", "", f"{1 / bare:,.0f} tokens/s, {len(times['bare'])} batches"),
        row(f"{name}: collection / bare", predicted["ratio"], text, "≤ 1.10", ratio <= TARGET_TIME),
        row(f"{name}: the same without stopping early", predicted["end"], share("to the end")[1]),
        row(f"{name}: of it saved by stopping early", predicted["stop"], share("to the end", "collect")[1]),
        row(f"{name}: of it histograms", predicted["histogram"], share("no moments", "nothing counted")[1]),
        row(f"{name}: of it moments of K and V", predicted["moments"], share("collect", "no moments")[1]),
    ]


def _child(dtype: str, what: str) -> dict[str, int]:
    command = [sys.executable, __file__, "--child", dtype, what]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def _memory(dtype: str, what: str) -> dict[str, int]:
    """Peak resident bytes of a process of its own, from the time its model is loaded."""
    run = _run(DTYPES[dtype], 8, 1024)
    observer = Observer(run.layout, CACHE_DTYPES["bfloat16"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: loading is not what is compared
    for batch in run.batches:
        _bare(run, batch) if what == "bare" else _observe(run, observer, batch)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"peak": int(status["VmHWM"].split()[0]) * 1024}


def _memory_rows(name: str, memory: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    bare, peak = memory["bare"]["peak"], memory["collect"]["peak"]
    text = f"{peak / bare - 1:+.1%} ({bare / 1e6:,.0f} → {peak / 1e6:,.0f} MB)"
    return [row(f"{name}: peak memory", PREDICTED[name]["memory"], text, "≤ +10%", peak / bare - 1 <= TARGET_MEMORY)]


def _file_sizes(run: CollectRun) -> dict[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {}
        for samples in (8, 16):
            part = replace(run.corpus, samples=run.corpus.samples[:samples])
            smaller = replace(run, corpus=part, batches=plan_batches(part, 2048, pad_token_id=0))
            path = Path(folder) / "statistics.safetensors"
            collect(smaller).save(path)
            sizes[smaller.tokens] = path.stat().st_size
        return sizes


def _shapes(run: CollectRun, samples: int, length: int) -> dict[str, Any]:
    source = run.source
    options = CorpusOptions(samples=samples, sequence_length=length)
    text = load_corpus(
        options, load_tokenizer(source), vocab_size=source.config["vocab_size"], context_length=source.config["max_position_embeddings"]
    )
    found = {shape: collect(prepare(run.model, source, text, tokens_per_batch=shape)) for shape in SHAPES}
    result = {f"{shape} against {SHAPES[1]}": _distance(found[shape], found[SHAPES[1]]) for shape in SHAPES if shape != SHAPES[1]}
    result["elements"] = _elements_moved(run, [row.tokens for row in text.samples if len(row.tokens) == length][:4])
    return result


def _distance(one: Statistics, other: Statistics) -> dict[str, float]:
    """Least share of the elements that must have changed code (half the L1 distance of the histograms), and what it does to amax and scales."""
    values = one.values()
    moved, amax = [0.0], [0.0]
    for index, kinds in one.layers.items():
        for kind in set(kinds) - {"q"}:
            mine, theirs = kinds[kind], other.layers[index][kind]
            moved.append(float(np.abs(mine.counts - theirs.counts).sum() / 2 / mine.counts.sum()))
            amax.append(float(np.abs(values[mine.amax_codes] / values[theirs.amax_codes] - 1).max()))
    result = {"least_moved": max(moved), "amax": max(amax)}
    for policy in ("amax", "mse"):
        pairs = zip(*(solve(each, PolicyOptions(policy=policy)).layers for each in (one, other)), strict=True)
        changes = [abs(float(a[0] / b[0]) - 1) for mine, theirs in pairs for a, b in ((mine.k, theirs.k), (mine.v, theirs.v))]
        result |= {f"{policy}_scale": max(changes), f"{policy}_scales_changed": float(np.mean(np.array(changes) > 0))}
    return result


def _elements_moved(run: CollectRun, tokens: list[np.ndarray]) -> dict[str, float]:
    """Share of K and V elements whose 16-bit code differs between rows run together and alone, element by element."""
    together: dict[tuple[int, str], torch.Tensor] = {}
    alone: dict[tuple[int, str], list[torch.Tensor]] = {}
    encode = CACHE_DTYPES["bfloat16"].encode
    observe(run.model, run.layout, torch.from_numpy(np.stack(tokens)).long(), lambda i, kind, x: together.__setitem__((i, kind), encode(x)))
    for one in tokens:
        observe(run.model, run.layout, torch.from_numpy(one[None]).long(), lambda i, kind, x: alone.setdefault((i, kind), []).append(encode(x)))
    kept = [key for key in together if key[1] != "q"]
    share = {key: float((together[key] != torch.cat(alone[key])).double().mean()) for key in kept}
    return {"mean": float(np.mean(list(share.values()))), "most": max(share.values())}


def _shape_rows(name: str, shapes: dict[str, Any]) -> list[dict[str, Any]]:
    elements = shapes["elements"]
    rows = [
        row(f"{name}: K/V codes moved, 4 rows or 1", PREDICTED[name]["moved"], f"mean {elements['mean']:.2%}, worst layer {elements['most']:.2%}")
    ]
    for against, one in shapes.items():
        if against == "elements":
            continue
        scales = f"scales amax {one['amax_scale']:.2%}, mse {one['mse_scale']:.2%} ({one['mse_scales_changed']:.0%} of them)"
        text = f"histogram {one['least_moved']:.2%}, amax {one['amax']:.2%}, {scales}"
        rows.append(row(f"{name}: largest change, {against} a batch", PREDICTED[name]["amax"], text))
    return rows


if __name__ == "__main__":
    main()
