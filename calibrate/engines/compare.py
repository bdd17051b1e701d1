"""The comparison itself: a checkpoint's scales against what each rank of the engine holds. Pure, no engine needed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calibrate.engines.names import KINDS, group_by_layer, match_layers
from calibrate.engines.readback import LayerReadback

Values = tuple[float, ...]
Record = Mapping[str, Any]  # what `extension.scales_of` says of one module


class _Unexpected(ValueError):
    """The file's tensors cannot describe this layer; the text becomes the row's reason."""


def compare_scales(
    expected: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Record]], strategy: str, kinds: Sequence[str] = KINDS
) -> tuple[LayerReadback, ...]:
    """Compare every scale exactly.

    Args:
        expected: the checkpoint's tensors, fp32: `[1]` for `tensor`; `[kv_heads]` (q: `[heads]`) for `attn_head`, in any shape.
        ranks: for each tensor-parallel rank, the module records of `extension.scales_of`.
        strategy: `tensor` or `attn_head`.
        kinds: those that the checkpoint's form can hold; the others are not compared.

    Returns:
        rows for every rank, layer and kind, layers in file order, then the engine's layers of which the file says nothing.
    """
    layers = group_by_layer(expected)
    return tuple(row for rank, records in enumerate(ranks) for row in _compare_rank(layers, records, strategy, kinds, rank, len(ranks)))


def _compare_rank(layers, records, strategy: str, kinds: Sequence[str], rank: int, world: int) -> Iterator[LayerReadback]:
    modules = {record["module"]: record for record in records if record["caches"]}
    pairs = match_layers(list(layers), list(modules))
    for prefix, tensors in layers.items():
        record = modules.get(pairs.get(prefix, ""))
        for kind in kinds:
            yield _compare_kind(prefix, kind, tensors, record, strategy, rank, world)
    for module in modules.keys() - set(pairs.values()):
        for kind in kinds:
            loaded = tuple(modules[module]["scales"][kind])
            yield LayerReadback(module, rank, kind, (), loaded, False, "vLLM layer without scales in the file")


def _compare_kind(prefix, kind: str, tensors: Mapping[str, np.ndarray], record, strategy: str, rank: int, world: int) -> LayerReadback:
    loaded = None if record is None else tuple(record["scales"][kind])
    if kind not in tensors:
        return LayerReadback(prefix, rank, kind, (), loaded, False, f"no {kind}_scale in the file")
    whole = _floats(tensors[kind])
    if record is None:
        return LayerReadback(prefix, rank, kind, whole, None, False, "layer missing in vLLM")
    try:
        share = _rank_share(tensors, kind, record["num_kv_heads"], strategy, rank, world)
    except _Unexpected as error:
        return LayerReadback(prefix, rank, kind, whole, loaded, False, str(error))
    reason = _bad_values(share, "file") or _difference(share, loaded) or _bad_twin(loaded, record["floats"][kind], kind)
    return LayerReadback(prefix, rank, kind, share, loaded, not reason, reason)


def _rank_share(tensors: Mapping[str, np.ndarray], kind: str, kv_heads_here: int, strategy: str, rank: int, world: int) -> Values:
    """The values that belong on `rank`: all of them per tensor, its KV heads' per head, where a query scale is the maximum of its group."""
    values = _floats(tensors[kind])
    if strategy == "tensor":
        if len(values) != 1:
            raise _Unexpected(f"file holds {len(values)} values, strategy tensor needs 1")
        return values
    total = np.size(tensors["k"]) if "k" in tensors else kv_heads_here * world
    if kv_heads_here * world != total and not (kv_heads_here == 1 and world % total == 0):
        raise _Unexpected(f"file holds {total} KV heads, vLLM has {kv_heads_here} on each of {world} ranks")
    if len(values) % total or (kind != "q" and len(values) != total):
        raise _Unexpected(f"file holds {len(values)} values for {total} KV heads")
    group = len(values) // total
    heads = [_largest(values[start : start + group]) for start in range(0, len(values), group)]
    first = rank * kv_heads_here if kv_heads_here * world == total else rank // (world // total)
    return tuple(heads[first : first + kv_heads_here])


def _floats(tensor: np.ndarray) -> Values:
    return tuple(float(value) for value in np.asarray(tensor, dtype=np.float32).reshape(-1))


def _largest(values: Values) -> float:
    # a NaN must survive the maximum, so that it is reported
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _bad_values(values: Values, where: str) -> str:
    if not all(math.isfinite(value) for value in values):
        return f"not finite in the {where}"
    return "" if all(value > 0 for value in values) else f"not positive in the {where}"


def _difference(expected: Values, loaded: Values) -> str:
    if loaded == expected:
        return ""
    if all(value == 1.0 for value in loaded):
        return "not loaded (stayed 1.0)"
    return _bad_values(loaded, "engine") or "differs"


def _bad_twin(loaded: Values, twin: float, kind: str) -> str:
    """Attention kernels read `_x_scale_float`, not the tensor: it must be the tensor's maximum."""
    return "" if twin == max(loaded) else f"_{kind}_scale_float is {twin!r}, not the tensor's maximum"
