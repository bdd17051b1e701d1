"""Second moments: what is counted, exactness under merge and resume, and the moments themselves against a slow independent path."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from calibrate.collect import collect
from calibrate.collect.second import SecondMoments
from calibrate.errors import UsageError
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import Statistics, merge, pack_layers
from calibrate.statistics.second import SKIPPED_TOKENS, channels_of, packed_length, second_moments
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

LONG = [200, 140, 129, 128, 30, 181]  # the fourth and fifth have nothing to count


def _run(path, lengths=LONG, **options):
    return replace(collect_run(path, rows_corpus(lengths, **options), tokens_per_batch=256), second_moments=True)


def _bits(statistics) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in pack_layers(statistics.layers).items()}


def test_first_tokens_and_padding_are_left_out_and_a_large_mean_costs_nothing():
    width, lengths = 160, [160, 140, 100]
    layout = CacheLayout("planted", (AttentionLayer(0, "attention", 0, 4, 2, 8, 8),))
    generator = torch.Generator().manual_seed(1)
    key = 1000 + torch.randn((3, 2, width, 8), generator=generator) / 16  # in bfloat16 a step at 1000 is 4
    key[:, :, :, 0] = 208.0
    query = torch.randn((3, 4, width, 8), generator=generator)
    for row, length in enumerate(lengths):
        key[row, :, :SKIPPED_TOKENS] = 7e4
        key[row, :, length:] = torch.nan
        query[row, :, length:] = torch.inf
    seen = SecondMoments(layout, torch.bfloat16)
    seen.begin(lengths, width, key.device)
    seen.see(0, "k", key)
    seen.see(0, "q", query)
    seen.end()

    def counted(values):  # [heads, tokens, channels]
        kept = [values[row, :, SKIPPED_TOKENS:length] for row, length in enumerate(lengths)]
        return torch.cat(kept, dim=1).to(torch.bfloat16).double().numpy()

    got, expected = second_moments(seen.of((0, "k"))), counted(key)
    assert got.tokens.tolist() == [44, 44]
    np.testing.assert_array_equal(got.mean, expected.mean(axis=1))
    np.testing.assert_allclose(got.covariance, [np.cov(head.T, bias=True) for head in expected], rtol=1e-12, atol=1e-12)
    assert (got.covariance[:, 0] == 0).all()
    grouped = counted(query).reshape(2, -1, 8)  # two query heads read each KV head
    got = second_moments(seen.of((0, "q")))
    assert got.tokens.tolist() == [88, 88]
    np.testing.assert_allclose(got.second_moment, np.einsum("htc,htd->hcd", grouped, grouped) / 88, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_models_moments_are_those_of_its_cache(tmp_path, family):
    run = _run(tiny_checkpoint(tmp_path / family, family))
    statistics = collect(run)
    cached: dict[tuple[int, str], list[torch.Tensor]] = {}
    for sample in run.corpus.samples:
        cache = DynamicCache()  # keeps the whole text in sliding layers too
        with torch.inference_mode():
            run.model(torch.from_numpy(sample.tokens.astype(np.int64))[None], past_key_values=cache, use_cache=True)
        for layer in run.layout.layers:
            for kind, values in (("k", cache.layers[layer.index].keys), ("v", cache.layers[layer.index].values)):
                cached.setdefault((layer.index, kind), []).append(values[0, :, SKIPPED_TOKENS:])
    for (index, kind), parts in cached.items():
        expected = torch.cat(parts, dim=1).to(torch.bfloat16).double()  # [heads, tokens, head_dim]
        got = second_moments(statistics.layers[index][kind].second)
        assert got.tokens.tolist() == [expected.shape[1]] * len(expected)
        # rounding may fall to the other side where another batch shape changed a last bit
        np.testing.assert_allclose(got.mean, expected.mean(dim=1), atol=2e-3 * float(expected.abs().max()))
        spread = float(expected.var(dim=1).max())
        np.testing.assert_allclose(got.covariance, [np.cov(head.T, bias=True) for head in expected.numpy()], atol=1e-2 * spread)


def test_they_change_nothing_else_and_survive_saving(llama, tmp_path):
    plain = collect(collect_run(llama, rows_corpus(LONG), tokens_per_batch=256))
    statistics = collect(_run(llama))
    assert {name: bits for name, bits in _bits(statistics).items() if not name.endswith("second")} == _bits(plain)
    assert (plain.has_second_moments, statistics.has_second_moments) == (False, True)
    statistics.save(tmp_path / "s.safetensors")
    loaded = Statistics.load(tmp_path / "s.safetensors")
    assert loaded.digest() == statistics.digest() != plain.digest()
    assert _bits(loaded) == _bits(statistics)


def test_any_order_of_merging_and_any_interruption_give_the_same_bits(llama, tmp_path):
    parts = [collect(_run(llama, LONG, seed=seed)) for seed in (1, 2, 3)]
    one, other = merge(parts), merge([parts[2], merge([parts[1], parts[0]])])
    assert _bits(one) == _bits(other)
    exact = second_moments(one.layers[0]["k"].second)
    assert exact.tokens[0] == 3 * sum(max(0, length - SKIPPED_TOKENS) for length in LONG)

    class Stop(Exception):
        pass

    def stop(batch, observer):
        raise Stop

    state = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        collect(_run(llama), state=state, state_seconds=0.0, after_batch=lambda batch, observer: stop(batch, observer) if state.exists() else None)
    assert _bits(collect(_run(llama), state=state, state_seconds=0.0)) == _bits(collect(_run(llama)))


def test_files_with_and_without_them_do_not_mix(llama):
    with pytest.raises(UsageError, match="--kvarn"):
        merge([collect(_run(llama)), collect(collect_run(llama, rows_corpus(LONG, seed=5)))])


def test_documents_that_are_all_too_short_say_so(llama):
    statistics = collect(_run(llama, [40, 128]))
    with pytest.raises(ValueError, match="no token"):
        second_moments(statistics.layers[0]["k"].second)


def test_packing():
    assert [channels_of(packed_length(size)) for size in (1, 8, 64, 80, 576)] == [1, 8, 64, 80, 576]
    with pytest.raises(ValueError, match="no triangle"):
        channels_of(7)
