"""What the layers on one GPU found: a batch's maxima and sums and the totals of all batches, in flat arrays.

A batch so costs a dozen small kernels, whatever the number of layers, and one copy to the host, for which nobody waits before the next batch is
under way.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import PARTS
from calibrate.statistics.exactsum import LIMBS, carry, check_within, cut, within

Key = tuple[int, str]  # (layer index, kind)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device, without waiting for what the device is at."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def heads_of(layer: AttentionLayer, kind: str) -> int:
    return layer.num_heads if kind == "q" else layer.num_key_value_heads


def channels_of(layer: AttentionLayer, kind: str) -> int:
    return layer.value_head_dim if kind == "v" else layer.head_dim


@dataclass
class _Batch:
    """amax: int32 [all heads]. sums: float64 [all channels]. keys: what was seen."""

    amax: torch.Tensor
    sums: torch.Tensor
    keys: set[Key] = field(default_factory=set)


@dataclass(frozen=True)
class _Closed:
    """A batch on its way to the host: `host` holds its maxima and whether its sums are in range, once `ready` has passed."""

    batch: _Batch
    host: torch.Tensor
    ready: torch.cuda.Event | None


class Ledger:
    """`begin`, `amax` and `sums` of every K, V and Q, `close`; later `settle`, and `add` where all is well."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        keys = [(layer, kind) for layer in layout.layers for kind in layer.kinds]
        heads = [heads_of(layer, kind) for layer, kind in keys]
        shapes = [(2, number, channels_of(layer, kind)) if kind != "q" else (0,) for (layer, kind), number in zip(keys, heads, strict=True)]
        self._keys = [(layer.index, kind) for layer, kind in keys]
        self._heads = dict(zip(self._keys, _slices(heads), strict=True))
        self._channels = dict(zip(self._keys, _slices([int(np.prod(shape)) for shape in shapes]), strict=True))
        self._shapes = dict(zip(self._keys, shapes, strict=True))
        self._device = device
        with torch.inference_mode(False):  # it may be made within a forward, and is added to outside
            self._part_amax = torch.zeros((PARTS, sum(heads)), dtype=torch.int32, device=device)
            self._limbs = torch.zeros((LIMBS, sum(int(np.prod(shape)) for shape in shapes)), dtype=torch.int64, device=device)
        self._closed: _Closed | None = None
        self.begin()

    def begin(self) -> None:
        """Start a batch; one that is closed and not settled yet is kept."""
        amax = torch.zeros(self._part_amax.shape[1], dtype=torch.int32, device=self._device)
        self._batch = _Batch(amax, torch.zeros(self._limbs.shape[1], dtype=torch.float64, device=self._device))

    def amax(self, key: Key) -> torch.Tensor:
        """Where this batch's largest codes go: int32 [heads], zero before."""
        self._batch.keys.add(key)
        return self._batch.amax[self._heads[key]]

    def sums(self, key: Key) -> torch.Tensor:
        """Where this batch's sums go: float64 [2, heads, head_dim]."""
        return self._batch.sums[self._channels[key]].view(self._shapes[key])

    def totals(self, key: Key) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of all batches, to be changed in place only: maxima, int32 [4, heads], and limbs, int64 [2, 4, heads, head_dim] (None of Q)."""
        part_amax = self._part_amax[:, self._heads[key]]
        if key[1] == "q":
            return part_amax, None
        return part_amax, self._limbs[:, self._channels[key]].view(LIMBS, *self._shapes[key]).transpose(0, 1)

    def close(self) -> None:
        """The batch is complete: send its maxima to the host, and do not wait."""
        found = torch.cat((self._batch.amax, within(self._batch.sums)[None].to(torch.int32)))
        if self._device.type != "cuda":
            self._closed = _Closed(self._batch, found, None)
            return
        host = torch.empty(found.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(found, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._closed = _Closed(self._batch, host, ready)

    def settle(self, first_nonfinite: int) -> list[tuple[int, str, int]]:
        """(layer, kind, head) of every head of the closed batch with infinity or NaN.

        Raises:
            OverflowError: all are finite, but a sum is not, or is beyond 2^100.
        """
        if self._closed.ready is not None:
            self._closed.ready.synchronize()
        *amax, in_range = self._closed.host.tolist()
        bad = [(*key, head) for key in self._keys for head, code in enumerate(amax[self._heads[key]]) if code >= first_nonfinite]
        if not bad:
            check_within(in_range)
        return bad

    def add(self, part: int) -> set[Key]:
        """Add the closed batch to the totals of its quarter; what was seen in it."""
        batch, self._closed = self._closed.batch, None
        torch.maximum(self._part_amax[part], batch.amax, out=self._part_amax[part])
        carry(self._limbs.add_(cut(batch.sums)))
        return batch.keys


def _slices(sizes: list[int]) -> list[slice]:
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
