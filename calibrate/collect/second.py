"""Sums of products of channels, Σ [1, x] [1, x]ᵀ, of every K, V and Q: what rotations, whitening and logit noise can be computed from."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from calibrate.collect.ledger import upload
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics.exactsum import LIMBS, carry, check_within, cut, within
from calibrate.statistics.second import SKIPPED_TOKENS, packed_length

Key = tuple[int, str]  # (layer index, kind)


class SecondMoments:
    """Accumulates per KV head, without the first `SKIPPED_TOKENS` tokens of each document and without padding.

    The query heads that read a KV head are summed into it. Each batch's float64 sums are kept as exact integers, so that any merge of the
    same batches gives the same bits.
    """

    def __init__(self, layout: CacheLayout, cache_dtype: torch.dtype) -> None:
        self._cache_dtype = cache_dtype
        self._wanted = {(layer.index, kind): layer for layer in layout.layers for kind in layer.kinds if kind != "q" or _scores_as_cached(layer)}
        self.limbs: dict[Key, torch.Tensor] = {}  # int64 [4, kv_heads, (head_dim + 1)(head_dim + 2) / 2]
        self._batch: dict[Key, torch.Tensor] = {}  # float64 [kv_heads, packed]
        self._rows = np.zeros(0, dtype=np.int64)
        self._rows_on: dict[torch.device, torch.Tensor] = {}
        self._triangles: dict[tuple[int, torch.device], torch.Tensor] = {}

    def begin(self, lengths: Sequence[int], width: int, device: torch.device) -> None:
        """Start a batch of right-padded rows with these true lengths."""
        places = np.arange(width)
        counted = (places >= SKIPPED_TOKENS) & (places < np.asarray(lengths)[:, None])  # [batch, seq]
        self._rows, self._rows_on = np.flatnonzero(counted), {}  # found here: asking a GPU which they are would wait for it at every head
        self._batch = {}

    def see(self, index: int, kind: str, values: torch.Tensor) -> None:
        """Add one tensor, [batch, heads, seq, head_dim], of any float type."""
        layer = self._wanted.get((index, kind))
        if layer is None or not len(self._rows):
            return
        heads = values.detach().to(self._cache_dtype).transpose(0, 1)  # [heads, batch, seq, head_dim]
        groups = heads.unflatten(0, (layer.num_key_value_heads, -1)) if kind == "q" else heads[:, None]
        if values.device not in self._rows_on:
            self._rows_on[values.device] = upload(self._rows, values.device)
        sums = torch.stack([sum(self._products(head) for head in group) for group in groups])  # [kv_heads, 1 + head_dim, 1 + head_dim]
        self._batch[index, kind] = sums.flatten(1)[:, self._triangle(sums.shape[-1], sums.device)]

    def _products(self, head: torch.Tensor) -> torch.Tensor:
        """Σ [1, x] [1, x]ᵀ over the counted tokens of one head, [batch, seq, head_dim] → float64 [1 + head_dim, 1 + head_dim]."""
        exact = head.flatten(0, 1)[self._rows_on[head.device]].to(torch.float64)  # [tokens, head_dim]
        extended = torch.cat((exact.new_ones((len(exact), 1)), exact), dim=1)
        return extended.T @ extended

    def _triangle(self, size: int, device: torch.device) -> torch.Tensor:
        key = (size, device)
        if key not in self._triangles:
            rows, columns = torch.triu_indices(size, size, device=device)
            self._triangles[key] = rows * size + columns
        return self._triangles[key]

    def end(self) -> None:
        """Finish a batch: add its sums."""
        for device in {sums.device for sums in self._batch.values()}:
            check_within(torch.stack([within(sums) for sums in self._batch.values() if sums.device == device]).all())
        for key, sums in self._batch.items():
            self.add(key, cut(sums))

    def add(self, key: Key, limbs: torch.Tensor) -> None:
        """Add limbs, int64 [4, kv_heads, packed], which become this object's own."""
        total = self.limbs.get(key)
        self.limbs[key] = carry(limbs if total is None else total.add_(limbs))

    def all_reduce(self, sum_: Callable[[torch.Tensor], None], devices: dict[int, torch.device]) -> None:
        """Add up over processes, each of which calls this; `sum_` replaces a tensor by its sum over all."""
        for key in self._wanted:
            limbs = self.limbs[key] if key in self.limbs else torch.from_numpy(self._zeros(key)).to(devices[key[0]])
            sum_(limbs)
            self.limbs[key] = carry(limbs)

    def of(self, key: Key) -> np.ndarray | None:
        """What was summed, on the host; zeros where no document was longer than what is skipped, None for what is not kept."""
        if key not in self._wanted:
            return None
        return self.limbs[key].cpu().numpy() if key in self.limbs else self._zeros(key)

    def _zeros(self, key: Key) -> np.ndarray:
        layer = self._wanted[key]
        channels = layer.value_head_dim if key[1] == "v" else layer.head_dim
        return np.zeros((LIMBS, layer.num_key_value_heads, packed_length(channels)), dtype=np.int64)


def _scores_as_cached(layer: AttentionLayer) -> bool:
    """Whether Q is multiplied with K as it is cached; not so in latent attention, whose K is expanded first."""
    return not layer.latent
