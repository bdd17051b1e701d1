"""The child of `bench`: runs one of vLLM's own benchmarks (`vllm bench throughput` or `latency`). `python -m … JOB.json RESULT.json`."""

import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibrate.engines.child import serve


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """job: `benchmark` and `arguments`, its command line. Yields vLLM's own JSON as `results`, and what its cache holds as `capacity`."""
    import torch
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # as extension.request_amx: vLLM's CPU attention uses AMX without asking
    benchmark = importlib.import_module(f"vllm.benchmarks.{job['benchmark']}")
    parser = FlexibleArgumentParser()
    benchmark.add_cli_args(parser)
    capacity: dict[str, Any] = {}
    build = vllm.LLM.from_engine_args

    def build_and_look(*args: Any, **options: Any) -> Any:
        llm = build(*args, **options)
        capacity.update(_capacity(llm.llm_engine.vllm_config))
        return llm

    vllm.LLM.from_engine_args = build_and_look  # the benchmarks keep their engine to themselves
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.json"
        benchmark.main(parser.parse_args([*job["arguments"], "--output-json", str(found)]))
        yield {"results": json.loads(found.read_text(encoding="utf-8")), "capacity": capacity}


def _capacity(config: Any) -> dict[str, Any]:
    cache = config.cache_config
    return {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "tokens": getattr(cache, "kv_cache_size_tokens", None),
        "max_concurrency": getattr(cache, "kv_cache_max_concurrency", None),
        "max_model_len": config.model_config.max_model_len,
    }


if __name__ == "__main__":
    serve(measure)
