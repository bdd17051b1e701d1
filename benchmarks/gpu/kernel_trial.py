"""Variants of the counting kernel on one GPU: right first, then timed, at the shape of a Llama-3-8B layer.

usage: python benchmarks/gpu/kernel_trial.py --json FILE [--tokens 8192] [--quick]
"""

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from calibrate.collect.counting import sums_of
from calibrate.collect.histogram_cuda import Histogram, Shape, chunks_of
from calibrate.statistics import CACHE_DTYPES, CODES

KV_HEADS, HEADS, DIM, SETS = 8, 32, 128, 3
# Written before the first run, µs of K + V + Q of a layer at 8,192 tokens (0.1 GB of memory: 25 µs at 4 TB/s): shared atomics at 4 to 5 elements a
# clock and multiprocessor.
PREDICTED = {"cuda": 90, "torch.bincount": 1300}


def by_bincount(values, counts, amax, *, sums):
    heads = values.shape[1]
    bits = values.transpose(0, 1).view(torch.int16)
    codes = (bits & (CODES - 1)).flatten(1)
    torch.maximum(amax, codes.amax(dim=1).to(torch.int32), out=amax)
    offsets = torch.arange(heads, device=values.device, dtype=torch.int32)[:, None] * CODES
    counts += torch.bincount((codes.int() + offsets).flatten(), minlength=heads * CODES).view(heads, CODES)
    return sums_of(values.transpose(0, 1).to(torch.float64)) if sums else None


def data(kind: str, heads: int, batch: int, seq: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (batch, seq, heads, DIM)
    if kind == "constant":
        return torch.full(shape, 0.75, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    values = torch.randn(shape, generator=generator, device="cuda")
    if kind == "skewed":  # a few channels large, most values in a few codes
        values = (values * 0.02 + 1.0).bfloat16()
        values[..., :2] *= 200
    return values.bfloat16().transpose(1, 2)


def timed(work, repeats: int) -> list[float]:
    """µs of each repeat, by events."""
    for _ in range(2):
        work(0)
    events = []
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles: the host runs ahead, so that no launch is in the times
    for number in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(number)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for begin, end in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    started, found = time.perf_counter(), {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "predicted_us": PREDICTED, "rows": []}
    dtype, device = CACHE_DTYPES["bfloat16"], torch.device("cuda:0")
    batch, seq, repeats = max(1, arguments.tokens // 2048), min(2048, arguments.tokens), 5 if arguments.quick else 30
    lengths = torch.full((batch,), seq, dtype=torch.int32, device=device)
    found["chunks"] = {heads: chunks_of(heads, batch * seq, 132) for heads in (KV_HEADS, HEADS)}

    def say(row: dict) -> None:
        found["rows"].append(row)
        print(f"{time.perf_counter() - started:6.1f} s {json.dumps(row)}", flush=True)
        arguments.json.write_text(json.dumps(found, indent=1))

    def tables(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros((heads, CODES), dtype=torch.int64, device=device), torch.zeros(heads, dtype=torch.int32, device=device)

    threads, ahead = ((512, 1024), (4,)) if arguments.quick else ((256, 512, 768, 1024), (2, 4, 8))
    shapes = [Shape(*both) for both in itertools.product(threads, ahead)]
    kinds = ("normal", "skewed", "constant")
    inputs = {kind: {heads: [data(kind, heads, batch, seq, seed) for seed in range(SETS)] for heads in (KV_HEADS, HEADS)} for kind in kinds}
    expected = {kind: {heads: tables(heads) for heads in inputs[kind]} for kind in kinds}
    for kind in kinds:
        for heads, (counts, amax) in expected[kind].items():
            by_bincount(inputs[kind][heads][0], counts, amax, sums=False)
    exact = {kind: sums_of(inputs[kind][KV_HEADS][0].transpose(0, 1).to(torch.float64)) for kind in kinds}

    def measure(name: str, work, most: int = repeats) -> None:
        """`work(values, counts, amax, sums)` gives the sums where asked for."""
        row: dict = {"name": name}
        try:
            for kind in kinds:
                for heads, sums in ((KV_HEADS, True), (HEADS, False)):
                    given, (counts, amax) = inputs[kind][heads], tables(heads)
                    got = work(given[0], counts, amax, sums)
                    right = bool((counts == expected[kind][heads][0]).all() and (amax == expected[kind][heads][1]).all())
                    if got is not None:
                        again = work(given[0], *tables(heads), sums)
                        right = right and torch.equal(got, again) and torch.allclose(got, exact[kind], rtol=1e-9, atol=1e-6)
                    times = timed(partial(_turn, work, given, counts, amax, sums), most)
                    row[f"{kind} {'K' if sums else 'Q'}"] = [round(statistics.median(times), 1), right]
                row[f"{kind} layer"] = round(2 * row[f"{kind} K"][0] + row[f"{kind} Q"][0], 1)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        say(row)

    def by_cuda(shape: Shape):
        kernel = Histogram(device, dtype, shape)
        return lambda values, counts, amax, sums: kernel.count(values, lengths, counts, amax, sums=sums)

    for shape in shapes:
        name = f"cuda, {shape.threads} threads, {shape.ahead} ahead"
        try:
            measure(name, by_cuda(shape))
        except Exception as error:
            say({"name": name, "error": f"{type(error).__name__}: {error}"[:500]})
    try:
        kernel, given = by_cuda(shapes[0]), inputs["normal"][KV_HEADS]
        counts, amax = tables(KV_HEADS)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for number in range(100):
            _turn(kernel, given, counts, amax, True, number)
        found["host_us_a_call"] = round(1e4 * (time.perf_counter() - begun), 1)
        print(f"host: {found['host_us_a_call']} µs a call", flush=True)
    except Exception as error:
        print(f"host: {error}", flush=True)
    measure("torch.bincount", lambda values, counts, amax, sums: by_bincount(values, counts, amax, sums=sums), 6)


def _turn(work, given, counts, amax, sums, number: int) -> None:
    work(given[number % SETS], counts, amax, sums)


if __name__ == "__main__":
    main()
