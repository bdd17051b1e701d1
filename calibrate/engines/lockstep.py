"""Decoding several sequences together: one pass through the weights for a token of each, and for each its own cache and attention.

A step of one token costs about as much as a step of ten: the weights must be read either way.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from calibrate.model import CacheLayout

_MOVING = ("dynamic", "longrope")  # their frequencies follow the longest sequence of a batch


class Lockstep:
    """Takes one token of each of some caches through a model.

    Its `around` must be in the attention's place (`model.attention.wrapped_attention`) while `step` runs. Caches and attention see what they would
    see alone. What matmuls of more rows and attention in float32 change is the rounding of hidden states.

    Attributes:
        possible: whether the model can: every layer attends to all tokens of a cache of its own, through transformers' interface and without a mask
            for a single query, and the model can be told positions.
    """

    def __init__(self, model: PreTrainedModel, layout: CacheLayout) -> None:
        self._model = model
        config = model.config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        plain = all(layer.writes and not layer.latent and layer.sliding_window is None and layer.query_from == "interface" for layer in layout.layers)
        self.possible = (
            plain
            and len(layout.layers) == config.num_hidden_layers
            and config._attn_implementation == "sdpa"
            and rope.get("rope_type") not in _MOVING
            and "position_ids" in inspect.signature(model.forward).parameters
        )
        self._indices = {model.get_submodule(layer.module): layer.index for layer in layout.layers} if self.possible else {}
        self._together: _Together | None = None

    def around(self, module: nn.Module, compute: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """An attention call: as it is, or within a step, sequence by sequence."""
        if self._together is None:
            return compute(query, key, value)
        read = self._together.read.pop(self._indices[module])
        return torch.cat([_alone(compute, query[number : number + 1], *both) for number, both in enumerate(read)]), None

    def step(self, tokens: Sequence[int], caches: Sequence[DynamicCache]) -> torch.Tensor:
        """Logits [sequences, vocab] after one more token of each; the caches grow by it."""
        device = self._model.device
        positions = torch.tensor([[cache.get_seq_length()] for cache in caches], device=device)
        self._together = _Together(self._model.config.get_text_config(decoder=True), caches)
        try:
            ids = torch.tensor(tokens, device=device)[:, None]
            return self._model(input_ids=ids, position_ids=positions, past_key_values=self._together, use_cache=True).logits[:, -1]
        finally:
            self._together = None


def _alone(compute: Callable[..., Any], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The attention of one query. On a CPU in float32: torch's 16-bit kernel is made for many queries, and takes five times as long for one."""
    wide = torch.float32 if query.device.type == "cpu" else query.dtype
    return compute(query.to(wide), keys.to(wide), values.to(wide))[0].to(query.dtype)


class _Together(DynamicCache):
    """Some caches as one, for a step of one token each.

    Attributes:
        read: layer → what each sequence attends to, (keys, values) of [1, kv_heads, tokens, head_dim].
    """

    def __init__(self, config: Any, caches: Sequence[DynamicCache]) -> None:
        super().__init__(config=config)
        self._caches = caches
        self.read: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Store a token of each, converted for all at once where it can be. What is returned is no more than the new token: `Lockstep.around`
        attends to `read`.
        """
        starts = [cache.get_seq_length(layer_idx) for cache in self._caches]
        together = self._caches[0].at_once(key_states, value_states, layer_idx, starts)
        read = self.read[layer_idx] = []
        for number, cache in enumerate(self._caches):
            own = [states[number : number + 1] for states in together or (key_states, value_states)]
            read.append(cache.append(own, layer_idx, *args, **kwargs) if together else cache.update(*own, layer_idx, *args, **kwargs))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Of the longest."""
        return max(cache.get_seq_length(layer_idx) for cache in self._caches)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of the longest."""
        return self.get_seq_length() + query_length, 0
