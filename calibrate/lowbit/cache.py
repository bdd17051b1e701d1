"""A KV cache that holds what an engine with a low-bit format would."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from calibrate.errors import UsageError
from calibrate.lowbit.base import LowBitFormat, Start, Window, sixteen_bit_layers
from calibrate.model import CacheLayout


class Placement:
    """What a format does to each layer of a model.

    Attributes:
        fmt: the format. cache_dtype: the 16-bit type in which K and V come to the cache.
        whole: layers whose history is quantized by the format's windows. passing: sliding-window layers, whose tokens are quantized as they come.

    Raises:
        UsageError: the format cannot store this model: latent attention, other heads than its tables or codebooks have.
    """

    def __init__(self, layout: CacheLayout, fmt: LowBitFormat, cache_dtype: torch.dtype, config: Any) -> None:
        writing = [layer for layer in layout.layers if layer.writes]
        if not fmt.latent and any(layer.latent for layer in writing):
            raise UsageError(f"{fmt.name} cannot store the latents of multi-head latent attention: choose fp8_e4m3 or fp8_e5m2")
        depth = config.num_hidden_layers if len(layout.layers) == config.num_hidden_layers else None  # hybrids have layers without attention
        windows = {layer.index: layer.sliding_window is not None for layer in writing}
        exact = sixteen_bit_layers(fmt.skip_ends, fmt.skip_sliding, windows, depth) | (fmt.kept_layers & set(windows))
        fmt.check([layer for layer in writing if layer.index not in exact])
        self.fmt, self.cache_dtype = fmt, cache_dtype
        self.passing = {index for index, sliding in windows.items() if sliding} - exact
        self.whole = set(windows) - exact - self.passing


class LowBitCache(DynamicCache):
    """DynamicCache whose older tokens are quantized once, group by group, and never again.

    A layer that is quantized holds sink | quantized groups | 16-bit tail. K and V come in the cache's 16-bit type. When a block of new tokens
    arrives its queries attend to all that was there before as it is stored, and to their own block in 16 bits where the format says so
    (`own_exact_above`); the groups that the block completes are quantized after that. Otherwise they are quantized first, and the block attends
    to them.

    In sliding-window layers that a format does not skip every token is quantized as it is written. Layers that stay in 16 bits are rounded to the
    cache's type and no more. Recurrent states stay as they are.
    """

    def __init__(self, config: Any, placement: Placement) -> None:
        super().__init__(config=config)
        self._placement = placement
        self._done: dict[tuple[int, str], int] = {}  # quantized tokens of (layer, kind)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Store a block and return what its queries attend to, [batch, kv_heads, seq, head_dim] each."""
        tokens, before = key_states.shape[-2], self.get_seq_length(layer_idx)
        if self._one_by_one(layer_idx):
            return self.append(
                self._converted(key_states, value_states, layer_idx, before, self._own_exact(tokens, before)), layer_idx, *args, **kwargs
            )
        read = super().update(self._sixteen(key_states), self._sixteen(value_states), layer_idx, *args, **kwargs)
        if layer_idx not in self._placement.whole:
            return read
        layer = self.layers[layer_idx]
        for kind in ("keys", "values"):
            setattr(layer, kind, self._settled(kind, getattr(layer, kind), layer_idx))
        return read if self._own_exact(tokens, before) else (layer.keys, layer.values)

    def at_once(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, starts: Sequence[int]) -> Sequence[torch.Tensor] | None:
        """What a further token of some sequences becomes in caches of this placement, for `append`; None where that depends on the sequence's others.

        Args:
            key_states, value_states: [sequences, kv_heads, 1, head_dim]. starts: position of each, of which none is 0.
        """
        if not self._one_by_one(layer_idx):
            return None
        positions = np.array(starts, dtype=np.float64).reshape(-1, 1, 1)
        return self._converted(key_states, value_states, layer_idx, positions, self._own_exact(1, min(starts)))

    def append(self, states: Sequence[torch.Tensor], layer_idx: int, *args: Any, **kwargs: Any):
        """Store tokens that are as the format makes them, and return what their queries attend to.

        Args:
            states: keys and values, [batch, kv_heads, seq, head_dim]; then the same in 16 bits, where these queries attend to their own block so.
        """
        keys, values, *own = states
        read = super().update(keys, values, layer_idx, *args, **kwargs)
        if layer_idx in self._placement.whole:
            self._done |= {(layer_idx, kind): self.layers[layer_idx].keys.shape[-2] for kind in ("keys", "values")}
        if not own:
            return read
        return tuple(torch.cat([stored[..., : -exact.shape[-2], :], exact], dim=-2) for stored, exact in zip(read, own, strict=True))

    def _own_exact(self, tokens: int, before: int) -> bool:
        """Whether a block of so many tokens after so many others attends to itself in 16 bits."""
        above = self._placement.fmt.own_exact_above
        return above is not None and (before == 0 or tokens > above)

    def _one_by_one(self, layer: int) -> bool:
        """Whether tokens are quantized as they are written: none waits for others."""
        alone = self._placement.fmt.key_window == self._placement.fmt.value_window == Window()
        return layer in self._placement.passing or (layer in self._placement.whole and alone)

    def _converted(self, keys: torch.Tensor, values: torch.Tensor, layer: int, start: Start, own_exact: bool) -> list[torch.Tensor]:
        """For `append`. A sliding window holds, and gives, what is stored."""
        own = [self._sixteen(keys), self._sixteen(values)]
        stored = [self._through(kind, states, layer, start) for kind, states in zip(("keys", "values"), own, strict=True)]
        return stored + own if own_exact and layer in self._placement.whole else stored

    def _sixteen(self, states: torch.Tensor) -> torch.Tensor:
        return states.to(self._placement.cache_dtype).to(states.dtype)

    def _through(self, kind: str, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        """What the format makes of a tile, in its own type."""
        convert = getattr(self._placement.fmt, kind.removesuffix("s"))
        return convert(tile.to(torch.float32), layer, start).to(tile.dtype)

    def _window(self, kind: str) -> Window:
        return getattr(self._placement.fmt, f"{kind.removesuffix('s')}_window")

    def _settled(self, kind: str, stored: torch.Tensor, layer: int) -> torch.Tensor:
        """`stored` with the groups that are complete now quantized, in a tensor of its own; this block may still read the old one."""
        window, done = self._window(kind), self._done.get((layer, kind), 0)
        due = window.quantized(stored.shape[-2])
        if due <= done:
            return stored
        start, end = window.sink + done, window.sink + due
        settled = stored.clone()
        settled[..., start:end, :] = self._through(kind, stored[..., start:end, :], layer, start)
        self._done[layer, kind] = due
        return settled

    def quantized_tokens(self) -> Mapping[tuple[int, str], int]:
        """(layer, "keys" or "values") → how many of its tokens are quantized. Sliding-window layers are not counted here."""
        return dict(self._done)

    def can_return_to(self, length: int) -> bool:
        """Whether cropping to `length` tokens leaves what the cache held when it had that many: no token kept was quantized since."""
        growing = all(getattr(layer, "sliding_window", None) is None and not hasattr(layer, "conv_states") for layer in self.layers)
        return growing and all(self._safe(key, length) for key in self._done)

    def _safe(self, key: tuple[int, str], length: int) -> bool:
        window = self._window(key[1])
        return min(self._done[key], max(length - window.sink, 0)) == window.quantized(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest −`tokens_to_remove` tokens (transformers' sign). Raises ValueError where that is not exact (`can_return_to`)."""
        length = self.get_seq_length() - abs(tokens_to_remove)
        if tokens_to_remove > 0 or not self.can_return_to(length):
            raise ValueError(f"this cache cannot go back to {length} tokens: some that would stay in 16 bits are quantized by now")
        super().crop(tokens_to_remove)
        left = {key: min(done, self._window(key[1]).quantized(length)) for key, done in self._done.items()}
        self._done = {key: done for key, done in left.items() if done}

    def fork(self) -> "LowBitCache":
        """Another cache with the same tokens, which each grow alone: growing layers replace their tensors and never write into them."""
        twin = copy(self)
        twin.layers, twin._done = [copy(layer) for layer in self.layers], dict(self._done)
        return twin

    def reset(self) -> None:
        """Empty it."""
        super().reset()
        self._done = {}
