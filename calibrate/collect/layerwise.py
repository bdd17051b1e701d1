"""The collection of a model that does not fit into memory: one decoder layer at a time over all batches, the same bytes as of the whole model.

The model's own forward runs for every layer and batch, with its other layers handing on what they are given, so that masks, rotary embeddings
and whatever else it computes for a layer are its own, in every family.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.artefact import read_tensors, sha256_bytes, write_tensors
from calibrate.collect.collector import CollectRun, check_seen, devices_of, finished_statistics
from calibrate.collect.observer import Observer
from calibrate.collect.state import Interrupts, Stopped, interrupted, interrupts
from calibrate.collect.watch import observe
from calibrate.corpus import Batch
from calibrate.errors import UsageError
from calibrate.model import cache_dtype_of
from calibrate.model.streamed import LayerStream, check_chain, first_of, hidden_of
from calibrate.progress import meter, note
from calibrate.statistics import CACHE_DTYPES, Statistics, pack_layers, unpack_layers

SCHEMA = "kv-calibrate/collect-layers/1"


class _LayerDone(Exception):
    """Raised when the one layer has run: nothing after it is computed."""


class HiddenStates:
    """What one layer hands to the next, of all batches: [rows, length, hidden] each, in one array in memory or mapped from a file.

    Args:
        folder: where files lie. kept: True for an array in memory, which `save` writes.
    """

    def __init__(self, run: CollectRun, hidden_size: int, folder: Path, *, kept: bool) -> None:
        self._shapes = [(*batch.input_ids.shape, hidden_size) for batch in run.batches]
        self._dtype, self.in_memory, self._folder = run.model.dtype, kept, folder
        sizes = [int(np.prod(shape)) * self._dtype.itemsize for shape in self._shapes]
        self._ends = np.cumsum([0, *sizes])
        self._arrays: dict[int, np.ndarray] = {}  # finished layers → uint8 [all batches]

    def file(self, finished: int) -> Path:
        return self._folder / f"hidden-{finished}.bin"

    def open(self, finished: int) -> None:
        """Go on from the file that was saved after so many layers."""
        if self.file(finished).stat().st_size != self._ends[-1]:
            raise ValueError(f"{self.file(finished)} has another size")
        self._arrays[finished] = np.fromfile(self.file(finished), np.uint8) if self.in_memory else np.memmap(self.file(finished), np.uint8, "r+")

    def get(self, finished: int, number: int) -> torch.Tensor:
        """Of one batch, after so many layers."""
        return self._view(finished, number).clone()

    def put(self, finished: int, number: int, hidden: torch.Tensor) -> None:
        if tuple(hidden.shape) != self._shapes[number] or hidden.dtype != self._dtype:
            raise UsageError(f"a layer gave {hidden.dtype} {list(hidden.shape)}, which is no hidden state: calibrate with --streaming never")
        if finished not in self._arrays:
            size = int(self._ends[-1])
            self._arrays[finished] = np.empty(size, np.uint8) if self.in_memory else np.memmap(self.file(finished), np.uint8, "w+", shape=(size,))
        self._view(finished, number).copy_(hidden)

    def _view(self, finished: int, number: int) -> torch.Tensor:
        part = self._arrays[finished][self._ends[number] : self._ends[number + 1]]
        return torch.from_numpy(part).view(self._dtype).view(self._shapes[number])

    def save(self, finished: int) -> None:
        """Bring one generation to the disk."""
        if self.in_memory:
            self._arrays[finished].tofile(self.file(finished))
        else:
            self._arrays[finished].flush()

    def forget_before(self, finished: int, *, files: bool) -> None:
        """Free earlier generations; their files too, once a state names a later one."""
        for old in [old for old in self._arrays if old < finished]:
            del self._arrays[old]
        for file in self._folder.glob("hidden-*.bin") if files else ():
            if file != self.file(finished):
                file.unlink()


class _Relay:
    """Runs single decoder layers of a model."""

    def __init__(self, run: CollectRun, layers: str, lengths: list[int | None]) -> None:
        self._run = run
        self._layers = list(run.model.get_submodule(layers))
        self._lengths = lengths  # of what each layer returns, where that is a tuple

    def observe(self, number: int, batch: Batch, hidden: torch.Tensor | None, observer: Observer) -> torch.Tensor | None:
        """Run one batch through layer `number`: from `hidden`, or from the tokens. None where nothing after its cache was computed."""
        given: list[torch.Tensor] = []
        with self._alone(number, hidden, given.append):
            try:
                observe(self._run.model, self._run.layout, torch.from_numpy(batch.input_ids), observer.see)
            except _LayerDone:
                return given[0]
        return None

    @contextmanager
    def _alone(self, number: int, hidden: torch.Tensor | None, give: Callable[[torch.Tensor], None]) -> Iterator[None]:
        inner = self._layers[number].forward

        def injected(*args: Any, **kwargs: Any) -> None:
            if hidden is not None and args:
                args = (hidden, *args[1:])
            elif hidden is not None:
                kwargs["hidden_states"] = hidden
            give(first_of(inner(*args, **kwargs)))
            raise _LayerDone

        for layer, length in zip(self._layers[:number], self._lengths, strict=False):
            layer.forward = _hand_on(length)
        self._layers[number].forward = injected
        try:
            yield
        finally:
            for layer in self._layers[: number + 1]:
                del layer.forward


def _hand_on(length: int | None) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        return hidden if length is None else (hidden, *[None] * (length - 1))

    return forward


def collect_layerwise(run: CollectRun, layers: str, hidden_size: int, folder: Path, *, in_memory: bool, state_seconds: float = 60.0) -> Statistics:
    """As `collect`, for a model whose decoder layers are on disk (`load_streamed`).

    Args:
        layers: name of its list of decoder layers.
        folder: for hidden states and the resumable state; removed by the caller when the statistics are safe.
        in_memory: keep hidden states in memory, and write them every `state_seconds` at the end of a layer; else they are files all the time.

    Raises:
        UsageError: as `collect`, or a model whose layers cannot be run one by one.
        KeyboardInterrupt: after the state was written.
    """
    lengths = check_chain(run.model, run.layout, layers)
    stream, relay = LayerStream(run.model, layers), _Relay(run, layers, lengths)
    owners = {layer.index: int(layer.module.removeprefix(f"{layers}.").split(".")[0]) for layer in run.layout.layers}
    last = max(owners.values())
    provenance = run.provenance()
    observer = Observer(run.layout, CACHE_DTYPES[cache_dtype_of(run.source)], second_moments=run.second_moments)
    hidden = HiddenStates(run, hidden_size, folder, kept=in_memory)
    state = _State(folder, sha256_bytes(json.dumps(provenance, sort_keys=True).encode()), hidden, owners, observer, state_seconds)
    first = state.read(devices_of(run))
    if first:
        note(f"resuming: {first} of {last + 1} layers are done")
    total = run.tokens * (last + 1)
    with ThreadPoolExecutor(1) as pool, meter("calibrating", total, "layer tokens", done=run.tokens * first) as progress, interrupts() as stop:
        digests = pool.submit(run.source.weight_digests)
        try:
            for number in stream.each(first, last):
                for place, batch in enumerate(run.batches):
                    _observe_batch(run, relay, observer, hidden, number, place, batch, stop, last=number == last)
                    progress.advance(int(batch.lengths.sum()))
                if number < last:
                    state.finished(number + 1)
        except Stopped as stopped:
            state.write()
            raise interrupted(state.layers, last + 1, "layers", folder if state.layers else None) from stopped
        provenance["model"]["weights"] = digests.result()
    check_seen(run.layout, observer)
    return finished_statistics(run, observer, provenance)


def _observe_batch(
    run: CollectRun,
    relay: _Relay,
    observer: Observer,
    hidden: HiddenStates,
    number: int,
    place: int,
    batch: Batch,
    stop: Interrupts,
    *,
    last: bool,
) -> None:
    stop.check()
    observer.begin(batch.lengths, batch.input_ids.shape[1], torch.device("cpu"))
    given = relay.observe(number, batch, hidden.get(number, place) if number else None, observer)
    bad = observer.end(batch.part)
    if bad:
        index, kind, head = bad[0]
        rows = ", ".join(f"{sample} ({run.corpus.samples[sample].source})" for sample in batch.samples)
        raise UsageError(
            f"{kind.upper()} of layer {index} ({run.layout[index].module}), head {head}, is infinite or NaN on one of the samples {rows}: "
            "nothing was written"
        )
    if not last:
        hidden.put(number + 1, place, given)


class _State:
    """The statistics of finished layers and the hidden states after them, in `folder`."""

    def __init__(self, folder: Path, plan: str, hidden: HiddenStates, owners: dict[int, int], observer: Observer, seconds: float) -> None:
        self._path, self._folder, self._plan = folder / "state.safetensors", folder, plan
        self._hidden, self._owners, self._observer, self._seconds = hidden, owners, observer, seconds
        self._written = time.monotonic()
        self.layers = self._saved = 0

    def read(self, devices: dict[int, torch.device]) -> int:
        """Restore what an earlier run of the same plan left; the number of layers done."""
        if not self._path.exists():
            return 0
        try:
            tensors, header = read_tensors(self._path, SCHEMA)
            if header["plan"] != self._plan:
                return 0
            self._hidden.open(header["layers"])
            self._observer.add(unpack_layers(tensors), devices)
        except (UsageError, OSError, KeyError, ValueError, TypeError, IndexError) as error:
            note(f"{self._path} cannot be gone on from ({error}): starting anew")
            return 0
        self.layers = self._saved = header["layers"]
        return self.layers

    def finished(self, layers: int) -> None:
        """So many layers are done: keep that, at once where the hidden states are files, else now and then."""
        self.layers = layers
        self._hidden.forget_before(layers, files=False)
        if not self._hidden.in_memory or time.monotonic() - self._written >= self._seconds:
            self.write()

    def write(self) -> None:
        """Replace the state, the hidden states first: a kill at any moment leaves a state whose file is there."""
        if self.layers == self._saved:
            return
        self._hidden.save(self.layers)
        seen = {index: kinds for index, kinds in self._observer.layers().items() if self._owners[index] < self.layers}
        write_tensors(self._path, pack_layers(seen), {"schema": SCHEMA, "plan": self._plan, "layers": self.layers})
        self._saved, self._written = self.layers, time.monotonic()
        self._hidden.forget_before(self.layers, files=True)
