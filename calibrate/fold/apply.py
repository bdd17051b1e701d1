"""A layer's fold applied to its tensors, in float64, whatever they are stored in."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.fold.artefact import Fold, LayerFold
from calibrate.fold.parts import Parts

Change = Callable[[torch.Tensor], torch.Tensor]  # float64 in, float64 out
Changes = dict[str, Change]  # name within the attention module, "k_proj.weight" → what becomes of it


def changes(fold: LayerFold, parts: Parts) -> Changes:
    """What happens to the weights, and to the biases where there are any; nothing where the fold is neutral."""
    if not any(fold.moved.values()):
        return {}
    if parts.norm:
        return {"k_norm.weight": _normed(fold, parts, key=True), "q_norm.weight": _normed(fold, parts, key=False)}
    query, key = _rotated(fold, parts, key=False), _rotated(fold, parts, key=True)
    wanted = {"qkv_proj": _fused(parts, query, key)} if parts.fused else {"q_proj": query, "k_proj": key}
    return {f"{name}.{ending}": change for name, change in wanted.items() for ending in ("weight", "bias")}


@torch.no_grad()
def fold_model(model: PreTrainedModel, fold: Fold, parts: dict[int, Parts]) -> list[nn.Parameter]:
    """Fold a loaded model in place, computing in float64 and keeping its type. Returns what changed."""
    changed = []
    for layer in fold.layers:
        present = dict(model.get_submodule(layer.module).named_parameters())
        for name, change in changes(layer, parts[layer.index]).items():
            if name in present:
                present[name].data = change(present[name].double().cpu()).to(present[name])
                changed.append(present[name])
    return changed


@torch.no_grad()
def round_to(changed: list[nn.Parameter], dtype: torch.dtype) -> None:
    """Round what a fold changed to the type in which it is stored."""
    for parameter in changed:
        parameter.copy_(parameter.to(dtype))


def _factors(fold: LayerFold, parts: Parts, *, key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K, or of Q for each query head: complex128 [heads, pairs], float64 [heads, rest]."""
    pairs, rest = torch.from_numpy(fold.pairs), torch.from_numpy(fold.rest)
    if key:
        return pairs, rest
    return (1 / pairs.conj()).resolve_conj().repeat_interleave(parts.group, 0), (1 / rest).repeat_interleave(parts.group, 0)


def _rotated(fold: LayerFold, parts: Parts, *, key: bool) -> Change:
    pairs, rest = _factors(fold, parts, key=key)

    def change(weight: torch.Tensor) -> torch.Tensor:  # [heads * head_dim, ...]
        rows = weight.reshape(len(pairs), parts.layer.head_dim, -1)  # [heads, head_dim, hidden or 1]
        result = rows.clone()
        turned = torch.complex(rows[:, parts.first], rows[:, parts.second]) * pairs[:, :, None]
        result[:, parts.first], result[:, parts.second] = turned.real, turned.imag
        result[:, parts.rest] = rows[:, parts.rest] * rest[:, :, None]
        return result.reshape(weight.shape)

    return change


def _normed(fold: LayerFold, parts: Parts, *, key: bool) -> Change:
    """All heads share a norm's weight, so they share its multipliers, which are real."""
    factors = np.ones(parts.layer.head_dim)
    factors[parts.first] = factors[parts.second] = fold.pairs[0].real
    factors[parts.rest] = fold.rest[0]
    factor = torch.from_numpy(factors if key else 1 / factors)
    offset = 1.0 if parts.norm == "offset" else 0.0
    return lambda weight: (weight + offset) * factor - offset


def _fused(parts: Parts, query: Change, key: Change) -> Change:
    layer = parts.layer
    sizes = [layer.num_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim, layer.num_key_value_heads * layer.value_head_dim]

    def change(tensor: torch.Tensor) -> torch.Tensor:  # [(heads + 2 * kv_heads) * head_dim, ...]
        q, k, v = tensor.split(sizes)
        return torch.cat([query(q), key(k), v])

    return change
