"""One observed forward: the model runs, the observer sees every K, V and Q, and nothing is computed after the last of them."""

import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.model import CacheLayout
from calibrate.model.attention import watched_attention
from calibrate.model.blocks import masks_as_rules
from calibrate.model.cache import PassingCache, query_in, writing_frame

# called with (layer index, kind, tensor [batch, heads, seq, head_dim])
See = Callable[[int, str, torch.Tensor], None]


class _Done(Exception):
    """Raised inside the last attention layer: its output, the last MLP, the norm and lm_head change no cache and are not computed."""


def observe(model: PreTrainedModel, layout: CacheLayout, input_ids: torch.Tensor, see: See, *, to_the_end: bool = False) -> None:
    """Run one batch of right-padded rows and show every K, V and Q to `see`.

    Padding stands to the right of a row's only document and no attention mask is given: under causal attention no real token sees it, in
    any architecture, and attention keeps its fast path. What would need memory for every pair of tokens is computed in blocks of queries.

    Args:
        input_ids: int64 [batch, seq], on the model's device.
        to_the_end: compute the whole model (benchmarks compare the two).
    """
    config = model.config.get_text_config(decoder=True)
    last = layout.layers[-1]
    indices = {model.get_submodule(layer.module): layer.index for layer in layout.layers if layer.query_from == "interface"}
    framed = {layer.index for layer in layout.layers if layer.query_from == "frame"}

    def on_update(index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        see(index, "k", key)
        see(index, "v", value)
        if index in framed:
            frame, _ = writing_frame(sys._getframe(2)) or (None, None)
            query = query_in(frame, key) if frame else None
            if query is not None:
                see(index, "q", query)
            if index == last.index and not to_the_end:
                raise _Done

    def on_attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
        index = indices.get(module)
        if index is None:
            return
        see(index, "q", query)
        if index == last.index and not to_the_end:
            raise _Done

    through_interface = len(indices) == len(layout.layers)
    long = masks_as_rules(model, input_ids.shape[1]) if through_interface else nullcontext()
    with torch.inference_mode(), long, watched_attention(model, on_attention):
        try:
            model.base_model(input_ids=input_ids, past_key_values=PassingCache(config, on_update), use_cache=True)
        except _Done:
            return
