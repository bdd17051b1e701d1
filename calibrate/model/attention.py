"""Looking in on transformers' attention interface, the one place through which modern models hand over Q."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# called with (attention module, query, key) before the attention is computed; query: [batch, heads, seq, head_dim]
OnAttention = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


@contextmanager
def watched_attention(model: PreTrainedModel, on_attention: OnAttention) -> Iterator[None]:
    """While the context lasts, every attention call of the model's implementation shows its Q and K to `on_attention` first."""
    name = model.config.get_text_config(decoder=True)._attn_implementation or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get(name)

    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any):
        on_attention(module, query, key)
        return (original or _own_eager(module))(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attention  # in this instance's local mapping: deleting it uncovers the global one
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _own_eager(module: nn.Module) -> Callable[..., Any]:
    """ "eager" is not in the registry: each modeling file brings its own (gpt-oss adds attention sinks there)."""
    return sys.modules[type(module).__module__].eager_attention_forward
