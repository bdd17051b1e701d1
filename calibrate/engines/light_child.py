"""The child of `light.load_scales`. `python -m … JOB.json RESULT.json`."""

import gc
import socket
import time
import traceback
from collections.abc import Iterator
from typing import Any

from calibrate.engines.child import serve
from calibrate.engines.extension import scales_of


def load_all(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """job: `models` (each vLLM's `EngineArgs`) and `device`. Yields once, for each `records`, `error` and `seconds`."""
    import torch

    if job["device"] == "cpu":
        from vllm.model_executor.models import registry

        torch.accelerator.empty_cache = lambda: None  # vLLM's loader calls it; a CPU build of torch has no accelerator
        registry._run_in_subprocess = lambda inspect: inspect()  # a process a model class, for CUDA's sake: eight seconds each
    yield {"models": [_load(model, job["device"]) for model in job["models"]]}


def _load(model: dict[str, Any], device: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        records, error = _records(model, device), ""
    except Exception as refusal:
        traceback.print_exc()  # into the log; the matrix goes on, this model's row carries the message
        records, error = [], " ".join(f"{type(refusal).__name__}: {refusal}".split())
    gc.collect()
    return {"records": records, "error": error, "seconds": round(time.monotonic() - started, 2)}


def _records(model: dict[str, Any], device: str) -> list[dict[str, Any]]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, **model)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        _start_distributed("gloo" if device == "cpu" else "nccl")
        return scales_of(get_model(vllm_config=config))


def _start_distributed(backend: str) -> None:
    import torch
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import destroy_model_parallel

    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend)
    destroy_model_parallel()  # vLLM makes the expert group only while the current model is an MoE: make the groups anew for each
    ensure_model_parallel_initialized(1, 1)


if __name__ == "__main__":
    serve(load_all)
