"""Folded weights on disk: shards with changed tensors are rewritten tensor by tensor, config.json is copied, everything else is linked."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from calibrate.artefact import FOLD_FILE
from calibrate.checkpoint.links import link, own_files
from calibrate.checkpoint.names import tensor_prefixes
from calibrate.checkpoint.place import folder_in_the_making
from calibrate.errors import UsageError
from calibrate.fold.apply import Changes, changes
from calibrate.fold.artefact import Fold
from calibrate.fold.parts import Parts
from calibrate.model import SourceCheckpoint


def write_folded(source: SourceCheckpoint, fold: Fold, parts: dict[int, Parts], output: Path) -> None:
    """Write the folded checkpoint with its fold beside it; each tensor keeps its type.

    Raises:
        UsageError: tensors under unknown names, a full disk.
    """
    prefixes = tensor_prefixes([layer.module for layer in fold.layers], source.weight_map)
    change = {f"{prefixes[layer.module]}.{name}": by for layer in fold.layers for name, by in changes(layer, parts[layer.index]).items()}
    missing = {name for name in change if name.endswith(".weight")} - set(source.weight_map)
    if missing:
        raise UsageError(f"{source.path} has no tensor {min(missing)}: its weights cannot be folded")
    files = {source.weight_map[name] for name in change if name in source.weight_map}
    with folder_in_the_making(output) as making:
        for relative, real in own_files(source.path, {"kv_calibration"}):
            target, name = making / relative, str(relative)
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in files:
                _rewrite(real, source.headers[name], target, change)
            elif name == "config.json":
                shutil.copy2(real, target)  # people edit it: not the original's too
            else:
                link(real, target)
        fold.save(making / FOLD_FILE)


def _rewrite(source: Path, header: bytes, target: Path, change: Changes) -> None:
    """Write a shard with its changed tensors under the same header, in the order in which they lie."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    with safe_open(source, framework="pt") as tensors, target.open("wb") as writer:
        writer.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
            tensor = tensors.get_tensor(name)
            if name in change:
                tensor = change[name](tensor.double()).to(tensor.dtype)
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"{name} leaves the range of {str(tensor.dtype).removeprefix('torch.')} when it is folded")
            writer.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    shutil.copystat(source, target)
