"""Counts what it is shown: code histograms, quarter maxima and channel sums of every layer, kept on the device that computes them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from calibrate.collect.counting import add_counts, sums_of, zeros
from calibrate.collect.histogram_cuda import histogram_for
from calibrate.collect.ledger import Ledger, channels_of, heads_of, upload
from calibrate.collect.second import SecondMoments
from calibrate.model import CacheLayout
from calibrate.statistics import CODES, PARTS, CacheDtype, Observed
from calibrate.statistics.exactsum import LIMBS, carry, to_limbs

Key = tuple[int, str]  # (layer index, kind)
InPlace = Callable[[torch.Tensor], None]


class Observer:
    """Accumulates statistics batch by batch: `begin`, `see` for every K, V and Q, `end`.

    On a GPU `close` and `settle` in the place of `end` let the next batch start before this one's maxima have reached the host.

    Args:
        layout: what the model caches.
        cache_dtype: the type that K and V are rounded to before counting; Q likewise (engines hand it to the kernel in that type).
        second_moments: keep the sums of products of channels too.
        kernel: count by the kernel of `histogram.cu` on CUDA, where it can be compiled; else as everywhere, to the same counts.
    """

    def __init__(self, layout: CacheLayout, cache_dtype: CacheDtype, *, second_moments: bool = False, kernel: bool = True) -> None:
        self.layout = layout
        self.second = SecondMoments(layout, cache_dtype.dtype) if second_moments else None
        self.cache_dtype = cache_dtype
        self.counts: dict[Key, torch.Tensor] = {}  # int64 [heads, 32768]
        self.part_amax: dict[Key, torch.Tensor] = {}  # int32 [4, heads]
        self.sums: dict[Key, torch.Tensor] = {}  # int64 [2, 4, heads, head_dim]
        self._heads = {(layer.index, kind): heads_of(layer, kind) for layer in layout.layers for kind in layer.kinds}
        self._kernel = kernel
        self._ledgers: dict[torch.device, Ledger] = {}  # of GPUs
        self._lengths = np.zeros(0, dtype=np.int32)
        self._width = self._padded = 0
        self._of_batch: dict[tuple[str, torch.device], torch.Tensor | None] = {}  # what `_mask` and `_lengths_on` made for this batch
        self._closed: tuple[int, dict[Key, torch.Tensor], dict[Key, torch.Tensor]] | None = None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._batch_amax: dict[Key, torch.Tensor] = {}
        self._batch_sums: dict[Key, torch.Tensor] = {}
        self._places: dict[tuple[Key, str], torch.Tensor] = {}

    def begin(self, lengths: Sequence[int], width: int, device: torch.device) -> None:
        """Start a batch of right-padded rows with these true lengths."""
        self._lengths, self._width = np.asarray(lengths, dtype=np.int32), width
        self._padded = int(width * len(lengths) - self._lengths.sum())
        self._of_batch = {}
        self._batch_amax, self._batch_sums = {}, {}
        for ledger in self._ledgers.values():
            ledger.begin()
        if self.second is not None:
            self.second.begin(lengths, width, device)
        if device.type == "cpu" and not self._places:
            self._places = self._results_of_a_batch()

    def _mask(self, device: torch.device) -> torch.Tensor | None:
        """int16 [1, batch, seq, 1]: every bit of a real token, none of padding; None where nothing is padded.

        And-ing makes whatever stands there, NaN too, a zero, at the speed of a copy.
        """
        if ("mask", device) not in self._of_batch:
            real = torch.arange(self._width, device=device) < self._lengths_on(device)[:, None]
            self._of_batch["mask", device] = -real.to(torch.int16)[None, :, :, None] if self._padded else None
        return self._of_batch["mask", device]

    def _lengths_on(self, device: torch.device) -> torch.Tensor:
        if ("lengths", device) not in self._of_batch:
            self._of_batch["lengths", device] = upload(self._lengths, device)
        return self._of_batch["lengths", device]

    def _ledger(self, device: torch.device) -> Ledger | None:
        """Where a GPU's results go; None on a CPU, which keeps them tensor by tensor."""
        if device.type == "cuda" and device not in self._ledgers:
            self._ledgers[device] = Ledger(self.layout, device)
        return self._ledgers.get(device)

    def _results_of_a_batch(self) -> dict[tuple[Key, str], torch.Tensor]:
        """Where a batch's maxima and sums are kept, made once: small tensors that outlive the large ones around them fragment the heap."""
        places = {}
        for layer in self.layout.layers:
            for kind in layer.kinds:
                key, heads = (layer.index, kind), heads_of(layer, kind)
                places[key, "amax"] = torch.empty(heads, dtype=torch.int32)
                if kind != "q":
                    places[key, "sums"] = torch.empty((2, heads, channels_of(layer, kind)), dtype=torch.float64)
        return places

    def _found(self, key: Key, amax: torch.Tensor, sums: torch.Tensor | None) -> None:
        """Keep what a batch gave: int32 [heads] and float64 [2, heads, head_dim]."""
        if ledger := self._ledger(amax.device):
            ledger.amax(key).copy_(amax)
            if sums is not None:
                ledger.sums(key).copy_(sums)
            return
        place = self._places.get((key, "amax"))
        self._batch_amax[key] = amax if place is None else place.copy_(amax)
        if sums is not None:
            place = self._places.get((key, "sums"))
            self._batch_sums[key] = sums if place is None else place.copy_(sums)

    def see(self, index: int, kind: str, values: torch.Tensor) -> None:
        """Count one tensor, [batch, heads, seq, head_dim], of any float type."""
        key = (index, kind)
        cached = values.detach().to(self.cache_dtype.dtype)
        counts = self._counts_of(key, values.device)
        kernel = histogram_for(values.device, self.cache_dtype) if self._kernel and values.device.type == "cuda" else None
        if kernel is None or not kernel.takes(values.shape[3]):
            self._see_plainly(key, cached, counts)
        else:
            ledger = self._ledger(values.device)
            sums = kernel.count(cached, self._lengths_on(values.device), counts, ledger.amax(key), sums=kind != "q")
            if sums is not None:
                ledger.sums(key).copy_(sums)
        if self.second is not None:
            self.second.see(index, kind, values)

    def _see_plainly(self, key: Key, cached: torch.Tensor, counts: torch.Tensor) -> None:
        bits = cached.transpose(0, 1).view(torch.int16)  # [heads, batch, seq, head_dim]
        mask = self._mask(bits.device)
        if mask is not None:
            bits = bits & mask
        codes = self._buffer(bits.shape, torch.int16, bits.device)
        torch.bitwise_and(bits, CODES - 1, out=codes)
        amax = codes.flatten(1).amax(dim=1).to(torch.int32)
        self._count(counts, codes.flatten(1))
        self._found(key, amax, self._channel_sums(bits.view(self.cache_dtype.dtype)) if key[1] != "q" else None)

    def _counts_of(self, key: Key, device: torch.device) -> torch.Tensor:
        if key not in self.counts:
            self.counts[key] = zeros((self._heads[key], CODES), device)
        return self.counts[key]

    def _count(self, counts: torch.Tensor, codes: torch.Tensor) -> None:
        heads, elements = codes.shape
        if codes.device.type == "cpu":
            # head by head: codes stay int16, a third of the memory traffic of offset int64 indices
            for head in range(heads):
                add_counts(counts[head], codes[head])
        else:
            offsets = torch.arange(heads, device=codes.device, dtype=torch.int32)[:, None] * CODES
            counts += torch.bincount((codes.int() + offsets).flatten(), minlength=heads * CODES).view(heads, CODES)
        counts[:, 0] -= self._padded * (elements // (self._width * len(self._lengths)))  # padded elements were counted as zeros

    def _channel_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Σx and Σx² per channel in float64, exact for 16-bit floats of like magnitude: float64 [2, heads, head_dim]."""
        if values.device.type != "cpu":
            return sums_of(values.to(torch.float64))
        exact = self._buffer(values.shape[1:], torch.float64, values.device)[None]  # one head: it stays in the core's cache
        return torch.cat([sums_of(exact.copy_(head[None])) for head in values], dim=1)

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
        self.close(part)
        return self.settle()

    def close(self, part: int) -> None:
        """The batch was seen whole: another may begin, on a GPU before this one is settled."""
        self._closed = (part, self._batch_amax, self._batch_sums)
        for ledger in self._ledgers.values():
            ledger.close()

    def settle(self) -> list[tuple[int, str, int]]:
        """What `end` does and returns, of the batch that was closed last."""
        part, batch_amax, batch_sums = self._closed
        keys = list(batch_amax)
        amax = torch.cat([batch_amax[key] for key in keys]).tolist() if keys else []
        heads = [(*key, head) for key in keys for head in range(self._heads[key])]
        bad = [where for where, code in zip(heads, amax, strict=True) if code >= self.cache_dtype.first_nonfinite]
        for ledger in self._ledgers.values():
            bad += ledger.settle(self.cache_dtype.first_nonfinite)
        if bad:
            return bad
        for key in keys:
            if key not in self.part_amax:
                self.part_amax[key] = torch.zeros((PARTS, self._heads[key]), dtype=torch.int32, device=batch_amax[key].device)
            torch.maximum(self.part_amax[key][part], batch_amax[key], out=self.part_amax[key][part])
        self._add_sums(batch_sums)
        for device, ledger in self._ledgers.items():
            for key in ledger.add(part):
                self._start(key, device)
        if self.second is not None and (keys or self._ledgers):  # layer by layer, a layer may cache nothing
            self.second.end()
        return []

    def _add_sums(self, batch: dict[Key, torch.Tensor]) -> None:
        if not batch:
            return
        # one cut into limbs for all layers: dozens of small operations a batch instead of thousands
        limbs = to_limbs(torch.cat([sums.flatten() for sums in batch.values()]))  # [4, everything]
        for (key, sums), part in zip(batch.items(), limbs.split([sums.numel() for sums in batch.values()], dim=1), strict=True):
            shaped = part.view(LIMBS, *sums.shape).transpose(0, 1)  # [2, 4, heads, head_dim]
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
            amax = self.part_amax[key].contiguous()
            max_(amax)
            self.part_amax[key].copy_(amax)
            if key in self.sums:
                sums = self.sums[key].contiguous()
                sum_(sums)
                self.sums[key].copy_(carry(sums.transpose(0, 1)).transpose(0, 1))
        if self.second is not None:
            self.second.all_reduce(sum_, devices)

    def _start(self, key: Key, device: torch.device) -> None:
        """Zeros where nothing was seen yet; on a GPU, the ledger's totals."""
        heads, layer = self._heads[key], self.layout[key[0]]
        self._counts_of(key, device)
        if key in self.part_amax:
            return
        if ledger := self._ledger(device):
            self.part_amax[key], sums = ledger.totals(key)
        else:
            self.part_amax[key] = torch.zeros((PARTS, heads), dtype=torch.int32, device=device)
            shape = (2, LIMBS, heads, channels_of(layer, key[1]))
            sums = torch.zeros(shape, dtype=torch.int64, device=device) if key[1] != "q" else None
        if sums is not None:
            self.sums[key] = sums
