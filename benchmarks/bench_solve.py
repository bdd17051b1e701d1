"""Solving scales from saved statistics of a 32-layer model (32 query heads, 8 KV heads, head_dim 128), for every policy and granularity."""

import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import arguments, interleaved, median, present, row

from calibrate.model import AttentionLayer, CacheLayout
from calibrate.scales import POLICIES, PolicyOptions, solve
from calibrate.statistics import CACHE_DTYPES, CODES, PARTS, Observed, Statistics

# Written before the first measurement.
PREDICTED = {
    "file": "50 MB",
    "load": "0.5 s",
    **{("tensor", name): "0.6 s" for name in POLICIES},
    ("tensor", "mse"): "0.9 s",
    **{("head", name): "0.8 s" for name in POLICIES},
    ("head", "mse"): "4 s",
}
LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS, TEMPLATES = 32, 32, 8, 128, 1 << 20, 64
TARGET = 1.0


def main() -> None:
    options = arguments(__doc__, repeats=3)
    statistics = _statistics()
    cases = list(product(("tensor", "head"), POLICIES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.safetensors"
        statistics.save(path)
        statistics = Statistics.load(path)  # as the command has it: its digest comes with loading
        size = path.stat().st_size
        works = {"load": lambda: Statistics.load(path)}
        for granularity, policy in cases:
            works[f"{policy} per {granularity}"] = lambda g=granularity, p=policy: solve(statistics, PolicyOptions(policy=p, granularity=g))
        times = interleaved(works, options.repeats)
    walls = {name: median([wall for wall, _ in each]) for name, each in times.items()}
    rows = [row("statistics file", PREDICTED["file"], f"{size / 1e6:.0f} MB")]
    rows += [row(name, PREDICTED[name], _seconds(times[name])) for name in ("load",)]
    for granularity, policy in cases:
        name = f"{policy} per {granularity}"
        target = ("< 1 s", walls[name] < TARGET) if granularity == "tensor" else ("", None)
        rows.append(row(f"solve, {name}", PREDICTED[granularity, policy], _seconds(times[name]), *target))
    rows.append(row("from the file: load + mse per tensor", "", f"{walls['load'] + walls['mse per tensor']:.2f} s"))
    present("Solving scales, 32 layers: median wall (least; processor)", rows, {"seconds": times, "file_bytes": size}, options.json)


def _seconds(times: list[tuple[float, float]]) -> str:
    walls, processor = zip(*times, strict=True)
    return f"{median(list(walls)):.2f} s ({min(walls):.2f}; {median(list(processor)):.2f})"


def _statistics() -> Statistics:
    generator = np.random.default_rng(0)
    templates = _templates(generator)

    def observed(heads: int, centre: float, sums: bool) -> Observed:
        # a whole power of two in σ moves a bfloat16 histogram by 128 codes, exactly
        chosen = [np.roll(templates[generator.integers(TEMPLATES)], 128 * round(generator.normal(centre, 1))) for _ in range(heads)]
        counts = np.stack(chosen)
        amax = np.array([np.flatnonzero(one)[-1] for one in counts], dtype=np.int32)
        limbs = np.zeros((2, 4, heads, HEAD_DIM), dtype=np.int64) if sums else None
        return Observed(counts, np.tile(amax, (PARTS, 1)), limbs)

    layers = {index: {"k": observed(KV_HEADS, 1, True), "v": observed(KV_HEADS, -1, True), "q": observed(HEADS, 1, False)} for index in range(LAYERS)}
    layout = CacheLayout(
        "llama",
        tuple(AttentionLayer(index, f"model.layers.{index}.self_attn", index, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM) for index in range(LAYERS)),
    )
    counted = {"tokens": TOKENS, "documents": 1, "samples": 1}
    return Statistics(
        CACHE_DTYPES["bfloat16"],
        layers,
        layout.as_dict(),
        counted,
        ({"model": {"fingerprint": "0" * 64}, "corpus": {"digest": "0" * 64}, "batches": "0" * 64},),
    )


def _templates(generator: np.random.Generator) -> np.ndarray:
    """Histograms of a head: gaussian channels whose σ varies, a few of them outliers ten times as wide. int64 [templates, 32768]."""
    values = CACHE_DTYPES["bfloat16"].decode()
    finite = int(CACHE_DTYPES["bfloat16"].first_nonfinite)
    edges = np.concatenate(([0.0], (values[: finite - 1] + values[1:finite]) / 2, [np.inf]))  # what rounds to each code
    counts = np.zeros((TEMPLATES, CODES))
    for template in range(TEMPLATES):
        spread = np.exp(generator.normal(0, 0.5, 8))
        for sigma, share in zip([*spread, 10.0], [*[0.12] * 8, 0.04], strict=True):
            below = torch.special.erf(torch.from_numpy(edges / (sigma * np.sqrt(2)))).numpy()
            counts[template, :finite] += TOKENS * HEAD_DIM * share * np.diff(below)
    return np.floor(counts + generator.random(counts.shape)).astype(np.int64)  # rounded at random, so that tails are sparse


if __name__ == "__main__":
    main()
