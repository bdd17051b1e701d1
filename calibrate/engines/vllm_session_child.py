"""The child of a vLLM session: keeps one LLM alive, scores rows and generates. `python -m … JOB.json`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.engines.child import converse
from calibrate.engines.extension import ScaleReader, scales_of

TOP = 20  # likeliest tokens kept at every position
_ROWS_AT_ONCE = 32  # bounds the Python lists in which vLLM returns log probabilities


class SessionWorker(ScaleReader):
    """vLLM's `worker_extension_cls` for sessions."""

    def cache_layers(self) -> list[dict[str, Any]]:
        """`extension.scales_of`, and for each module what its cache tensor really is: `cache_dtype` (None: none bound) and `flash` version."""
        model = self.get_model()
        modules = dict(model.named_modules())
        return [record | _tensor_facts(modules[record["module"]]) for record in scales_of(model)]

    def cache_bytes(self) -> int:
        """Bytes of all cache tensors on this rank; views of one allocation count once."""
        caches = [_cache_of(module) for module in self.get_model().modules() if hasattr(module, "kv_cache")]
        return sum({cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches if cache is not None}.values())


def _cache_of(module: Any) -> Any:
    cache = module.kv_cache
    if isinstance(cache, list | tuple):  # one for each pipeline engine in older vLLM, several tensors for recurrent states
        cache = cache[0] if cache else None
    return None if cache is None or cache.numel() == 0 else cache


def _tensor_facts(module: Any) -> dict[str, Any]:
    cache = _cache_of(module)
    return {
        "cache_dtype": None if cache is None else str(cache.dtype).removeprefix("torch."),
        "flash": getattr(module.impl, "vllm_flash_attn_version", None),
    }


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """job: `arguments` of vllm.LLM. Says `ranks` (records of `cache_layers`), `cache_bytes` of each rank, `capacity`, `dtype` and `device`."""
    import vllm

    llm = vllm.LLM(
        **job["arguments"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        max_logprobs=TOP,
        worker_extension_cls="calibrate.engines.vllm_session_child.SessionWorker",
    )
    llm.collective_rpc("request_amx")
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    hello = {
        "ranks": llm.collective_rpc("cache_layers"),
        "cache_bytes": llm.collective_rpc("cache_bytes"),
        "capacity": {
            "blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
            "tokens": getattr(cache, "kv_cache_size_tokens", None),
            "max_concurrency": getattr(cache, "kv_cache_max_concurrency", None),
        },
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": str(config.device_config.device_type),
    }
    work = {"score": _score, "generate": _generate}
    return hello, lambda request: work[request["do"]](llm, request)


def _score(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """`input`: npz with `tokens` (all rows, joined) and `lengths`. Writes `output`: `logprob`, `top_ids`, `top_logprobs`, rows joined."""
    from vllm import SamplingParams

    with np.load(request["input"]) as given:
        rows = np.split(given["tokens"], np.cumsum(given["lengths"])[:-1])
    options = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, flat_logprobs=True, detokenize=False, ignore_eos=True)
    ids, logprobs = [], []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        answers = llm.generate([{"prompt_token_ids": row.tolist()} for row in part], options, use_tqdm=False)
        for row, answer in zip(part, answers, strict=True):
            found = answer.prompt_logprobs
            shape = (len(row) - 1, TOP + 1)  # at each position but the first: the token that stands there, then the likeliest
            ids.append(np.array(found.token_ids, dtype=np.int32).reshape(shape))
            logprobs.append(np.array(found.logprobs, dtype=np.float32).reshape(shape))
    all_ids, all_logprobs = np.concatenate(ids), np.concatenate(logprobs)
    np.savez(Path(request["output"]), logprob=all_logprobs[:, 0], top_ids=all_ids[:, 1:], top_logprobs=all_logprobs[:, 1:])
    return {}


def _generate(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    stop = request["stop_ids"]
    options = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=stop, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], options, use_tqdm=False)
    return {"tokens": [_without_stop(list(answer.outputs[0].token_ids), stop) for answer in answers]}


def _without_stop(tokens: list[int], stop: list[int]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in stop else tokens


if __name__ == "__main__":
    converse(start)
