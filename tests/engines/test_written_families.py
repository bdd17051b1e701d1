"""Checkpoints that `write` made of many families: real vLLM finds every scale under the name that was chosen."""

import pytest
import torch

from calibrate.checkpoint import write_checkpoint
from calibrate.collect import collect
from calibrate.engines import load_scales
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

# name → (family, changes): head_dim 32, as vLLM's attention kernels need
WRITTEN = {
    "llama": ("llama", {}),
    "llama-head": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-head": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-head": ("gemma3_text", {}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {"n_embd": 128}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
}


@pytest.mark.vllm
def test_vllm_loads_what_was_written(tmp_path):
    paths, expected = [], {}
    for name, (family, changes) in WRITTEN.items():
        torch.manual_seed(len(paths))
        source_path = tiny_checkpoint(tmp_path / f"{name}-source", family, **changes)
        statistics = collect(collect_run(source_path, rows_corpus([24, 30])))
        scales = solve(statistics, PolicyOptions(granularity="head" if name.endswith("-head") else "tensor"))
        written = write_checkpoint(SourceCheckpoint.open(source_path), scales, tmp_path / name)
        paths.append(written.path)
        expected[written.path] = written.tensors
        assert len({float(scale.max()) for scale in written.tensors.values()}) > len(written.tensors) // 2, "scales that are all alike prove nothing"
    readbacks = load_scales(paths)
    failures = {path.name: (one.error, list(one.failures)[:3]) for path, one in zip(paths, readbacks, strict=True) if not one.ok}
    assert not failures
    for path, one in zip(paths, readbacks, strict=True):
        assert len(one.rows) == len(expected[path])
