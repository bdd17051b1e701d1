"""The child of `verify`: starts real vLLM on a checkpoint, reads the scales back, generates tokens. `python -m … JOB.json RESULT.json`."""

from collections.abc import Iterator
from typing import Any

from calibrate.engines.child import serve

# One block of 128 tokens of a 70B model is about 40 MiB; the cache only has to hold one short request.
_KV_BYTES = 512 << 20
_PROMPT = (1, 5, 7, 9, 11, 13, 17, 19)
_NEW_TOKENS = 4


def read_back(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """job: `checkpoint`, `kv_cache_dtype`, `dtype`, `tensor_parallel_size`, `max_model_len`, `seed`, `text_only`,
    `serving` (further arguments of vllm.LLM), `not_run` (why nothing is to be generated, or "").

    Yields `ranks` (records of `extension.scales_of`), `amx` and `tokens`: None at first, so that the scales are known even if running fails.
    """
    import vllm

    llm = vllm.LLM(
        model=job["checkpoint"],
        dtype=job["dtype"],
        kv_cache_dtype=job["kv_cache_dtype"],
        tensor_parallel_size=job["tensor_parallel_size"],
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=2048,  # multimodal and hybrid models need room for one whole item
        max_num_seqs=1,
        kv_cache_memory_bytes=_KV_BYTES,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=job["seed"],
        worker_extension_cls="calibrate.engines.extension.ScaleReader",
        disable_log_stats=True,
        **job["serving"],
        **({"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}} if job["text_only"] else {}),
    )
    amx = llm.collective_rpc("request_amx")
    loaded = {"ranks": llm.collective_rpc("kv_scales"), "amx": any(amx), "not_run": job["not_run"]}
    yield loaded | {"tokens": None}
    if not job["not_run"]:
        yield loaded | {"tokens": _generate(llm)}


def _generate(llm) -> list[int]:
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompt = {"prompt_token_ids": [token % vocabulary for token in _PROMPT]}
    greedy = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, detokenize=False, ignore_eos=True)
    return list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)


if __name__ == "__main__":
    serve(read_back)
