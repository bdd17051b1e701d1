"""Folded weights on disk: shards with changed tensors are rewritten tensor by tensor, everything else is linked."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from calibrate.artefact import FOLD_FILE, write_json
from calibrate.checkpoint.links import link, own_files
from calibrate.checkpoint.names import tensor_prefixes
from calibrate.checkpoint.place import folder_in_the_making
from calibrate.errors import UsageError
from calibrate.fold.apply import added_biases, changes
from calibrate.fold.artefact import Fold
from calibrate.fold.parts import Parts
from calibrate.model import SourceCheckpoint
from calibrate.model.source import INDEX_FILE

_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_folded(source: SourceCheckpoint, fold: Fold, parts: dict[int, Parts], output: Path) -> None:
    """Write the folded checkpoint with its fold beside it; each tensor keeps its type.

    Raises:
        UsageError: tensors under unknown names, a full disk.
    """
    prefixes = tensor_prefixes([layer.module for layer in fold.layers], source.weight_map)
    change, homes = {}, {}
    for layer in fold.layers:
        prefix = prefixes[layer.module]
        change |= {f"{prefix}.{name}": by for name, by in changes(layer, parts[layer.index]).items()}
        if fold.adds_biases:
            homes[f"{prefix}.o_proj.weight"] = (prefix, layer)
    missing = {name for name in change if name.endswith(".weight")} - set(source.weight_map)
    if missing:
        raise UsageError(f"{source.path} has no tensor {min(missing)}: its weights cannot be folded")
    with folder_in_the_making(output) as making:
        placed: dict[str, tuple[str, int]] = {}
        for relative, real in own_files(source.path, {"config.json", INDEX_FILE, "kv_calibration"}):
            target, name = making / relative, str(relative)
            target.parent.mkdir(parents=True, exist_ok=True)
            mine = {tensor for tensor, file in source.weight_map.items() if file == name}
            if mine & (set(change) | set(homes)):
                added = _added(real, {tensor: homes[tensor] for tensor in mine & set(homes)}, parts, source)
                placed |= {tensor: (name, value.nbytes) for tensor, value in added.items()}
                _rewrite(real, source.headers[name], target, change, added)
            else:
                link(real, target)
        write_json(making / "config.json", _config(source, fold))
        if source.indexed:
            write_json(making / INDEX_FILE, _index(source, placed))
        fold.save(making / FOLD_FILE)


def _added(file: Path, homes: dict[str, tuple[str, Any]], parts: dict[int, Parts], source: SourceCheckpoint) -> dict[str, torch.Tensor]:
    """New or replaced biases of the layers whose output projections lie in this file, in that projection's type."""
    added = {}
    with safe_open(file, framework="pt") as tensors:
        for name, (prefix, layer) in homes.items():
            weight = tensors.get_tensor(name)
            present = {}
            for short in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"):
                holder = source.weight_map.get(f"{prefix}.{short}")
                if holder is not None:
                    with safe_open(source.path / holder, framework="pt") as others:
                        present[short] = others.get_tensor(f"{prefix}.{short}")
            new = added_biases(layer, parts[layer.index], weight, present)
            added |= {f"{prefix}.{short}": tensor.to(weight.dtype) for short, tensor in new.items()}
    elsewhere = [name for name in added if source.weight_map.get(name, file.name) != file.name]
    if elsewhere:
        raise UsageError(f"{elsewhere[0]} and its weight lie in different shards of {source.path}: leave `mean` out of --fold")
    return added


def _rewrite(source: Path, header: bytes, target: Path, change: dict[str, Any], added: dict[str, torch.Tensor]) -> None:
    """Write a shard with its changed tensors, in the order in which they lie, new ones at the end."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", None)
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    new = {} if metadata is None else {"__metadata__": metadata}
    new |= {name: dict(entries[name]) for name in order}
    start = max((entries[name]["data_offsets"][1] for name in order), default=0)
    for name in sorted(set(added) - set(entries)):
        new[name] = {"dtype": _TYPES[added[name].dtype], "shape": list(added[name].shape), "data_offsets": [start, start + added[name].nbytes]}
        start += added[name].nbytes
    text = json.dumps(new, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format keeps tensor data aligned
    with safe_open(source, framework="pt") as tensors, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for name in [name for name in new if name != "__metadata__"]:
            if name in added:
                tensor = added[name]
            else:
                tensor = tensors.get_tensor(name)
                if name in change:
                    tensor = change[name](tensor.double()).to(tensor.dtype)
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"{name} leaves the range of {str(tensor.dtype).removeprefix('torch.')} when it is folded")
            writer.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    shutil.copystat(source, target)


def _config(source: SourceCheckpoint, fold: Fold) -> dict[str, Any]:
    config = copy.deepcopy(source.config)
    if fold.adds_biases:
        (config.get("text_config") or config)["attention_bias"] = True
    return config


def _index(source: SourceCheckpoint, placed: dict[str, tuple[str, int]]) -> dict[str, Any]:
    index = json.loads((source.path / INDEX_FILE).read_text(encoding="utf-8"))
    fresh = {name: where for name, where in placed.items() if name not in source.weight_map}
    index["weight_map"] = dict(sorted({**index["weight_map"], **{name: file for name, (file, _) in fresh.items()}}.items()))
    metadata = index.get("metadata") or {}
    if "total_size" in metadata:
        metadata["total_size"] += sum(size for _, size in fresh.values())
    index["metadata"] = metadata
    return index
