"""What an FP8 cache buys when serving: capacity, throughput and latency of one model with both caches at equal memory, by vLLM's own benchmarks."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from calibrate.engines.host import check_parallel, choose_kv_dtype, read_config, sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.process import run_child
from calibrate.engines.verify import engine_env
from calibrate.errors import HostError, UsageError
from calibrate.progress import note

SCHEMA = "kv-calibrate/bench/1"
_CHILD = "calibrate.engines.vllm_bench_child"
_CPU_CACHE_BYTES = 1 << 30
_NOISE = 0.03  # two runs of one setting differ by about this much


@dataclass(frozen=True)
class BenchOptions:
    """The load, and the memory that both caches get.

    Attributes:
        input_len, output_len: tokens of each request. num_prompts: requests of the throughput run, all there at its start.
        batch_size, iterations: of the latency run. repeats: of both, the caches taking turns; medians are reported.
        kv_cache_memory: bytes of the cache on each rank; None: `gpu_memory_utilization` decides on a GPU, 1 GiB on a CPU.
        max_num_seqs: most requests at once, None for vLLM's own default.
        tokenizer: folder, where it is not the model's. dummy_weights: random weights, for a folder that holds only a config and a tokenizer.
    """

    input_len: int = 1024
    output_len: int = 128
    num_prompts: int = 200
    batch_size: int = 8
    iterations: int = 5
    repeats: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    attention_backend: str | None = None
    tokenizer: str | None = None
    dummy_weights: bool = False
    eager: bool = False
    timeout: float = 1800


@dataclass(frozen=True)
class Side:
    """One cache: vLLM's capacity figures, and medians over the repeats (each of which is in `runs`)."""

    kv_cache_dtype: str
    capacity_tokens: int | None
    blocks: int
    block_size: int
    max_concurrency: float | None
    requests_per_second: float
    tokens_per_second: float
    latency_seconds: float
    runs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Decision:
    """A line of advice: in which case, what to do, why."""

    case: str
    do: str
    because: str


@dataclass(frozen=True)
class BenchResult:
    model: str
    engine: str
    options: BenchOptions
    sixteen_bit: Side
    fp8: Side
    capacity_ratio: float
    throughput_ratio: float
    latency_ratio: float
    decisions: tuple[Decision, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def bench(model: Path, options: BenchOptions) -> BenchResult:
    """Measure `model` (a checkpoint folder, calibrated or not: scales do not change speed) with a 16-bit and an FP8 cache.

    Raises:
        UsageError: no such folder, a load that the model's context cannot hold. HostError: no vLLM, or no FP8 here.
        CheckFailed: vLLM refused to run it.
    """
    config = read_config(model)
    _check(config, options)
    engine = vllm_distribution()
    cuda = uses_cuda(engine)
    check_parallel(options.tensor_parallel_size, cuda)
    choice = choose_kv_dtype(config, cuda)
    if choice.kv_cache_dtype != "fp8":
        raise HostError(f"bench compares a 16-bit with an FP8 cache, and {choice.note.partition(';')[0]}")
    if options.kv_cache_memory is None and not cuda:
        options = replace(options, kv_cache_memory=_CPU_CACHE_BYTES)
    runs: dict[str, list[dict[str, Any]]] = {sixteen_bit(config): [], "fp8": []}
    for repeat in range(options.repeats):
        for dtype in runs if repeat % 2 == 0 else reversed(runs):
            note(f"{engine}: {dtype} cache, run {repeat + 1} of {options.repeats}")
            runs[dtype].append(_run(model, dtype, options, cuda))
    wide, narrow = (_side(dtype, found) for dtype, found in runs.items())
    capacity = _ratio(_capacity(narrow), _capacity(wide))
    throughput = _ratio(narrow.tokens_per_second, wide.tokens_per_second)
    latency = _ratio(narrow.latency_seconds, wide.latency_seconds)
    return BenchResult(
        str(model), engine, options, wide, narrow, capacity, throughput, latency, decisions(capacity, throughput, latency, wide, options)
    )


def _check(config: dict[str, Any], options: BenchOptions) -> None:
    for name in ("input_len", "output_len", "num_prompts", "batch_size", "iterations", "repeats"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name.replace('_', ' ')} must be at least 1")
    from calibrate.model.source import context_length_of  # here: it brings transformers, seconds that a bench's help need not take

    longest = context_length_of(config)
    if longest and options.input_len + options.output_len > longest:
        raise UsageError(f"{options.input_len} + {options.output_len} tokens are more than the model's context of {longest}")


def _run(model: Path, dtype: str, options: BenchOptions, cuda: bool) -> dict[str, Any]:
    env = engine_env(options.tensor_parallel_size, cuda)
    found = {}
    loads = {"throughput": _throughput_load(options), "latency": _latency_load(options)}
    for benchmark, load in loads.items():
        job = {"benchmark": benchmark, "arguments": [*load, *_engine_arguments(model, dtype, options)]}
        result, failed = run_child(_CHILD, job, options.timeout, env)
        if failed:
            raise failed
        found[benchmark] = result["results"]
        found.setdefault("capacity", result["capacity"])
    return found


def _throughput_load(options: BenchOptions) -> list[str]:
    size = ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len), "--num-prompts", str(options.num_prompts)]
    return ["--dataset-name", "random", *size, "--num-warmups", str(min(8, options.num_prompts))]


