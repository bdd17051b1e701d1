"""Stress twins: the same function from weights that cache K or V of another magnitude, the known-answer test of every comparison.

K of all layers × λ and Q ÷ λ leave every attention score as it was; V × λ and the output projection's columns ÷ λ leave every output. With a
power of two nothing is rounded, so that a twin's logits are equal to the last bit.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from calibrate.artefact import write_json
from calibrate.checkpoint.links import link, resolved
from calibrate.checkpoint.place import check_target, folder_in_the_making
from calibrate.errors import UsageError
from calibrate.model.source import SourceCheckpoint

_PLAIN = {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "smollm3", "granite"}
_NORMED = {"qwen3", "qwen3_moe"}  # an RMS norm of each head follows the projection: its weight takes the factor
_OFFSET_NORMED = {"gemma3", "gemma3_text"}  # the same, but the norm multiplies with 1 + weight
_FUSED = {"phi3"}
_LEFT_OUT = {".git", ".cache", "config.json"}

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Plan:
    """What happens to the tensors whose names end so, and to the config."""

    changes: dict[str, Change]
    config: dict[str, Any]


def write_twin(source: Path, output: Path, *, kind: Literal["k", "v"], factor: float) -> Path:
    """Write a twin of a checkpoint: the same function, K or V times `factor`.

    Tensors that do not change keep their bytes, one tensor is in memory at a time, and other files are linked. With QK-norm the factor goes
    into the norm's weight. Gemma's norm multiplies with 1 + weight, which a 16-bit weight could not hold exactly: there K's norm is stored in
    fp32, and Q's share of the factor goes into `query_pre_attn_scalar`; such a twin is the same function only where it is computed in fp32.

    Raises:
        UsageError: an architecture that is not known to be scalable, quantized or calibrated weights, a factor that is not positive or leaves
            the range of the weights' type, an `output` that exists.
    """
    checkpoint = SourceCheckpoint.open(source)
    if not (factor > 0 and factor < float("inf")):
        raise UsageError(f"a twin's factor is {factor}: it must be positive and finite")
    if checkpoint.quantization or checkpoint.calibrated:
        raise UsageError(f"{source} is quantized or calibrated: give the plain 16-bit checkpoint")
    check_target(source, output, force=False)
    plan = _plan(checkpoint, kind, factor)
    touched: set[str] = set()
    with folder_in_the_making(output) as making:
        for path in sorted(source.rglob("*")):
            relative = path.relative_to(source)
            if path.is_dir() or relative.parts[0] in _LEFT_OUT:
                continue
            target = making / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if str(relative) in checkpoint.headers:
                touched |= _rewrite(path, checkpoint.headers[str(relative)], target, plan.changes)
            else:
                link(resolved(path, source), target)
        missing = set(plan.changes) - touched - {name for name in plan.changes if name.endswith(".bias")}
        if missing:
            raise UsageError(f"{source} has no tensor …{min(missing)}: no twin of it can be made")
        write_json(making / "config.json", plan.config)
    return output


def _plan(checkpoint: SourceCheckpoint, kind: str, factor: float) -> _Plan:
    family = checkpoint.model_type
    up, down = _times(factor), _times(1 / factor)
    config = copy.deepcopy(checkpoint.config)
    if family in _FUSED:
        return _Plan(_fused(config.get("text_config") or config, kind, up, down), config)
    if family not in _PLAIN | _NORMED | _OFFSET_NORMED:
        known = ", ".join(sorted(_PLAIN | _NORMED | _OFFSET_NORMED | _FUSED))
        raise UsageError(f"no twin of a {family or 'model without model_type'} can be made: known are {known}")
    if kind == "v":
        return _Plan(_both("v_proj", up) | {"o_proj.weight": down}, config)
    if family in _NORMED:
        return _Plan({"k_norm.weight": up, "q_norm.weight": down}, config)
    if family in _OFFSET_NORMED:
        text = config.get("text_config") or config
        scalar = text.get("query_pre_attn_scalar", 256) * factor**2
        if scalar != int(scalar):
            raise UsageError(f"query_pre_attn_scalar of {checkpoint.path} would be {scalar:g}, which is no integer: take a larger power of two")
        text["query_pre_attn_scalar"] = int(scalar)
        return _Plan({"k_norm.weight": lambda weight: (weight.float() + 1) * factor - 1}, config)
    return _Plan(_both("k_proj", up) | _both("q_proj", down), config)


def _both(name: str, change: Change) -> dict[str, Change]:
    return {f"{name}.weight": change, f"{name}.bias": change}


def _times(factor: float) -> Change:
    return lambda weight: (weight.double() * factor).to(weight.dtype)


def _fused(text: dict[str, Any], kind: str, up: Change, down: Change) -> dict[str, Change]:
    """qkv_proj holds the rows of Q, then K, then V."""
    heads, groups = text["num_attention_heads"], text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // heads
    q, k = heads * width, (heads + groups) * width

    def change(weight: torch.Tensor) -> torch.Tensor:  # [(heads + 2 * groups) * head_dim, hidden]
        parts = [weight[:q], weight[q:k], weight[k:]]
        if kind == "k":
            return torch.cat([down(parts[0]), up(parts[1]), parts[2]])
        return torch.cat([parts[0], parts[1], up(parts[2])])

    return {"qkv_proj.weight": change} | ({"o_proj.weight": down} if kind == "v" else {})


def _rewrite(source: Path, header: bytes, target: Path, changes: dict[str, Change]) -> set[str]:
    """Write a shard with its changed tensors, in the order in which they lie; returns the endings that were met."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None)
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    met = {name: _ending(name, changes) for name in order}
    if not any(met.values()):
        link(source.resolve(), target)
        return set()
    start, new = 0, {} if metadata is None else {"__metadata__": metadata}
    for name in order:
        first, last = entries[name]["data_offsets"]
        entry, size = dict(entries[name]), last - first
        if met[name] == "k_norm.weight" and entry["dtype"] in ("BF16", "F16") and _widens(changes[met[name]]):
            entry["dtype"], size = "F32", 2 * size
        new[name] = {**entry, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(new, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with safe_open(source, framework="pt") as tensors, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            weight = tensors.get_tensor(name)
            if met[name]:
                weight = _changed(name, weight, changes[met[name]])
            writer.write(weight.contiguous().flatten().view(torch.uint8).numpy().data)
    shutil.copystat(source, target)
    return {ending for ending in met.values() if ending}


def _ending(name: str, changes: dict[str, Change]) -> str | None:
    """Only the language model's attention: a multimodal checkpoint's vision tower has projections of the same names."""
    if ".self_attn." not in name or "vision" in name:
        return None
    return next((ending for ending in changes if name.endswith(f".{ending}")), None)


def _widens(change: Change) -> bool:
    return change(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32


def _changed(name: str, weight: torch.Tensor, change: Change) -> torch.Tensor:
    result = change(weight)
    if not bool(torch.isfinite(result).all()) or bool(((result == 0) & (weight != 0)).any()):
        raise UsageError(f"{name} times this factor leaves the range of {str(weight.dtype).removeprefix('torch.')}: take a smaller factor")
    return result
