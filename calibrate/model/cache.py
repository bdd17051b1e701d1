"""A KV cache that stores nothing: it shows what the model writes to whoever watches, and hands it back."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

# called with (layer_idx, key, value) as the model writes them; key and value: [batch, kv_heads, seq, head_dim]
OnUpdate = Callable[[int, torch.Tensor, torch.Tensor], None]


class PassingCache(DynamicCache):
    """For one forward from position 0 it returns what a fresh DynamicCache would: the keys and values just given.

    Recurrent and convolution states of hybrid models go through to DynamicCache, which keeps them (they do not grow with the text).
    """

    def __init__(self, config: Any, on_update: OnUpdate) -> None:
        super().__init__(config=config)
        self._on_update = on_update

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self._on_update(layer_idx, key_states, value_states)
        return key_states, value_states


def writing_frame(frame: FrameType | None) -> tuple[FrameType, nn.Module] | None:
    """The nearest caller whose `self` is a torch module: the attention layer that wrote to the cache, whatever its class is called."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return frame, owner
        frame = frame.f_back
    return None


def query_in(frame: FrameType, key: torch.Tensor) -> torch.Tensor | None:
    """The query that the writing attention holds beside `key`: a 4-d tensor called query…, [batch, heads, seq, head_dim].

    Only for attention classes that predate transformers' attention interface (GPT-J, CodeGen, Falcon): they hand Q to nobody.
    """
    for name, value in frame.f_locals.items():
        if not name.startswith("query") or not isinstance(value, torch.Tensor) or value.dim() != 4:
            continue
        if value.shape[0] == key.shape[0] and value.shape[2:] == key.shape[2:]:
            return value
    return None
