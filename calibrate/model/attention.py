"""Looking in on transformers' attention interface, the one place through which modern models hand over Q, and changing what passes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calibrate.model.blocks import attend

# called with (attention module, query, key) before the attention is computed; query: [batch, heads, seq, head_dim]
OnAttention = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


# called as (attention module, compute, query, key, value) in the attention's place; compute(query, key, value) is the attention itself, whose
# result it returns: (output [batch, seq, heads, value_head_dim], weights or None)
AroundAttention = Callable[[nn.Module, Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor], Any]


@contextmanager
def wrapped_attention(model: PreTrainedModel, around: AroundAttention) -> Iterator[None]:
    """While the context lasts, every attention call of the model's implementation goes through `around`."""
    name = model.config.get_text_config(decoder=True)._attn_implementation or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get(name)

    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        function = original or _own_eager(module)
        return around(module, lambda q, k, v: attend(function, module, q, k, v, *args, **kwargs), query, key, value)

    ALL_ATTENTION_FUNCTIONS[name] = attention  # in this instance's local mapping: deleting it uncovers the global one
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def watched_attention(model: PreTrainedModel, on_attention: OnAttention) -> Iterator[None]:
    """While the context lasts, every attention call of the model's implementation shows its Q and K to `on_attention` first."""

    def around(module: nn.Module, compute: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        on_attention(module, query, key)
        return compute(query, key, value)

    with wrapped_attention(model, around):
        yield


def _own_eager(module: nn.Module) -> Callable[..., Any]:
    """ "eager" is not in the registry: each modeling file brings its own (gpt-oss adds attention sinks there)."""
    return sys.modules[type(module).__module__].eager_attention_forward
