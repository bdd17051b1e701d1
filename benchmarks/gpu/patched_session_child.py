"""The child of a vLLM session with one part of vLLM exchanged, before the engine is made, which with one rank runs in this very process.

vLLM binds TurboQuant, and the 16-bit layers beside it, to FlashAttention 2 (`engine/arg_utils.py`). Both backends call one function by its name in
their own module: `fa3` has that function run FlashAttention 3, `sdpa` puts torch's attention in its place. Both backends are told version 2, as vLLM
binds them to, also where its library is not there.
`triton-hadamard` has INT4 rotate by vLLM's own Triton kernel instead of hadacore's. The kernels that store, dequantize and decode stay vLLM's.
`python -m benchmarks.gpu.patched_session_child JOB.json`, JOB with the patch's name as `patch`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from calibrate.engines.child import converse
from calibrate.engines.vllm_session_child import start as start_session
from calibrate.errors import CheckFailed

NAME, VERSION = "flash_attn_varlen_func", "get_flash_attn_version"
# Hints for FlashAttention's scheduling, and scales of an FP8 cache, which FlashAttention 2 does not read either.
_NO_MATTER = {
    "max_seqlen_q",
    "max_seqlen_k",
    "fa_version",
    "scheduler_metadata",
    "num_splits",
    "deterministic",
    "q_descale",
    "k_descale",
    "v_descale",
}


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """What vLLM's `flash_attn_varlen_func` returns, sequence by sequence. The causal mask is aligned to the bottom right; a query that sees no key
    gets zeros.

    Args:
        q: [all queries, heads, head_dim]. cu_seqlens_q: int32 [sequences + 1], where each sequence's queries begin.
        k, v: [all keys, kv_heads, head_dim] with `cu_seqlens_k`, or pages [pages, page_size, kv_heads, head_dim] with `seqused_k` and `block_table`.
        out: where to write the result, [all queries, heads, head_dim]; None: a new tensor.

    Raises:
        NotImplementedError: for what FlashAttention does beyond that: windows, soft caps, biases, sinks, an FP8 cache.
    """
    _refuse(others, k)
    result = torch.zeros_like(q) if out is None else out.zero_()
    ends = cu_seqlens_q.tolist()
    key_ends = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    for number, (first, last) in enumerate(pairwise(ends)):
        if block_table is None:
            keys, values = (each[key_ends[number] : key_ends[number + 1]] for each in (k, v))
        else:
            pages = block_table[number, : -(-used[number] // k.shape[1])].long()
            keys, values = (each[pages].flatten(0, 1)[: used[number]] for each in (k, v))  # [keys, kv_heads, head_dim]
        seeing = min(last - first, len(keys)) if causal else (last - first) * (len(keys) > 0)
        if seeing:
            result[last - seeing : last] = _one(q[last - seeing : last], keys, values, softmax_scale, causal)
    return result


def _one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool) -> torch.Tensor:
    queries, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))  # [1, heads, tokens, head_dim]
    square = causal and len(q) == len(k)
    mask = None
    if causal and not square and len(q) > 1:
        places = torch.arange(len(k), device=q.device)
        mask = places <= places[len(k) - len(q) :, None]  # [queries, keys]
    grouped = q.shape[1] != k.shape[1]
    told = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=grouped)
    return told.squeeze(0).transpose(0, 1)


def _refuse(others: dict[str, Any], k: torch.Tensor) -> None:
    window = others.pop("window_size", None)
    asked = [name for name, value in others.items() if name not in _NO_MATTER and (isinstance(value, torch.Tensor) or value)]
    if window is not None and tuple(window) != (-1, -1):
        asked.append("window_size")
    if k.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        asked.append(f"keys in {k.dtype}")
    if asked:
        raise NotImplementedError(f"{NAME} by scaled_dot_product_attention does not do {', '.join(asked)}")


def flash_3(vllm_function: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's own varlen function, whatever version it is asked for."""

    def call(*arguments: Any, **named: Any) -> Any:
        return vllm_function(*arguments, **(named | {"fa_version": 3}))

    return call


def install(attention: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `attention(what stands there)` into both backends. Raises CheckFailed where one no longer calls flash_attn by that name."""
    from vllm.v1.attention.backends import flash_attn, turboquant_attn

    for backend in (flash_attn, turboquant_attn):
        for name in (NAME, VERSION):
            if not hasattr(backend, name):
                raise CheckFailed(f"{backend.__name__} has no {name} to replace")
        setattr(backend, NAME, attention(getattr(backend, NAME)))
        setattr(backend, VERSION, lambda *_, **__: 2)


def install_sdpa() -> None:
    install(lambda _: varlen_attention)


def install_flash_3() -> None:
    install(flash_3)


def install_triton_hadamard() -> None:
    from vllm.v1.attention.ops import int4_per_token_head

    if not hasattr(int4_per_token_head, "_HADACORE_AVAILABLE"):
        raise CheckFailed("vLLM's INT4 no longer asks for hadacore by that name")
    int4_per_token_head._HADACORE_AVAILABLE = False


# Name → (what it changes, the cache types that it concerns).
PATCHES = {
    "fa3": (install_flash_3, "turboquant_"),
    "sdpa": (install_sdpa, "turboquant_"),
    "triton-hadamard": (install_triton_hadamard, "int4_per_token_head"),
}


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """As `calibrate.engines.vllm_session_child.start`."""
    PATCHES[job["patch"]][0]()
    return start_session(job)


if __name__ == "__main__":
    converse(start)
