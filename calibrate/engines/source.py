"""The checkpoint's own claim: its form, its strategy and its scale tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from calibrate.artefact import SCALES_FILE
from calibrate.engines.names import KINDS, split_scale_name
from calibrate.errors import UsageError

_NOT_CALIBRATED = "it is not a calibrated checkpoint (`kv-calibrate write` makes one)"


def is_modelopt(config: dict[str, Any]) -> bool:
    """Whether the scales ride in ModelOpt's form: k and v only, kept by vLLM in the model's own type, and only with an FP8 cache."""
    return (config.get("quantization_config") or {}).get("quant_method") == "modelopt"


def kinds_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of scales that the checkpoint's form holds."""
    return ("k", "v") if is_modelopt(config) else KINDS


def as_loaded(scales: Mapping[str, np.ndarray], config: dict[str, Any], model_dtype: str) -> dict[str, np.ndarray]:
    """The float32 values that vLLM must hold: the file's, in ModelOpt's form rounded to `model_dtype`, "bfloat16" or "float16"."""
    if not is_modelopt(config):
        return dict(scales)
    import torch

    return {name: torch.from_numpy(np.array(scale)).to(getattr(torch, model_dtype)).float().numpy() for name, scale in scales.items()}


def kv_strategy(config: dict[str, Any], checkpoint: Path) -> str:
    """`tensor` or `attn_head` from `quantization_config.kv_cache_scheme`. Raises UsageError where there is no such scheme."""
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        raise UsageError(f"{checkpoint} has no kv_cache_scheme in its config.json: {_NOT_CALIBRATED}")
    if is_modelopt(config):
        return "tensor"
    strategy = scheme.get("strategy")
    if strategy not in ("tensor", "attn_head"):
        raise UsageError(f"{checkpoint}/config.json: kv_cache_scheme strategy is {strategy!r}; tensor or attn_head can be verified")
    return strategy


def file_scales(checkpoint: Path) -> dict[str, np.ndarray]:
    """All q, k and v scale tensors of `kv_scales.safetensors`, fp32. Raises UsageError: missing, unreadable, empty, or not fp32."""
    path = checkpoint / SCALES_FILE
    if not path.is_file():
        raise UsageError(f"{checkpoint} has no {SCALES_FILE}: {_NOT_CALIBRATED}")
    try:
        with safe_open(path, framework="pt") as file:  # "np" cannot read bf16, which is to be reported, not to crash
            names = [name for name in file.keys() if split_scale_name(name)]  # noqa: SIM118 (safe_open is no dict)
            wrong = [name for name in names if file.get_slice(name).get_dtype() != "F32"]
            if wrong:
                raise UsageError(f"{path}: {wrong[0]} is {file.get_slice(wrong[0]).get_dtype()}, KV scales must be fp32")
            scales = {name: file.get_tensor(name).numpy() for name in sorted(names, key=_natural)}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
    if not scales:
        raise UsageError(f"{path} holds no q_scale, k_scale or v_scale")
    return scales


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
