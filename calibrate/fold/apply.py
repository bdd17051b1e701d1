"""A layer's fold applied to its tensors, in float64, whatever they are stored in."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.fold.artefact import Fold, LayerFold
from calibrate.fold.parts import Parts

# name within the attention module, "k_proj.weight" → what becomes of it: float64 in, float64 out
Changes = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def changes(fold: LayerFold, parts: Parts) -> Changes:
    """What happens to the tensors that are there; only those that change."""
    moved = fold.moved
    keys, values, mean = moved["pairs"] + moved["rest"] > 0, moved["v"] > 0, moved["mean"] > 0
    found: Changes = {}
    if keys and parts.norm:
        found |= {"k_norm.weight": _normed(fold, parts, key=True), "q_norm.weight": _normed(fold, parts, key=False)}
        keys = False
    wanted = {
        "q": _rotated(fold, parts, key=False) if keys else None,
        "k": _rotated(fold, parts, key=True) if keys else None,
        "v": _rows(fold, bias=False) if values else None,
    }
    biases = {**wanted, "v": _rows(fold, bias=True) if values or mean else None}
    for ending, by_kind in (("weight", wanted), ("bias", biases)):
        if parts.fused and any(by_kind.values()):
            found[f"qkv_proj.{ending}"] = _fused(parts, by_kind)
        elif not parts.fused:
            found |= {f"{kind}_proj.{ending}": change for kind, change in by_kind.items() if change is not None}
    if values:
        found["o_proj.weight"] = _columns(fold, parts)
    return found


def added_biases(fold: LayerFold, parts: Parts, output_weight: torch.Tensor, present: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Biases that come with V's mean: o_proj's, and zeros where the config's one switch makes others, in every layer.

    Args:
        output_weight: o_proj.weight before folding, [hidden, heads · value_head_dim].
        present: biases of the module before folding, by name.

    Returns:
        float64 tensors by name; v_proj's is returned only where there was none (`changes` does it otherwise).
    """
    layer = parts.layer
    shift = torch.from_numpy(fold.mean).repeat_interleave(parts.group, 0).flatten()  # [heads * value_head_dim]
    bias = output_weight.double().cpu() @ shift
    result = {"o_proj.bias": bias + present["o_proj.bias"].double().cpu() if "o_proj.bias" in present else bias}
    if "v_proj.bias" not in present:
        result["v_proj.bias"] = -torch.from_numpy(fold.mean * fold.v).flatten()
    sizes = {"q_proj.bias": layer.num_heads * layer.head_dim, "k_proj.bias": layer.num_key_value_heads * layer.head_dim}
    return result | {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items() if name not in present}


@torch.no_grad()
def fold_model(model: PreTrainedModel, fold: Fold, parts: dict[int, Parts]) -> list[tuple[nn.Module, str]]:
    """Fold a loaded model in place, computing in float64 and keeping its type. Returns the owners and names of what changed."""
    changed = []
    for layer in fold.layers:
        module = model.get_submodule(layer.module)
        tensors = {name: tensor.detach().double().cpu() for name, tensor in module.named_parameters()}
        present = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.bias")}
        new = added_biases(layer, parts[layer.index], tensors["o_proj.weight"], present) if fold.adds_biases else {}
        new |= {name: change(tensors[name]) for name, change in changes(layer, parts[layer.index]).items() if name in tensors}
        for name, tensor in new.items():
            owner, short = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(owner, short, nn.Parameter(tensor.to(owner.weight), requires_grad=False))
            changed.append((owner, short))
    return changed


@torch.no_grad()
def round_to(changed: list[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
    """Round what a fold changed to the type in which it is stored."""
    for owner, name in changed:
        parameter = getattr(owner, name)
        parameter.copy_(parameter.to(dtype))


def _factors(fold: LayerFold, parts: Parts, *, key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K, or of Q for each query head: complex128 [heads, pairs], float64 [heads, rest]."""
    pairs, rest = torch.from_numpy(fold.pairs), torch.from_numpy(fold.rest)
    if key:
        return pairs, rest
    return (1 / pairs.conj()).resolve_conj().repeat_interleave(parts.group, 0), (1 / rest).repeat_interleave(parts.group, 0)


def _rotated(fold: LayerFold, parts: Parts, *, key: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    pairs, rest = _factors(fold, parts, key=key)

    def change(weight: torch.Tensor) -> torch.Tensor:  # [heads * head_dim, ...]
        rows = weight.reshape(len(pairs), parts.layer.head_dim, -1)  # [heads, head_dim, hidden or 1]
        result = rows.clone()
        turned = torch.complex(rows[:, parts.first], rows[:, parts.second]) * pairs[:, :, None]
        result[:, parts.first], result[:, parts.second] = turned.real, turned.imag
        result[:, parts.rest] = rows[:, parts.rest] * rest[:, :, None]
        return result.reshape(weight.shape)

    return change


def _normed(fold: LayerFold, parts: Parts, *, key: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """All heads share a norm's weight, so they share its multipliers, which are real."""
    factors = np.ones(parts.layer.head_dim)
    factors[parts.first] = factors[parts.second] = fold.pairs[0].real
    factors[parts.rest] = fold.rest[0]
    factor = torch.from_numpy(factors if key else 1 / factors)
    offset = 1.0 if parts.norm == "offset" else 0.0
    return lambda weight: (weight + offset) * factor - offset


def _rows(fold: LayerFold, *, bias: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    factor, mean = torch.from_numpy(fold.v).flatten(), torch.from_numpy(fold.mean).flatten()
    return lambda tensor: (tensor - mean) * factor if bias else tensor * factor[:, None]


def _columns(fold: LayerFold, parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    factor = torch.from_numpy(fold.v).repeat_interleave(parts.group, 0).flatten()
    return lambda weight: weight / factor


def _fused(parts: Parts, by_kind: dict[str, Callable[[torch.Tensor], torch.Tensor] | None]) -> Callable[[torch.Tensor], torch.Tensor]:
    layer = parts.layer
    sizes = [layer.num_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim, layer.num_key_value_heads * layer.value_head_dim]

    def change(tensor: torch.Tensor) -> torch.Tensor:  # [(heads + 2 * kv_heads) * head_dim, ...]
        pieces = zip("qkv", tensor.split(sizes), strict=True)
        return torch.cat([piece if by_kind[kind] is None else by_kind[kind](piece) for kind, piece in pieces])

    return change
