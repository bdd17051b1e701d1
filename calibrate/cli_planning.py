"""The commands for whoever serves a model: `plan` before it, `bench` on it."""

from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
ranks = click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True)
utilization = click.option(
    "--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True, help="Share of the memory vLLM may use."
)
_GIB = 1 << 30


@click.command()
@click.argument("model")
@click.option("--gpu-memory", required=True, help="Memory of one GPU, as 80GiB or 24GB.")
@click.option("--context", type=click.IntRange(1), required=True, help="Tokens of a sequence.")
@click.option("--reserve", default="2GiB", show_default=True, help="Memory for activations and CUDA graphs.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a PNG: cache against weights, and sequences that fit, as the context grows.")
@click.option("--skip-layers", help="Layers that keep 16 bits: 0,1,sliding_window, or none. Default: those that the checkpoint was written with.")
@utilization
@ranks
@as_json
def plan(model: str, gpu_memory: str, context: int, reserve: str, plot: Path | None, skip_layers: str | None, as_json: bool, **options: Any) -> None:
    """KV-cache bytes and sequences that fit for MODEL (a folder, a config.json or a hub id) in every cache format. Needs no weights."""
    from calibrate.cli import show
    from calibrate.evaluate.planning import make_plan, model_memory, parse_size
    from calibrate.evaluate.planplot import draw
    from calibrate.model import resolve_model
    from calibrate.model.skip import parse_skip_layers

    total, kept, number = parse_size(gpu_memory), parse_size(reserve), options["tensor_parallel_size"]
    folder = resolve_model(model)
    made = make_plan(
        folder.resolve().name if folder.is_dir() else folder.resolve().parent.name,
        model_memory(folder, number, skip_layers=None if skip_layers is None else parse_skip_layers(skip_layers)),
        gpu_memory=total,
        context=context,
        utilization=options["gpu_memory_utilization"],
        reserve=kept,
        tensor_parallel_size=number,
    )
    if plot is not None:
        draw(made, plot)
    show(as_json, made.as_dict(), lambda: _plan_table(made))


@click.command()
@click.argument("model")
@click.option("--input-len", type=int, default=1024, show_default=True, help="Prompt tokens of a request.")
@click.option("--output-len", type=int, default=128, show_default=True, help="Generated tokens of a request.")
@click.option("--num-prompts", type=int, default=200, show_default=True, help="Requests of the throughput run.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Requests at once in the latency run.")
@click.option("--iterations", type=int, default=5, show_default=True, help="Iterations of the latency run.")
@click.option("--repeats", type=int, default=1, show_default=True, help="Runs of each cache, taking turns; medians are reported.")
@click.option("--kv-cache-memory", help="Cache memory of both, as 8GiB. Default: what the utilization leaves; 1 GiB on a CPU.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Most requests at once. Default: vLLM's.")
@click.option("--attention-backend", help="As vLLM names it. Default: vLLM's choice.")
@click.option("--tokenizer", help="Folder of the tokenizer, where it is not the model's.")
@click.option("--dummy-weights", is_flag=True, help="Random weights: MODEL may be a config and a tokenizer alone.")
@click.option("--eager", is_flag=True, help="No CUDA graphs and no compilation: a quicker start, slower runs.")
@click.option("--timeout", type=click.FloatRange(1), default=1800.0, show_default=True, help="Seconds for each start with its run.")
@utilization
@ranks
@as_json
def bench(model: str, kv_cache_memory: str | None, as_json: bool, **options: Any) -> None:
    """Serve MODEL with a 16-bit and an FP8 cache of equal memory: capacity, throughput, latency, and what to make of them."""
    from calibrate.cli import show
    from calibrate.evaluate.planning import parse_size
    from calibrate.evaluate.serving import BenchOptions, bench
    from calibrate.model import resolve_model

    memory = None if kv_cache_memory is None else parse_size(kv_cache_memory)
    result = bench(resolve_model(model), BenchOptions(kv_cache_memory=memory, **options))
    show(as_json, result.as_dict(), lambda: _bench_table(result))


def _plan_table(made: Any) -> RenderableType:
    memory = made.memory
    title = (
        f"{made.model}: weights {memory.weight_bytes / _GIB:.2f} GiB ({memory.weights_from}), {made.cache_bytes / _GIB:.2f} GiB left for the cache "
        f"of each GPU, context {made.context:,}"
    )
    table = Table("format", "bytes/token", "growing", "GiB a sequence", "sequences", "compression", "longest alone", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in made.formats:
        row = (f"{one.first_token_bytes:,.0f}", f"{one.token_bytes:,.0f}", f"{one.sequence_bytes / _GIB:.3f}", f"{one.sequences:,}")
        table.add_row(one.name, *row, f"{one.compression:.2f}×", f"{one.longest_single:,}")
    where: dict[str, list[str]] = {}
    for one in made.formats:
        where.setdefault(one.note, []).append(one.name)
    lines = [f"  {', '.join(names)}: {note}" for note, names in where.items()] + [f"  note: {line}" for line in made.notes]
    return Group(table, *map(Text, lines))


def _bench_table(result: Any) -> RenderableType:
    table = Table(
        "cache", "capacity, tokens", "blocks", "requests at once", "requests/s", "tokens/s", "latency, s", title=f"{result.model}, {result.engine}"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for side in (result.sixteen_bit, result.fp8):
        tokens = side.capacity_tokens or side.blocks * side.block_size
        most = "" if side.max_concurrency is None else f"{side.max_concurrency:.1f}"
        speed = (f"{side.requests_per_second:.2f}", f"{side.tokens_per_second:,.0f}", f"{side.latency_seconds:.3f}")
        table.add_row(side.kv_cache_dtype, f"{tokens:,}", f"{side.blocks:,} × {side.block_size}", most, *speed)
    ratios = ("FP8 / 16-bit", f"{result.capacity_ratio:.2f}×", "", "", "", f"{result.throughput_ratio:.2f}×", f"{result.latency_ratio:.2f}×")
    table.add_row(*ratios, style="bold")
    return Group(table, *(Text(f"  {one.case}: {one.do} ({one.because})") for one in result.decisions))
