"""Bytes of a checkpoint's weights, from its files' headers or, where there are none, from the model that its config describes."""

import json
from pathlib import Path

import torch

from calibrate.model.source import INDEX_FILE, SCALES_FILE, SINGLE_FILE, read_safetensors_header


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: the index's, else model.safetensors, else all (a consolidated copy may lie beside them)."""
    index = folder / INDEX_FILE
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()} - {folder / SCALES_FILE})
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    return sorted(path for path in folder.glob("*.safetensors") if path.name != SCALES_FILE)


def weight_bytes(folder: Path, network: torch.nn.Module) -> tuple[int, str]:
    """Bytes, and where they were read. `network`: the model on the meta device."""
    files = _weight_files(folder)
    if not files:
        return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters()), "config.json (16-bit weights)"
    total = 0
    for path in files:
        entries = json.loads(read_safetensors_header(path))
        total += sum(one["data_offsets"][1] - one["data_offsets"][0] for name, one in entries.items() if name != "__metadata__")
    return total, "safetensors headers"
