"""A KV cache that holds what an FP8 engine's would: every K and V is quantized as it is written, and only the quantized values are ever read."""

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from calibrate.engines.session import Variant
from calibrate.errors import UsageError
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.scales import FORMATS, LayerScales, NumberFormat


class CacheQuantizer:
    """What one variant of the cache does to K, V and Q: x̂ = scale · fp8(x / scale), as engines compute it.

    A tensor is rounded to the cache's 16-bit type, divided by its scale in fp32, clamped to the format's range, cast, and multiplied again.
    For the 16-bit variant K and V are rounded to the cache type and Q stays.

    Args:
        layout: what the model caches.
        cache_dtype: the 16-bit type in which K and V come to the cache.
        model: its modules tell the layer that an attention call belongs to.
        sixteen_bit: indices of the layers that an FP8 variant leaves in 16 bits, K, V and Q.

    Raises:
        UsageError: the variant's scales are not of this model: a layer is missing, or has another number of heads.
    """

    def __init__(
        self, layout: CacheLayout, variant: Variant, cache_dtype: torch.dtype, model: PreTrainedModel, *, sixteen_bit: Collection[int] = ()
    ) -> None:
        self.cache_dtype = cache_dtype
        self.sixteen_bit = tuple(sorted(sixteen_bit))
        self.format: NumberFormat | None = None
        self._scales: dict[tuple[int, str], torch.Tensor] = {}
        self.indices: dict[nn.Module, int] = {}
        if variant.scales is None:
            return
        self.format = FORMATS[variant.scales.options.number_format]
        given = {layer.index: layer for layer in variant.scales.layers}
        for layer in (one for one in layout.layers if one.index not in sixteen_bit):
            if layer.index not in given:
                raise UsageError(f"variant {variant.name} has no scales for layer {layer.index} ({layer.module}) of this model")
            self._add(layer, given[layer.index], variant.name)
            if layer.query_from == "interface" and not layer.latent:
                self.indices[model.get_submodule(layer.module)] = layer.index

    def _add(self, layer: AttentionLayer, scales: LayerScales, name: str) -> None:
        heads = {"k": layer.num_key_value_heads, "v": layer.num_key_value_heads, "q": layer.num_heads}
        for kind, scale in scales.items():
            if len(scale) not in (1, heads[kind]):
                raise UsageError(f"variant {name}: {kind} of layer {layer.index} has {len(scale)} scales, the model {heads[kind]} heads")
            if kind == "q" and len(scale) > 1:  # kernels keep one q scale a KV head: the largest of the query heads that read it
                groups = scale.reshape(layer.num_key_value_heads, -1)
                scale = np.repeat(groups.max(axis=1), groups.shape[1])
            self._scales[layer.index, kind] = torch.from_numpy(np.array(scale, dtype=np.float32)).view(1, -1, 1, 1)  # [1, heads or 1, 1, 1]

    def __call__(self, index: int, kind: str, values: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize [batch, heads, seq, head_dim]; the type stays."""
        if (index, kind) not in self._scales:  # the 16-bit variant, or a layer that keeps 16 bits
            return values if kind == "q" else values.to(self.cache_dtype).to(values.dtype)
        scale = self._scales[index, kind]
        if scale.device != values.device:
            scale = self._scales[index, kind] = scale.to(values.device)
        exact = values.to(self.cache_dtype).to(torch.float32)
        return (self.format.round_trip(exact / scale) * scale).to(values.dtype)


class QuantizedCache(DynamicCache):
    """DynamicCache, sliding windows, latents and recurrent states included, whose K and V pass through a `CacheQuantizer` when written."""

    def __init__(self, config: Any, quantizer: CacheQuantizer) -> None:
        super().__init__(config=config)
        self._quantizer = quantizer

    def can_return_to(self, length: int) -> bool:
        """Whether cropping to `length` tokens is exact: sliding windows and recurrent states cannot go back."""
        return all(type(layer) is DynamicLayer for layer in self.layers)

    def fork(self) -> "QuantizedCache":
        """Another cache with the same tokens, which each grow alone: growing layers replace their tensors and never write into them."""
        twin = copy(self)
        twin.layers = [copy(layer) for layer in self.layers]
        return twin

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Store and return quantized K and V, [batch, kv_heads, seq, head_dim]: this block attends to them as later ones will."""
        return self.append(self.at_once(key_states, value_states, layer_idx), layer_idx, *args, **kwargs)

    def at_once(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, starts: Sequence[int] = ()) -> Sequence[torch.Tensor]:
        """What K and V of any tokens, also of several sequences, become in such a cache, for `append`, wherever they stand."""
        return self._quantizer(layer_idx, "k", key_states), self._quantizer(layer_idx, "v", value_states)

    def append(self, states: Sequence[torch.Tensor], layer_idx: int, *args: Any, **kwargs: Any):
        """Store and return K and V that are quantized."""
        keys, values = states
        return super().update(keys, values, layer_idx, *args, **kwargs)
