"""What of an attention module can be folded: its projections, its norms and which channels RoPE turns together. Found in the module itself."""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.errors import UsageError
from calibrate.model import AttentionLayer, CacheLayout, SourceCheckpoint

_SEPARATE = {"q_proj", "k_proj", "v_proj", "o_proj"}
_FUSED = {"qkv_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_HARMLESS = {"rotary_emb", "attention_dropout", "attn_dropout", "dropout"}
_OFFSET_NORMS = {"gemma3", "gemma3_text"}  # they multiply with 1 + weight


@dataclass(frozen=True)
class Parts:
    """Where the parts of one layer lie.

    Attributes:
        layer: its sizes.
        fused: whether one qkv_proj holds the rows of Q, then K, then V.
        norm: "" for none, "plain" or "offset" for an RMS norm of each head after the projections, with one weight for all heads.
        first, second: channels of each rotary pair, int [pairs]. rest: channels that RoPE leaves alone.
    """

    layer: AttentionLayer
    fused: bool
    norm: str
    first: np.ndarray
    second: np.ndarray
    rest: np.ndarray

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.layer.num_heads // self.layer.num_key_value_heads


def check_foldable(source: SourceCheckpoint) -> None:
    """What can be refused before a model is loaded. Raises UsageError."""
    if source.quantization or source.calibrated:
        raise UsageError(f"{source.path} is quantized or calibrated: fold the plain 16-bit checkpoint first, then quantize or calibrate")


def parts_of(model: PreTrainedModel, layout: CacheLayout, switches: tuple[str, ...]) -> dict[int, Parts]:
    """The parts of every layer.

    Raises:
        UsageError: a layer whose function would change: shared or latent caches, an unknown shape of attention, clipped projections.
    """
    found = {}
    for layer in layout.layers:
        module = model.get_submodule(layer.module)
        reason = _reason(model, layer, module)
        if reason:
            raise UsageError(f"{layer.module} ({type(module).__name__}) cannot be folded: {reason}")
        norm = _norm(model, module)
        if norm and "turn" in switches:
            raise UsageError(f"{layer.module} has norms after its projections, whose weights turn no pair of channels: leave `turn` out of --fold")
        first, second, rest = _channels(model, layer, module)
        found[layer.index] = Parts(layer, hasattr(module, "qkv_proj"), norm, first, second, rest)
    return found


def _reason(model: PreTrainedModel, layer: AttentionLayer, module: nn.Module) -> str:
    """Why a layer cannot be folded, "" where it can."""
    if not layer.writes:
        return "it reads another layer's cache"
    if layer.latent:
        return "its cache holds latents"
    children = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)} - _HARMLESS
    projections = _FUSED if "qkv_proj" in children else _SEPARATE
    if children - _NORMS != projections or (children & _NORMS and children & _NORMS != _NORMS):
        return f"its parts are {', '.join(sorted(children)) or 'none'}"
    rows = {"q_proj": layer.num_heads * layer.head_dim, "k_proj": layer.num_key_value_heads * layer.head_dim}
    rows |= {"v_proj": layer.num_key_value_heads * layer.value_head_dim}
    rows = {"qkv_proj": sum(rows.values())} if "qkv_proj" in children else rows
    for name, size in rows.items():
        if getattr(module, name).weight.shape[0] != size:
            return f"{name} has {getattr(module, name).weight.shape[0]} rows, {size} were expected"
    if children & _NORMS and module.k_norm.weight.shape != (layer.head_dim,):
        return "its norm runs over all heads at once"
    if getattr(model.config.get_text_config(decoder=True), "clip_qkv", None):
        return "its projections are clipped"
    return ""


def _norm(model: PreTrainedModel, module: nn.Module) -> str:
    if not hasattr(module, "k_norm"):
        return ""
    return "offset" if model.config.get_text_config(decoder=True).model_type in _OFFSET_NORMS else "plain"


def _channels(model: PreTrainedModel, layer: AttentionLayer, module: nn.Module) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pairs = _rotary_pairs(model, layer)
    everything = np.arange(layer.head_dim)
    if not pairs:
        return everything[:0], everything[:0], everything
    rotate_half = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    turned = None if rotate_half is None else rotate_half(torch.arange(4.0)).tolist()
    if turned == [-2.0, -3.0, 0.0, 1.0]:
        return everything[:pairs], everything[pairs : 2 * pairs], everything[2 * pairs :]
    if turned == [-1.0, 0.0, -3.0, 2.0]:
        return everything[: 2 * pairs : 2], everything[1 : 2 * pairs : 2], everything[2 * pairs :]
    raise UsageError(f"{layer.module} cannot be folded: how it turns positions is not known")


def _rotary_pairs(model: PreTrainedModel, layer: AttentionLayer) -> int:
    """Pairs of channels that turn with the position; 0 without rotary positions."""
    config = model.config.get_text_config(decoder=True)
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "vision" not in name}
    kinds = getattr(config, "layer_types", None)
    own = buffers.get(f"{kinds[layer.index]}_inv_freq") if kinds and layer.index < len(kinds) else None
    frequencies = own if own is not None else buffers.get("inv_freq")
    return 0 if frequencies is None else len(frequencies)
