"""Read-back: real vLLM loads a calibrated checkpoint and says which scales it holds; every one must equal the file's."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.compare import compare_scales
from calibrate.engines.host import (
    check_heads,
    check_parallel,
    choose_kv_dtype,
    read_config,
    sixteen_bit,
    too_slow_to_run,
    uses_cuda,
    vllm_distribution,
)
from calibrate.engines.process import run_child
from calibrate.engines.readback import Readback
from calibrate.engines.serving import contradiction, serving
from calibrate.engines.source import as_loaded, file_scales, is_modelopt, kinds_of, kv_strategy
from calibrate.errors import HostError, UsageError
from calibrate.progress import note

_CONTEXT = 256


def verify_checkpoint(
    checkpoint: Path,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str | None = None,
    timeout: float = 900,
    expected: Mapping[str, np.ndarray] | None = None,
) -> Readback:
    """Start vLLM on `checkpoint` in a child process and compare q, k and v scales of every layer and rank, exactly.

    In ModelOpt's form there are k and v only, vLLM keeps them in the model's type (they are compared after that rounding), and with a 16-bit
    cache it ignores them.

    Args:
        checkpoint: a folder with a `kv_cache_scheme` and `kv_scales.safetensors`.
        tensor_parallel_size: ranks to load it on; each is compared.
        kv_cache_dtype: None decides: `fp8` where this host can run it, else the model's 16-bit type, and the notes say so.
        timeout: seconds for the whole child.
        expected: the scales that must be found, fp32, by tensor name; None takes the checkpoint's own `kv_scales.safetensors`.

    Returns:
        the Readback; its `.ok` is the verdict, a difference does not raise.

    Raises:
        UsageError: no scheme, no scales, no such folder, or ranks that do not divide the heads.
        HostError: no vLLM, too few devices, out of memory or time; ModelOpt's form where this host runs no FP8 cache.
        CheckFailed: vLLM would not load or run the checkpoint; the message quotes its error and names its log.
    """
    started = time.monotonic()
    checkpoint = Path(checkpoint)
    config = read_config(checkpoint)
    strategy = kv_strategy(config, checkpoint)
    scales = file_scales(checkpoint) if expected is None else expected
    engine = vllm_distribution()
    cuda = uses_cuda(engine)
    check_parallel(tensor_parallel_size, cuda)
    check_heads(config, tensor_parallel_size)
    notes = []
    if kv_cache_dtype is None:
        choice = choose_kv_dtype(config, cuda)
        kv_cache_dtype = choice.kv_cache_dtype
        notes += [choice.note] if choice.note else []
    check_looked_at(config, kv_cache_dtype, notes)
    _check_latent(config, kv_cache_dtype, cuda)
    note(f"starting {engine} on {checkpoint} (kv_cache_dtype {kv_cache_dtype}, {tensor_parallel_size} rank(s)); this takes about a minute")
    job = _job(checkpoint, config, tensor_parallel_size, kv_cache_dtype) | {"not_run": too_slow_to_run(config, cuda)}
    result, failed = run_child("calibrate.engines.vllm_child", job, timeout, engine_env(tensor_parallel_size, cuda))
    rows = compare_scales(as_loaded(scales, config, sixteen_bit(config)), result["ranks"], strategy, kinds_of(config))
    if failed and all(row.ok for row in rows):
        raise failed  # else the rows say why it could not run
    return Readback(
        checkpoint=str(checkpoint),
        engine=engine,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=backends(result["ranks"]),
        tensor_parallel_size=tensor_parallel_size,
        rows=rows,
        notes=(*notes, *_findings(result, strategy, kv_cache_dtype), *form_notes(config, scales, result["ranks"])),
        seconds=round(time.monotonic() - started, 2),
        error=str(failed or "") or contradiction(checkpoint, result["ranks"], kv_cache_dtype),
    )


def check_looked_at(config: dict[str, Any], kv_cache_dtype: str, notes: Sequence[str] = ()) -> None:
    """Raise HostError or UsageError where vLLM would not look at the scales: ModelOpt's with any cache but FP8."""
    if not is_modelopt(config) or kv_cache_dtype.startswith("fp8"):
        return
    ignored = "vLLM looks at scales in ModelOpt's form only where the cache is FP8"
    if notes:  # nobody asked for another cache: this host has no FP8
        raise HostError(f"{ignored}, and {notes[-1].partition(';')[0]}: verify on a host that runs FP8, or the checkpoint it was exported from")
    raise UsageError(f"{ignored}, not {kv_cache_dtype}: leave --kv-cache-dtype out")


