"""Counts what it is shown: code histograms, quarter maxima and channel sums of every layer, kept on the device that computes them."""

import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from calibrate.collect.second import SecondMoments
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import CODES, PARTS, CacheDtype, Observed
from calibrate.statistics.exactsum import LIMBS, carry, to_limbs

Key = tuple[int, str]  # (layer index, kind)
InPlace = Callable[[torch.Tensor], None]
_RARE = 0x3000  # bfloat16 magnitudes below 2^-31: hardly ever met, zero excepted (in float16 they are common, which costs time only)


class Observer:
    """Accumulates statistics batch by batch: `begin`, `see` for every K, V and Q, `end`.

    Args:
        layout: what the model caches.
        cache_dtype: the type that K and V are rounded to before counting; Q likewise (engines hand it to the kernel in that type).
        second_moments: keep the sums of products of channels too.
    """

    def __init__(self, layout: CacheLayout, cache_dtype: CacheDtype, *, second_moments: bool = False) -> None:
        self.layout = layout
        self.second = SecondMoments(layout, cache_dtype.dtype) if second_moments else None
        self.cache_dtype = cache_dtype
        self.counts: dict[Key, torch.Tensor] = {}  # int64 [heads, 32768]
        self.part_amax: dict[Key, torch.Tensor] = {}  # int32 [4, heads]
        self.sums: dict[Key, torch.Tensor] = {}  # int64 [2, 4, heads, head_dim]
        self._heads = {(layer.index, kind): _heads(layer, kind) for layer in layout.layers for kind in layer.kinds}
        self._keep: torch.Tensor | None = None  # int16 [1, batch, seq, 1]: -1 where a token is, 0 where padding is
        self._rows = self._padded = 0
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._batch_amax: dict[Key, torch.Tensor] = {}
        self._batch_sums: dict[Key, torch.Tensor] = {}
        self._places: dict[tuple[Key, str], torch.Tensor] = {}

    def begin(self, lengths: Sequence[int], width: int, device: torch.device) -> None:
        """Start a batch of right-padded rows with these true lengths."""
        real = torch.as_tensor(np.asarray(lengths), device=device)
        self._rows = width * len(lengths)
        self._padded = int(self._rows - np.sum(lengths))
        # every bit of a real token, none of padding: and-ing makes whatever stands there, NaN too, a zero, at the speed of a copy
        self._keep = -(torch.arange(width, device=device) < real[:, None]).to(torch.int16)[None, :, :, None] if self._padded else None
        self._batch_amax, self._batch_sums = {}, {}
        if self.second is not None:
            self.second.begin(lengths, width, device)
        if device.type == "cpu" and not self._places:
            self._places = self._results_of_a_batch()

    def _results_of_a_batch(self) -> dict[tuple[Key, str], torch.Tensor]:
        """Where a batch's maxima and sums are kept, made once: small tensors that outlive the large ones around them fragment the heap."""
        places = {}
        for layer in self.layout.layers:
            for kind in layer.kinds:
                key, heads = (layer.index, kind), _heads(layer, kind)
                places[key, "amax"] = torch.empty(heads, dtype=torch.int32)
                if kind != "q":
                    places[key, "sums"] = torch.empty((2, heads, layer.head_dim if kind == "k" else layer.value_head_dim), dtype=torch.float64)
        return places

    def _placed(self, key: Key, name: str, value: torch.Tensor) -> torch.Tensor:
        place = self._places.get((key, name))
        return value if place is None else place.copy_(value)

    def see(self, index: int, kind: str, values: torch.Tensor) -> None:
        """Count one tensor, [batch, heads, seq, head_dim], of any float type."""
        key = (index, kind)
        bits = values.detach().to(self.cache_dtype.dtype).transpose(0, 1).view(torch.int16)  # [heads, batch, seq, head_dim]
        if self._keep is not None:
            bits = bits & self._keep
        codes = self._buffer(bits.shape, torch.int16, bits.device)
        torch.bitwise_and(bits, CODES - 1, out=codes)
        self._batch_amax[key] = self._placed(key, "amax", codes.flatten(1).amax(dim=1).to(torch.int32))
        self._count(key, codes.flatten(1))
        if kind != "q":
            self._batch_sums[key] = self._placed(key, "sums", self._channel_sums(bits.view(self.cache_dtype.dtype)))
        if self.second is not None:
            self.second.see(index, kind, values)

    def _count(self, key: Key, codes: torch.Tensor) -> None:
        heads, elements = codes.shape
        if key not in self.counts:
            self.counts[key] = _zeros((heads, CODES), codes.device)
        counts = self.counts[key]
        if codes.device.type == "cpu":
            # head by head: codes stay int16, a third of the memory traffic of offset int64 indices
            for head in range(heads):
                _add_counts(counts[head], codes[head])
        else:
            offsets = torch.arange(heads, device=codes.device, dtype=torch.int32)[:, None] * CODES
            counts += torch.bincount((codes.int() + offsets).flatten(), minlength=heads * CODES).view(heads, CODES)
        counts[:, 0] -= self._padded * (elements // self._rows)  # padded elements were counted as zeros

    def _channel_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Σx and Σx² per channel in float64, exact for 16-bit floats of like magnitude: float64 [2, heads, head_dim]."""
        if values.device.type != "cpu":
            return _sums(values.to(torch.float64))
        exact = self._buffer(values.shape[1:], torch.float64, values.device)[None]  # one head: it stays in the core's cache
        return torch.cat([_sums(exact.copy_(head[None])) for head in values], dim=1)

    def _buffer(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory to overwrite. On a CPU it is kept from call to call: mapping fresh pages costs more than writing to them."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._scratch.get(dtype)
        if buffer is None or buffer.numel() < shape.numel():
            buffer = self._scratch[dtype] = torch.empty(shape.numel(), dtype=dtype)
        return buffer[: shape.numel()].view(shape)

    def end(self, part: int) -> list[tuple[int, str, int]]:
        """Finish a batch whose rows belong to quarter `part`: add its maxima and sums.

        Returns:
            (layer, kind, head) of every head that produced infinity or NaN; where there is one, nothing was added to the sums.
        """
        keys = list(self._batch_amax)
        if not keys:  # layer by layer: this one caches nothing
            return []
        amax = torch.cat([self._batch_amax[key].cpu() for key in keys]).tolist()
        heads = [(*key, head) for key in keys for head in range(self._heads[key])]
        bad = [where for where, code in zip(heads, amax, strict=True) if code >= self.cache_dtype.first_nonfinite]
        if bad:
            return bad
        for key in keys:
            if key not in self.part_amax:
                self.part_amax[key] = torch.zeros((PARTS, self._heads[key]), dtype=torch.int32, device=self._batch_amax[key].device)
            torch.maximum(self.part_amax[key][part], self._batch_amax[key], out=self.part_amax[key][part])
        self._add_sums()
        if self.second is not None:
            self.second.end()
        return []

    def _add_sums(self) -> None:
        # one cut into limbs for all layers of a device: dozens of small kernels a batch instead of thousands
        for device in {sums.device for sums in self._batch_sums.values()}:
            keys = [key for key, sums in self._batch_sums.items() if sums.device == device]
            limbs = to_limbs(torch.cat([self._batch_sums[key].flatten() for key in keys]))  # [4, everything]
            for key, part in zip(keys, limbs.split([self._batch_sums[key].numel() for key in keys], dim=1), strict=True):
                shaped = part.view(LIMBS, *self._batch_sums[key].shape).transpose(0, 1)  # [2, 4, heads, head_dim]
                total = self.sums.get(key)
                self.sums[key] = shaped.clone() if total is None else total.add_(shaped)
                carry(self.sums[key].transpose(0, 1))

    def missing(self) -> list[tuple[int, str]]:
        """Every (layer, kind) of the layout that has seen nothing."""
        return [key for key in self._heads if key not in self.counts or not bool(self.counts[key].any())]

    def layers(self) -> dict[int, dict[str, Observed]]:
        """What was seen so far, on the host."""
        result: dict[int, dict[str, Observed]] = {}
        for index, kind in self._heads:
            key = (index, kind)
            if key in self.part_amax:
                sums = self.sums[key].cpu().numpy() if key in self.sums else None
                second = None if self.second is None else self.second.of(key)
                result.setdefault(index, {})[kind] = Observed(self.counts[key].cpu().numpy(), self.part_amax[key].cpu().numpy(), sums, second)
        return result

    def add(self, layers: dict[int, dict[str, Observed]], devices: dict[int, torch.device]) -> None:
        """Add what an earlier run saw, on the devices that its modules live on."""
        for index, kinds in layers.items():
            for kind, seen in kinds.items():
                key, device = (index, kind), devices[index]
                self._start(key, device)
                self.counts[key] += torch.from_numpy(seen.counts).to(device)
                torch.maximum(self.part_amax[key], torch.from_numpy(seen.part_amax).to(device), out=self.part_amax[key])
                if seen.sums is not None:
                    carry(self.sums[key].add_(torch.from_numpy(seen.sums).to(device)).transpose(0, 1))
                if self.second is not None and seen.second is not None:
                    self.second.add(key, torch.from_numpy(seen.second).to(device))

    def all_reduce(self, sum_: InPlace, max_: InPlace, devices: dict[int, torch.device]) -> None:
        """Add up over processes: integers only, so that the split and the order change no bit.

        Args:
            sum_, max_: replace a contiguous tensor by its sum or maximum over all processes, each of which calls this.
        """
        for key in self._heads:
            self._start(key, devices[key[0]])
            occurs = (self.counts[key] != 0).any(dim=0).to(torch.int32)  # [32768]
            max_(occurs)
            codes = occurs.nonzero().squeeze(1)
            counts = self.counts[key][:, codes]  # [heads, codes that occur]: most never do
            sum_(counts)
            self.counts[key][:, codes] = counts
            max_(self.part_amax[key])
            if key in self.sums:
                sums = self.sums[key].contiguous()
                sum_(sums)
                self.sums[key] = carry(sums.transpose(0, 1)).transpose(0, 1)
        if self.second is not None:
            self.second.all_reduce(sum_, devices)

    def _start(self, key: Key, device: torch.device) -> None:
        """Zeros where nothing was seen yet."""
        heads, layer = self._heads[key], self.layout[key[0]]
        if key not in self.counts:
            self.counts[key] = _zeros((heads, CODES), device)
        if key not in self.part_amax:
            self.part_amax[key] = torch.zeros((PARTS, heads), dtype=torch.int32, device=device)
        if key not in self.sums and key[1] != "q":
            channels = layer.head_dim if key[1] == "k" else layer.value_head_dim
            self.sums[key] = torch.zeros((2, LIMBS, heads, channels), dtype=torch.int64, device=device)


def _heads(layer: AttentionLayer, kind: str) -> int:
    return layer.num_heads if kind == "q" else layer.num_key_value_heads


def _sums(exact: torch.Tensor) -> torch.Tensor:
    """Σx and Σx² of [heads, batch, seq, head_dim], overwritten: float64 [2, heads, head_dim]."""
    ones = exact.new_ones((1, exact.shape[2]))  # a product with ones runs at memory speed where a strided sum does not
    first = (ones @ exact).sum(dim=1)[:, 0]
    second = (ones @ exact.square_()).sum(dim=1)[:, 0]
    return torch.stack((first, second))


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """int64 zeros. On a CPU, pages that are never written to cost no memory: most codes never occur.

    The kernel would hand out huge pages and with them all of it, so the memory is mapped here and asked to stay in small ones.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int64, device=device)
    memory = mmap.mmap(-1, 8 * math.prod(shape))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.int64).reshape(shape))


def _add_counts(counts: torch.Tensor, codes: torch.Tensor) -> None:
    """Count codes, int16 [elements], into int64 [32768], without touching the long stretch of magnitudes that are too small or too large to occur."""
    found = torch.bincount(codes)  # as long as the largest code
    if len(found) > _RARE and int(found[1:_RARE].count_nonzero()) == 0:
        counts[0].add_(found[0])
        counts[_RARE : len(found)].add_(found[_RARE:])
    else:
        counts[: len(found)].add_(found)