def _latency_load(options: BenchOptions) -> list[str]:
    size = ["--input-len", str(options.input_len), "--output-len", str(options.output_len), "--batch-size", str(options.batch_size)]
    return [*size, "--num-iters-warmup", "1", "--num-iters", str(options.iterations)]


def _engine_arguments(model: Path, dtype: str, options: BenchOptions) -> list[str]:
    arguments = ["--model", str(model.resolve()), "--kv-cache-dtype", dtype, "--seed", "0", "--no-enable-prefix-caching", "--disable-detokenize"]
    arguments += ["--max-model-len", str(options.input_len + options.output_len), "--tensor-parallel-size", str(options.tensor_parallel_size)]
    if options.kv_cache_memory is None:
        arguments += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    else:
        arguments += ["--kv-cache-memory-bytes", str(options.kv_cache_memory)]
    for name in ("max_num_seqs", "attention_backend", "tokenizer"):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    arguments += ["--load-format", "dummy"] if options.dummy_weights else []
    return arguments + (["--enforce-eager"] if options.eager else [])


def _side(dtype: str, runs: list[dict[str, Any]]) -> Side:
    capacity = runs[0]["capacity"]
    return Side(
        kv_cache_dtype=dtype,
        capacity_tokens=capacity["tokens"],
        blocks=capacity["blocks"],
        block_size=capacity["block_size"],
        max_concurrency=capacity["max_concurrency"],
        requests_per_second=median(run["throughput"]["requests_per_second"] for run in runs),
        tokens_per_second=median(run["throughput"]["tokens_per_second"] for run in runs),
        latency_seconds=median(run["latency"]["percentiles"]["50"] for run in runs),
        runs=tuple(runs),
    )


def _capacity(side: Side) -> int:
    return side.capacity_tokens or side.blocks * side.block_size


def _ratio(new: float, old: float) -> float:
    return round(new / old, 4)


def decisions(capacity: float, throughput: float, latency: float, wide: Side, options: BenchOptions) -> tuple[Decision, ...]:
    """What the figures mean for a user, in four cases. Ratios are FP8 to 16-bit."""
    held = _capacity(wide)
    asked = min(options.num_prompts, options.max_num_seqs or options.num_prompts) * (options.input_len + options.output_len)
    short = asked > held
    load = f"this load wants {asked:,} tokens at once, the 16-bit cache holds {held:,}"
    faster = f"{throughput:.2f} times the tokens per second, at a fixed batch of {options.batch_size} {latency:.2f} times the time"
    if throughput > 1 + _NOISE:
        advice = "serve with FP8 and let the batch grow (max_num_seqs)"
    elif throughput < 1 - _NOISE:
        advice = "stay with 16 bits on this hardware and load"
    else:
        advice = "FP8 changes nothing here; it pays where more requests wait than fit"
    return (
        Decision("enough memory", "keep the 16-bit cache", f"every format costs some accuracy, and {load}" + (": yours is short" if short else "")),
        Decision("short of memory", "calibrate and serve with FP8", f"the same memory holds {capacity:.2f} times the tokens; {load}"),
        Decision("want throughput", advice, f"measured: {faster}" + ("" if short else "; the whole load fits in 16 bits, so batches did not grow")),
        Decision(
            "want the frontier",
            "look at `kv-calibrate plan` for 4 bits and less, and prove accuracy on your own long texts first",
            "below 8 bits the loss sits at long context and is model-dependent",
        ),
    )
