"""Weight files and their index."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibrate.model.source import INDEX_FILE, SCALES_FILE, SINGLE_FILE, SourceCheckpoint

_ONLY_SHARD = "model-00001-of-00001.safetensors"


def shard_names(source: SourceCheckpoint) -> dict[str, str]:
    """File name in the source → file name in the calibrated checkpoint.

    A lone model.safetensors gets a shard's name: transformers prefers that file to any index, would never see the scales, and then fake
    quantizes K and V with scales from uninitialized memory.
    """
    return {name: _ONLY_SHARD if name == SINGLE_FILE else name for name in source.headers}


def build_index(source: SourceCheckpoint, names: dict[str, str], dropped: set[str], scales: dict[str, int]) -> dict[str, Any]:
    """The index: every weight, without `dropped`, and every scale (name → bytes). vLLM skips a file that the index does not list."""
    metadata: dict[str, Any] = {}
    if source.indexed:
        metadata = json.loads((source.path / INDEX_FILE).read_text(encoding="utf-8")).get("metadata") or {}
    weights = {tensor: names[file] for tensor, file in source.weight_map.items() if tensor not in dropped}
    sizes = _tensor_bytes(source)
    metadata["total_size"] = sum(sizes[tensor] for tensor in weights) + sum(scales.values())
    return {"metadata": metadata, "weight_map": dict(sorted({**weights, **dict.fromkeys(scales, SCALES_FILE)}.items()))}


def _tensor_bytes(source: SourceCheckpoint) -> dict[str, int]:
    sizes = {}
    for header in source.headers.values():
        for tensor, entry in json.loads(header).items():
            if tensor != "__metadata__":
                sizes[tensor] = entry["data_offsets"][1] - entry["data_offsets"][0]
    return sizes


def copy_without(source: Path, header: bytes, target: Path, drop: Callable[[str], bool]) -> None:
    """Copy a safetensors file without some of its tensors, in blocks (vLLM loads every tensor of a listed file, stale scales included)."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None)
    kept = sorted(((entry["data_offsets"], name, entry) for name, entry in entries.items() if not drop(name)), key=lambda item: item[0])
    start, new = 0, {} if metadata is None else {"__metadata__": metadata}
    for (first, last), name, entry in kept:
        new[name] = {**entry, "data_offsets": [start, start + last - first]}
        start += last - first
    text = json.dumps(new, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format keeps tensor data aligned
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for (first, last), _, _ in kept:
            reader.seek(8 + len(header) + first)
            _copy_range(reader, writer, last - first)
    shutil.copystat(source, target)


def _copy_range(reader: Any, writer: Any, length: int, block: int = 1 << 24) -> None:
    while length:
        data = reader.read(min(block, length))
        writer.write(data)
        length -= len(data)
