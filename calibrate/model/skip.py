"""Layers that keep a 16-bit cache beside an FP8 one: what a user's or a recipe's `skip_layers` means for a model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from calibrate.errors import UsageError

SLIDING = "sliding_window"
_INDEX = re.compile(r"[0-9]{1,6}")
SkipLayers = tuple[int | Literal["sliding_window"], ...]


def parse_skip_layers(text: str) -> SkipLayers:
    """`0,1,sliding_window` as a user writes it; `none` is none. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == ["none"]:
        return ()
    if not parts or any(part != SLIDING and not _INDEX.fullmatch(part) for part in parts):
        raise UsageError(f"--skip-layers {text!r}: give layer indices and {SLIDING}, as 0,1,{SLIDING}, or none")
    return tuple(SLIDING if part == SLIDING else int(part) for part in parts)


def skipped_layers(layers: Sequence[Mapping[str, Any]], asked: Sequence[int | str]) -> tuple[int, ...]:
    """Indices of the layers that keep 16 bits, ascending.

    A layer that reads another's cache goes with the layer that writes it, whichever of them was named: they share the cache.

    Args:
        layers: the layout's (`CacheLayout.as_dict()["layers"]`).

    Raises:
        UsageError: an index that no attention layer has, `sliding_window` for a model without one, or nothing left in FP8.
    """
    indices = [layer["index"] for layer in layers]
    sliding = {layer["index"] for layer in layers if layer["sliding_window"] is not None}
    unknown = [one for one in asked if one != SLIDING and one not in indices]
    if unknown:
        raise UsageError(f"skip_layers names layer {unknown[0]}, but the model's attention layers are {_ranges(indices)}")
    if SLIDING in asked and not sliding:
        raise UsageError(
            f"skip_layers names {SLIDING}, but none of the model's {len(layers)} attention layers has a sliding window: "
            "give --skip-layers none to leave all in FP8"
        )
    named = {*(one for one in asked if one != SLIDING), *(sliding if SLIDING in asked else ())}
    written = {layer["target"] for layer in layers if layer["index"] in named}
    result = tuple(sorted(layer["index"] for layer in layers if layer["target"] in written))
    if len(result) == len(layers):
        raise UsageError(f"skip_layers names all {len(layers)} attention layers: nothing would be left in FP8")
    return result


def _ranges(indices: Sequence[int]) -> str:
    """0–11, or 3, 7, 11 where there are gaps."""
    ordered = sorted(indices)
    whole = ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2
    return f"{ordered[0]}–{ordered[-1]}" if whole else ", ".join(map(str, ordered))
