"""Many small models through vLLM's real weight loader in one child: seconds each, any CPU. For family matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.compare import compare_scales
from calibrate.engines.host import choose_kv_dtype, read_config, sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.process import run_child
from calibrate.engines.readback import Readback
from calibrate.engines.serving import contradiction, serving
from calibrate.engines.source import as_loaded, file_scales, is_modelopt, kinds_of, kv_strategy
from calibrate.engines.verify import backends, check_looked_at, form_notes
from calibrate.errors import UsageError


def load_scales(
    checkpoints: Sequence[Path], *, expected: Sequence[Mapping[str, np.ndarray] | None] | None = None, timeout: float = 900
) -> list[Readback]:
    """Load each checkpoint with vLLM's model loader in one child process and compare its scales as `verify_checkpoint` does.

    The cache dtype is 16-bit (FP8 for ModelOpt's form, whose scales vLLM ignores otherwise), nothing is generated. A checkpoint that vLLM
    refuses gets a Readback with vLLM's message in `error`.

    Raises:
        UsageError, HostError, CheckFailed: as `verify_checkpoint`; CheckFailed only when the child itself dies.
    """
    truths = expected or [None] * len(checkpoints)
    if len(truths) != len(checkpoints):
        raise UsageError(f"{len(checkpoints)} checkpoints but {len(truths)} expectations")
    configs = [read_config(folder) for folder in checkpoints]
    strategies = [kv_strategy(config, folder) for config, folder in zip(configs, checkpoints, strict=True)]
    scales = [file_scales(folder) if truth is None else truth for folder, truth in zip(checkpoints, truths, strict=True)]
    engine = vllm_distribution()
    cuda = uses_cuda(engine)
    models = [_model(folder, config, cuda) for folder, config in zip(checkpoints, configs, strict=True)]
    job = {"models": models, "device": "cuda" if cuda else "cpu"}
    result, failed = run_child("calibrate.engines.light_child", job, timeout, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    if failed:
        raise failed
    return [_readback(engine, *item) for item in zip(models, configs, result["models"], scales, strategies, strict=True)]


def _model(folder: Path, config: dict[str, Any], cuda: bool) -> dict[str, Any]:
    dtype = kv_cache_dtype = sixteen_bit(config)
    if is_modelopt(config):
        choice = choose_kv_dtype(config, cuda)
        kv_cache_dtype = choice.kv_cache_dtype
        check_looked_at(config, kv_cache_dtype, [choice.note])
    return {"model": str(folder.resolve()), "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, **serving(folder).arguments()}


def _readback(
    engine: str, model: dict[str, Any], config: dict[str, Any], answer: dict[str, Any], scales: Mapping[str, np.ndarray], strategy: str
) -> Readback:
    ranks = [answer["records"]] if not answer["error"] else []
    return Readback(
        checkpoint=model["model"],
        engine=engine,
        kv_cache_dtype=model["kv_cache_dtype"],
        attention_backend=backends(ranks),
        tensor_parallel_size=1,
        rows=compare_scales(as_loaded(scales, config, model["dtype"]), ranks, strategy, kinds_of(config)),
        notes=("weights loaded by vLLM's model loader alone; nothing was run", *form_notes(config, scales, ranks)),
        seconds=answer["seconds"],
        error=answer["error"] or contradiction(Path(model["model"]), ranks, model["kv_cache_dtype"]),
    )
