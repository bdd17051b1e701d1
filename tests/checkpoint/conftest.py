"""Calibrated tiny checkpoints, and a way to see that nothing was left behind."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from calibrate.checkpoint import Written, write_checkpoint
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, Scales, solve


@pytest.fixture(scope="session")
def llama_scales(llama_statistics) -> Scales:
    return solve(llama_statistics, PolicyOptions())


def scales_for(source: Path, scales: Scales) -> Scales:
    """`scales` as if they had been calibrated on the weights in `source`."""
    run = json.loads(json.dumps(scales.provenance[0]))
    run["model"]["fingerprint"] = SourceCheckpoint.open(source).fingerprint
    return dataclasses.replace(scales, provenance=(run,))


@pytest.fixture
def write(llama_scales):
    """Write the tiny llama's scales (or the given ones) into a copy of a checkpoint that has its layers."""

    def call(source: Path, output: Path, scales: Scales | None = None, **options) -> Written:
        return write_checkpoint(SourceCheckpoint.open(source), scales or scales_for(source, llama_scales), output, **options)

    return call


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path under a folder with its content; None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor that the index lists, as raw bytes with its type and shape kept by safetensors."""
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if index.get(name) == file}  # noqa: SIM118
    assert set(tensors) == set(index)
    return tensors


def add_foreign_scales(folder: Path) -> list[str]:
    """Put another tool's scales inside a weight file, as AutoFP8 and llm-compressor do."""
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in ("k", "v")]
    save_torch(tensors | {name: torch.tensor([0.5]) for name in names}, file, metadata={"format": "pt"})
    return names


__all__ = ["add_foreign_scales", "read_weights", "scales_for", "snapshot"]
