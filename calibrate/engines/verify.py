"""Read-back: real vLLM loads a calibrated checkpoint and says which scales it holds; every one must equal the file's."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.compare import compare_scales
from calibrate.engines.host import check_parallel, choose_kv_dtype, read_config, sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.process import run_child
from calibrate.engines.readback import Readback
from calibrate.engines.source import file_scales, kv_strategy
from calibrate.errors import UsageError
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
        HostError: no vLLM, too few devices, out of memory or time.
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
    _check_heads(config, tensor_parallel_size)
    notes = []
    if kv_cache_dtype is None:
        choice = choose_kv_dtype(config, cuda)
        kv_cache_dtype = choice.kv_cache_dtype
        notes += [choice.note] if choice.note else []
    note(f"starting {engine} on {checkpoint} (kv_cache_dtype {kv_cache_dtype}, {tensor_parallel_size} rank(s)); this takes about a minute")
    job = _job(checkpoint, config, tensor_parallel_size, kv_cache_dtype)
    result, failed = run_child("calibrate.engines.vllm_child", job, timeout, engine_env(tensor_parallel_size, cuda))
    rows = compare_scales(scales, result["ranks"], strategy)
    if failed and all(row.ok for row in rows):
        raise failed  # else the rows say why it could not run
    return Readback(
        checkpoint=str(checkpoint),
        engine=engine,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=backends(result["ranks"]),
        tensor_parallel_size=tensor_parallel_size,
        rows=rows,
        notes=(*notes, *_findings(result, strategy, kv_cache_dtype)),
        seconds=round(time.monotonic() - started, 2),
        error=str(failed or ""),
    )


def _check_heads(config: dict[str, Any], tensor_parallel_size: int) -> None:
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", text.get("n_head"))
    if heads and heads % tensor_parallel_size:
        raise UsageError(f"tensor parallel size {tensor_parallel_size} does not divide the model's {heads} attention heads")


def _job(checkpoint: Path, config: dict[str, Any], tensor_parallel_size: int, kv_cache_dtype: str) -> dict[str, Any]:
    from calibrate.model.source import context_length_of  # here: it brings transformers, which this room's children do without

    return {
        "checkpoint": str(checkpoint.resolve()),
        "dtype": sixteen_bit(config),
        "kv_cache_dtype": kv_cache_dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": min(_CONTEXT, context_length_of(config) or _CONTEXT),
        "seed": 0,
        "text_only": any(name in config for name in ("vision_config", "audio_config")),
    }


def engine_env(tensor_parallel_size: int, cuda: bool) -> dict[str, str]:
    """What an engine child's environment needs beside `process.engine_environment`."""
    if tensor_parallel_size == 1:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engine and worker in the child itself: two imports of vLLM fewer
    # by itself vLLM wants one NUMA node a rank, which few hosts have
    if cuda:
        return {}
    # and unbound ranks would each take every core and spin there
    threads = max(1, (os.cpu_count() or 1) // tensor_parallel_size)
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def backends(ranks: list[list[dict[str, Any]]]) -> str:
    """The attention backends in use, each once, joined by `+`."""
    return "+".join(sorted({record["backend"] for records in ranks for record in records if record["caches"]}))


def _findings(result: dict[str, Any], strategy: str, kv_cache_dtype: str) -> list[str]:
    records = [record for records in result["ranks"] for record in records if record["caches"]]
    tokens = result["tokens"]
    notes = ["vLLM could not generate" if tokens is None else f"vLLM generated {len(tokens)} tokens greedily with this cache: {tokens}"]
    if result["amx"]:
        notes.append("AMX tile state was requested for vLLM's workers, which use it without asking")
    others = sorted({record["module"] for record in records if record["kv_cache_dtype"] != kv_cache_dtype})
    if others:
        notes.append(f"{len(others)} layers keep another cache dtype than {kv_cache_dtype}, first {others[0]}")
    if strategy == "attn_head" and {record["backend"] for record in records} != {"FLASH_ATTN"}:
        notes.append("per-head scales are loaded, but this attention backend applies their maximum (FLASH_ATTN with FA3 applies each)")
    return notes
