"""Fixtures for all rooms. Everything here is real: tiny models are transformers models, checkpoints are files."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

from calibrate.collect import CollectRun
from calibrate.corpus import Corpus, Sample, plan_batches
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from tests.tiny import VOCAB, tiny_checkpoint


def rows_corpus(lengths: list[int], seed: int = 0, vocab: int = VOCAB, documents: list[int] | None = None) -> Corpus:
    """Random token rows of these lengths, one document each unless told otherwise."""
    rng = np.random.default_rng(seed)
    owners = documents or list(range(len(lengths)))
    samples = tuple(
        Sample(rng.integers(3, vocab, length).astype(np.int32), owner, f"rows:{row + 1}")
        for row, (length, owner) in enumerate(zip(lengths, owners, strict=True))
    )
    return Corpus(samples, max(owners) + 1, f"rows-{seed}-{lengths}", {"sources": [{"data": "rows"}], "seed": seed})


def pytest_configure(config):
    """A shell's background job ignores Ctrl-C, and so would the children that tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(config, val, argname):
    """Bytes by their length: a test's name that holds content (a time of packing, say) differs between xdist's workers, which ends the run."""
    return f"{argname} of {len(val)} bytes" if isinstance(val, bytes) else None


def missing_here() -> dict[str, str]:
    """Marker → why the tests that bear it cannot run here; "" where they can."""
    from calibrate.engines.host import choose_kv_dtype, uses_cuda, vllm_distribution
    from calibrate.errors import HostError

    try:
        choice = choose_kv_dtype({"head_dim": 32}, uses_cuda(vllm_distribution()))
    except HostError as error:
        return {"vllm": str(error), "fp8_cpu": str(error)}
    return {"vllm": "", "fp8_cpu": "" if choice.kv_cache_dtype == "fp8" else choice.note.partition(";")[0]}


def pytest_collection_modifyitems(items):
    for marker, reason in missing_here().items():
        for item in items:
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A tiny bf16 Llama checkpoint with grouped-query attention. Read only."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama")


def collect_run(path: Path, corpus: Corpus, *, tokens_per_batch: int = 64, batches=None) -> CollectRun:
    """A collection of a checkpoint in fp32 on the CPU."""
    import torch

    source = SourceCheckpoint.open(path)
    model = load_model(source, device="cpu", dtype=torch.float32)
    return CollectRun(model, source, probe_layout(model), corpus, batches or plan_batches(corpus, tokens_per_batch, pad_token_id=0))


@pytest.fixture(scope="session")
def llama_statistics(llama):
    """What the tiny llama writes into its cache on five random rows. Read only."""
    from calibrate.collect import collect

    return collect(collect_run(llama, rows_corpus([40, 33, 17, 29, 8])))
