"""What each format makes of real K and V, and what a whole cache costs in it."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from calibrate.collect.watch import observe
from calibrate.evaluate.spectrum_result import StorageError
from calibrate.lowbit import Placement, Window
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.progress import meter


class _Sums:
    """Σ‖x̂ − x‖², Σ‖x‖², Σ |‖x̂‖ − ‖x‖| / ‖x‖ and the number of vectors, in float64."""

    def __init__(self) -> None:
        self.error = self.energy = self.norm = 0.0
        self.vectors = 0

    def add(self, exact: torch.Tensor, stored: torch.Tensor) -> None:
        exact, stored = exact.to(torch.float64), stored.to(torch.float64)
        norms = exact.norm(dim=-1)
        alive = norms > 0
        self.error += float((stored - exact).square().sum())
        self.energy += float(exact.square().sum())
        self.norm += float(((stored.norm(dim=-1) - norms).abs()[alive] / norms[alive]).sum())
        self.vectors += int(alive.sum())

    def result(self) -> StorageError | None:
        return None if not self.vectors else StorageError(relative_mse=self.error / self.energy, norm_error=self.norm / self.vectors)


def storage_errors(
    model: PreTrainedModel, layout: CacheLayout, rows: Sequence[Sequence[int]], placements: Sequence[Placement]
) -> list[tuple[StorageError | None, StorageError | None]]:
    """For each placement the error of K and of V over the tokens that it quantizes; None where that is no token.

    Args:
        rows: token ids, one document each.
    """
    sums = [{"k": _Sums(), "v": _Sums()} for _ in placements]
    with torch.inference_mode(), meter("storing", sum(len(row) for row in rows)) as progress:
        for row in rows:

            def see(index: int, kind: str, values: torch.Tensor) -> None:
                if kind == "q":
                    return
                for placement, both in zip(placements, sums, strict=True):
                    exact = values.to(placement.cache_dtype).to(torch.float32)
                    _store(placement, index, kind, exact, both[kind])

            observe(model, layout, torch.tensor([list(row)], device=model.device), see)
            progress.advance(len(row))
    return [(both["k"].result(), both["v"].result()) for both in sums]


def _store(placement: Placement, index: int, kind: str, exact: torch.Tensor, sums: _Sums) -> None:
    fmt = placement.fmt
    if index in placement.whole:
        window = fmt.key_window if kind == "k" else fmt.value_window
    elif index in placement.passing:
        window = Window()
    else:
        return
    tokens = window.quantized(exact.shape[-2])
    if tokens:
        tile = exact[..., window.sink : window.sink + tokens, :]
        sums.add(tile, (fmt.key if kind == "k" else fmt.value)(tile, index, window.sink))


def cache_bytes(layout: CacheLayout, placement: Placement | None, tokens: int) -> float:
    """Bytes of the whole cache of one sequence: metadata, 16-bit layers, sinks and tails included. None is the 16-bit cache."""
    return sum(_layer_bytes(layer, placement, tokens) for layer in layout.layers if layer.writes)


def _layer_bytes(layer: AttentionLayer, placement: Placement | None, tokens: int) -> float:
    kept = min(tokens, layer.sliding_window or tokens)
    if placement is None or layer.index not in placement.whole | placement.passing:
        return 2 * kept * layer.num_key_value_heads * (layer.head_dim + layer.value_head_dim)
    return placement.fmt.sequence_bytes(kept, layer.num_key_value_heads, layer.head_dim, layer.value_head_dim)