def form_notes(config: dict[str, Any], scales: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """What is special about a checkpoint in ModelOpt's form; nothing for the others."""
    if not is_modelopt(config):
        return []
    dtype = sixteen_bit(config)
    moved = sum(not np.array_equal(value, scales[name]) for name, value in as_loaded(scales, config, dtype).items())
    held = sorted({value for records in ranks for record in records if record["caches"] for value in record["scales"]["q"]})
    return [
        f"ModelOpt's form: vLLM keeps its scales in {dtype}; they equal the file's after that rounding, which changes {moved} of {len(scales)}",
        f"it has no q scales: vLLM holds {', '.join(f'{value:g}' for value in held) or 'none'} for q",
    ]


def _check_latent(config: dict[str, Any], kv_cache_dtype: str, cuda: bool) -> None:
    """Raise HostError for an FP8 cache of latent attention on a CPU, which vLLM loads and then cannot run."""
    from calibrate.model.support import is_latent  # here: it brings transformers, which this room's children do without

    if is_latent(config) and kv_cache_dtype.startswith("fp8") and not cuda:
        raise HostError("vLLM's CPU backend runs no FP8 cache of multi-head latent attention: verify on a CUDA host")


def _job(checkpoint: Path, config: dict[str, Any], tensor_parallel_size: int, kv_cache_dtype: str) -> dict[str, Any]:
    from calibrate.model.source import context_length_of  # here: it brings transformers, which this room's children do without

    return {
        "checkpoint": str(checkpoint.resolve()),
        "dtype": sixteen_bit(config),
        "kv_cache_dtype": kv_cache_dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": min(_CONTEXT, context_length_of(config) or _CONTEXT),
        "seed": 0,
        "serving": serving(checkpoint).arguments(),
        "text_only": any(name in config for name in ("vision_config", "audio_config")),
    }


def engine_env(tensor_parallel_size: int, cuda: bool) -> dict[str, str]:
    """What an engine child's environment needs beside `process.engine_environment`."""
    if tensor_parallel_size == 1:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engine and worker in the child itself: two imports of vLLM fewer
    if cuda:
        return {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # forked workers could not use CUDA, which the engine's process has started
    # by itself vLLM wants one NUMA node a rank, which few hosts have, and unbound ranks would each take every core and spin there
    threads = max(1, (os.cpu_count() or 1) // tensor_parallel_size)
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def backends(ranks: list[list[dict[str, Any]]]) -> str:
    """The attention backends in use, each once, joined by `+`."""
    return "+".join(sorted({record["backend"] for records in ranks for record in records if record["caches"]}))


def _findings(result: dict[str, Any], strategy: str, kv_cache_dtype: str) -> list[str]:
    records = [record for records in result["ranks"] for record in records if record["caches"]]
    tokens = result["tokens"]
    notes = [
        result["not_run"] or "vLLM could not generate"
        if tokens is None
        else f"vLLM generated {len(tokens)} tokens greedily with this cache: {tokens}"
    ]
    if result["amx"]:
        notes.append("AMX tile state was requested for vLLM's workers, which use it without asking")
    others = sorted({record["module"] for record in records if record["kv_cache_dtype"] != kv_cache_dtype})
    if others:
        notes.append(f"{len(others)} layers keep another cache dtype than {kv_cache_dtype}, first {others[0]}")
    if strategy == "attn_head" and {record["backend"] for record in records} != {"FLASH_ATTN"}:
        notes.append("per-head scales are loaded, but this attention backend applies their maximum (FLASH_ATTN with FA3 applies each)")
    return notes
