"""Planted K and V, padding, order, splitting and resuming: each with an answer that is known beforehand."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from calibrate.collect import collect
from calibrate.collect.observer import Observer
from calibrate.corpus import plan_batches
from calibrate.errors import UsageError
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import CACHE_DTYPES, merge, pack_layers
from tests.conftest import collect_run, rows_corpus
from tests.tiny import edit_config, tiny_checkpoint

LENGTHS = [40, 7, 64, 12, 33, 64, 21, 5, 50, 18, 9, 30]


def _bits(statistics) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in pack_layers(statistics.layers).items()}


def _observe_once(key: torch.Tensor, lengths: list[int], cache_dtype: str = "bfloat16"):
    """Count one tensor as K, V and Q of a one-layer model."""
    heads, dim = key.shape[1], key.shape[3]
    layout = CacheLayout("planted", (AttentionLayer(0, "attention", 0, heads, heads, dim, dim),))
    observer = Observer(layout, CACHE_DTYPES[cache_dtype])
    observer.begin(lengths, key.shape[2], key.device)
    for kind in ("k", "v", "q"):
        observer.see(0, kind, key)
    return observer, observer.end(2)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16"])
def test_planted_amax_of_every_head_and_moments(cache_dtype):
    generator = torch.Generator().manual_seed(3)
    key = torch.randn((2, 3, 10, 8), generator=generator)
    planted = [5.25, 448.0, 0.5]
    key = key.clamp(-0.25, 0.25)
    for head, amax in enumerate(planted):
        key[1, head, 4, 2] = -amax  # negative: the sign must not matter
    observer, bad = _observe_once(key, [10, 10], cache_dtype)
    assert bad == []
    seen = observer.layers()[0]["k"]
    values = CACHE_DTYPES[cache_dtype].decode()
    assert [values[code] for code in seen.amax_codes] == planted
    assert seen.part_amax[[0, 1, 3]].max() == 0
    assert seen.counts.sum(axis=1).tolist() == [160, 160, 160]
    rounded = key.to(CACHE_DTYPES[cache_dtype].dtype).double()
    mean, variance = seen.moments()
    np.testing.assert_allclose(mean, rounded.mean(dim=(0, 2)).numpy(), rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(variance, rounded.var(dim=(0, 2), correction=0).numpy(), rtol=1e-12)


def test_a_large_mean_costs_the_variance_nothing():
    """Mean 211 and spread 2^-8 in one channel: E[x²] − mean² in float32 would be noise."""
    key = torch.full((1, 1, 1000, 1), 256.0)
    key[0, 0, ::2, 0] = 258.0  # neighbours in bf16
    observer, _ = _observe_once(key, [1000])
    mean, variance = observer.layers()[0]["k"].moments()
    assert mean[0, 0] == 257.0
    assert variance[0, 0] == 1.0


@pytest.mark.parametrize("poison", [1e30, float("nan"), float("inf"), -3.0])
def test_padding_never_counts(poison):
    generator = torch.Generator().manual_seed(4)
    key = torch.randn((3, 2, 16, 8), generator=generator)
    lengths = [16, 3, 9]
    alone = [_observe_once(key[row : row + 1, :, :length], [length])[0].layers()[0]["k"] for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        key[row, :, length:] = poison
    observer, bad = _observe_once(key, lengths)
    assert bad == []
    seen = observer.layers()[0]["k"]
    np.testing.assert_array_equal(seen.counts, sum(one.counts for one in alone))
    np.testing.assert_array_equal(seen.amax_codes, np.max([one.amax_codes for one in alone], axis=0))
    mean, variance = seen.moments()
    flat = torch.cat([key[row, :, :length].to(torch.bfloat16).double() for row, length in enumerate(lengths)], dim=1)
    np.testing.assert_allclose(mean, flat.mean(dim=1).numpy(), rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(variance, flat.var(dim=1, correction=0).numpy(), rtol=1e-12)


def test_adversarial_padding_tokens_change_no_bit(llama):
    corpus = rows_corpus(LENGTHS)
    clean = collect_run(llama, corpus)
    batches = []
    for batch in clean.batches:
        ids = batch.input_ids.copy()
        for row, length in enumerate(batch.lengths):
            ids[row, length:] = np.random.default_rng(row).integers(3, 200, ids.shape[1] - length)
        batches.append(replace(batch, input_ids=ids))
    assert any((dirty.input_ids != one.input_ids).any() for dirty, one in zip(batches, clean.batches, strict=True))
    assert _bits(collect(clean)) == _bits(collect(replace(clean, batches=tuple(batches))))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "qwen3_next"])
def test_documents_never_see_each_other(family, tmp_path):
    """A row gives the same K and V beside others as alone, up to the rounding of another matmul shape."""
    path = tiny_checkpoint(tmp_path / family, family)
    corpus = rows_corpus([24, 20, 24, 11])
    together = collect(collect_run(path, corpus, batches=plan_batches(replace(corpus, documents=400), 4096, pad_token_id=0)))
    alone = collect(collect_run(path, corpus, tokens_per_batch=1))
    values = together.values()
    for index, kinds in together.layers.items():
        for kind, seen in kinds.items():
            other = alone.layers[index][kind]
            assert seen.counts.sum() == other.counts.sum()
            np.testing.assert_allclose(values[seen.amax_codes], values[other.amax_codes], rtol=2**-7)
            moved = np.abs(np.cumsum(seen.counts, axis=1) - np.cumsum(other.counts, axis=1)).max() / seen.counts[0].sum()
            assert moved < 0.02, f"{kind} of layer {index}: {moved:.2%} of the elements moved"


def test_reordering_splitting_and_merging_change_no_bit(llama):
    corpus = rows_corpus(LENGTHS)
    run = collect_run(llama, corpus)
    whole = collect(run)
    shuffled = tuple(run.batches[place] for place in np.random.default_rng(5).permutation(len(run.batches)))
    assert _bits(whole) == _bits(collect(replace(run, batches=shuffled)))
    parts = [collect(replace(run, batches=run.batches[start::3])) for start in range(3)]
    assert _bits(whole) == _bits(merge(parts))
    assert merge(parts).digest() == merge(parts[::-1]).digest()
    assert merge(parts).counted["tokens"] == whole.counted["tokens"] == sum(LENGTHS)
    with pytest.raises(UsageError, match="appear twice"):
        merge([parts[0], parts[0]])


def test_merging_refuses_other_weights(llama, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=2)
    corpus = rows_corpus([20])
    with pytest.raises(UsageError, match="cache layouts"):
        merge([collect(collect_run(llama, corpus)), collect(collect_run(other, corpus))])


def test_growth_is_by_quarter_of_the_documents(llama):
    corpus = rows_corpus([16] * 8)
    statistics = collect(collect_run(llama, corpus))
    for quarter in range(4):
        rows = tuple(sample for sample in corpus.samples if sample.document // 2 == quarter)
        only = collect(collect_run(llama, replace(corpus, samples=rows), tokens_per_batch=32))
        for index, kinds in statistics.layers.items():
            for kind, seen in kinds.items():
                np.testing.assert_array_equal(seen.part_amax[quarter], only.layers[index][kind].part_amax[quarter])
                assert (only.layers[index][kind].part_amax[[part for part in range(4) if part != quarter]] == 0).all()


def test_nan_names_layer_head_and_sample(llama, tmp_path, monkeypatch):
    corpus = rows_corpus([20, 30, 10])
    run = collect_run(llama, corpus)
    token = int(corpus.samples[1].tokens[7])
    for sample in (corpus.samples[0], corpus.samples[2]):
        sample.tokens[sample.tokens == token] = 3
    run = replace(run, batches=plan_batches(corpus, 4096, pad_token_id=0))
    attention = run.model.get_submodule("model.layers.1.self_attn")
    original = attention.v_proj.forward

    def poisoned(hidden):
        out = original(hidden).clone()
        rows = (run_ids[0] == token).nonzero()
        for row, place in rows.tolist():
            out[row, place, 32:] = float("nan")  # head 1 of 2, head_dim 32
        return out

    run_ids = [None]
    embed = run.model.get_input_embeddings()
    embed.register_forward_pre_hook(lambda module, args: run_ids.__setitem__(0, args[0]))
    monkeypatch.setattr(attention.v_proj, "forward", poisoned)
    with pytest.raises(UsageError, match=r"V of layer 1 \(model\.layers\.1\.self_attn\), head 1, .* sample 1 \(rows:2\)"):
        collect(run)


def test_resume_after_interrupt_gives_the_same_bytes(llama, tmp_path, monkeypatch):
    corpus = rows_corpus(LENGTHS)
    run = collect_run(llama, corpus)
    expected = collect(run)
    state = tmp_path / "state.safetensors"
    assert len(run.batches) > 4
    for stop_after in (1, 3):  # twice, at different places
        _interrupt_after(run, state, stop_after, monkeypatch)
        assert state.exists()
    assert collect(run, state=state).digest() == expected.digest()


def _interrupt_after(run, state, batches, monkeypatch) -> None:
    """Collect, with Ctrl-C while batch number `batches` is under way."""
    ended = []

    def close(observer, part):
        ended.append(part)
        if len(ended) == batches:
            os.kill(os.getpid(), signal.SIGINT)
        return _CLOSE(observer, part)

    with monkeypatch.context() as patch:
        patch.setattr(Observer, "close", close)
        with pytest.raises(KeyboardInterrupt):
            collect(run, state=state)
    assert len(ended) == batches


_CLOSE = Observer.close


def test_a_state_of_another_plan_is_ignored(llama, tmp_path, monkeypatch):
    state = tmp_path / "state.safetensors"
    run = collect_run(llama, rows_corpus(LENGTHS))
    _interrupt_after(run, state, 2, monkeypatch)
    other = collect_run(llama, rows_corpus(LENGTHS, seed=9))
    assert collect(other, state=state).digest() == collect(other).digest()


def test_killed_collections_resume_to_the_same_bytes(llama, tmp_path):
    """kill -9 at several moments of the real command; the state file is written after every batch."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " + "alpha beta gamma " * 20}) + "\n" for number in range(24)))
    command = [sys.executable, "-m", "calibrate", "collect", str(llama), "--data", str(text), "--sequence-length", "128"]
    command += ["--samples", "40", "--tokens-per-batch", "128", "--device", "cpu", "--dtype", "float32"]
    command += ["--save-every", "0"]
    expected = tmp_path / "expected.safetensors"
    subprocess.run([*command, "-o", str(expected)], check=True, capture_output=True)
    output = tmp_path / "killed.safetensors"
    state = tmp_path / ".killed.safetensors.collect-state.safetensors"
    resumed = 0
    for delay in (0.0, 0.05, 0.2):
        process = subprocess.Popen([*command, "-o", str(output)], stderr=subprocess.DEVNULL)
        before = state.stat().st_mtime_ns if state.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.wait()
        resumed += state.exists() and not output.exists()
    assert resumed, "every run ended before it could be killed"
    subprocess.run([*command, "-o", str(output)], check=True, capture_output=True)
    assert output.read_bytes() == expected.read_bytes()
    assert not state.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.safetensors", "killed.safetensors", "text.jsonl"]


def test_an_encoder_writes_no_cache(tmp_path):
    path = tiny_checkpoint(tmp_path / "m")
    edit_config(path, architectures=["BertForMaskedLM"])
    with pytest.raises(UsageError, match="not a causal LM"):
        collect_run(path, rows_corpus([5]))


def test_a_damaged_state_is_started_anew(llama, tmp_path, capsys):
    state = tmp_path / "state.safetensors"
    state.write_bytes(b"no state at all")
    run = collect_run(llama, rows_corpus(LENGTHS))
    assert collect(run, state=state).digest() == collect(run).digest()
    assert "starting anew" in capsys.readouterr().err


def test_a_layer_that_saw_nothing_is_named(llama, monkeypatch):
    see = Observer.see
    monkeypatch.setattr(Observer, "see", lambda self, index, kind, values: None if (index, kind) == (1, "v") else see(self, index, kind, values))
    with pytest.raises(UsageError, match=r"V of layer 1 \(model\.layers\.1\.self_attn\) saw nothing"):
        collect(collect_run(llama, rows_corpus([20])))
