"""Known answers of the fidelity figures; the KL bound against the exact divergence over the whole vocabulary."""

import numpy as np
import pytest

from calibrate.engines.session import EngineInfo, TokenScores
from calibrate.errors import UsageError
from calibrate.evaluate.fidelity import delta_difference, fidelity, kl_difference, kl_lower_bound, nll_difference

INFO = EngineInfo(engine="transformers", version="x", attention_backend="sdpa", kv_cache_dtype="fp8_e4m3", compute_dtype="float32", device="cpu")


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def scores_of(logp, targets, k):
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :k].astype(np.int32)
    top = np.take_along_axis(logp, ids, axis=1).astype(np.float32)
    return TokenScores(np.take_along_axis(logp, targets[:, None], axis=1)[:, 0].astype(np.float32), ids, top)


def pair(noise, *, sharp=3.0, k=64, vocab=1000, tokens=100, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, sharp, (tokens, vocab))
    first, second = log_softmax(logits), log_softmax(logits + generator.normal(0, noise, logits.shape))
    targets = generator.integers(0, vocab, tokens)
    exact = (np.exp(first) * (first - second)).sum(axis=1)
    return scores_of(first, targets, k), scores_of(second, targets, k), exact


@pytest.mark.parametrize("noise", [0.001, 0.05, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("k", [1, 5, 20, 64])
@pytest.mark.parametrize("sharp", [0.5, 3.0, 10.0])
def test_the_bound_is_never_above(noise, k, sharp):
    first, second, exact = pair(noise, k=k, sharp=sharp)
    assert (kl_lower_bound(first, second) <= exact + 1e-5).all()


def test_the_bound_is_close_where_the_lists_hold_the_mass():
    first, second, exact = pair(0.3, sharp=6.0)
    assert kl_lower_bound(first, second).mean() == pytest.approx(exact.mean(), rel=0.03)


def test_lists_that_have_nothing_in_common_are_far_apart():
    first = TokenScores(np.array([-1.0]), np.array([[1, 2]], np.int32), np.log([[0.6, 0.3]]).astype(np.float32))
    second = TokenScores(np.array([-1.0]), np.array([[3, 4]], np.int32), np.log([[0.9, 0.01]]).astype(np.float32))
    # A = {1, 2} has 0.9 here and at most 0.02 there
    expected = 0.9 * np.log(0.9 / 0.02) + 0.1 * np.log(0.1 / 0.98)
    assert kl_lower_bound(first, second)[0] == pytest.approx(expected, rel=1e-5)


def test_lists_of_different_lengths():
    first, _, _ = pair(0.3, k=20)
    _, second, exact = pair(0.3, k=64)
    bound = kl_lower_bound(first, second)
    assert (bound <= exact + 1e-5).all()
    assert bound.mean() > 0.1 * exact.mean()


def test_a_variant_equal_to_the_reference():
    first, _, _ = pair(0.1)
    result = fidelity("16-bit", INFO, [first, first], [first, first], [0, 1])
    assert result.perplexity_ratio.model_dump() == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert result.kl_mean.high < 1e-7
    assert result.kl_p99.high < 1e-6
    assert result.top1_agreement.value == 1.0
    assert result.mean_abs_delta_logprob.value == 0.0


def test_figures_by_hand():
    logp = np.log(np.array([[0.5, 0.5], [0.25, 0.75]]))
    other = np.log(np.array([[0.25, 0.75], [0.25, 0.75]]))
    targets = np.array([0, 1])
    result = fidelity("x", INFO, [scores_of(other, targets, 2)], [scores_of(logp, targets, 2)], [7])
    assert result.documents[0].tokens == 2
    assert result.perplexity == pytest.approx((1 / (0.25 * 0.75)) ** 0.5, rel=1e-6)
    assert result.perplexity_ratio.value == pytest.approx(2**0.5, rel=1e-6)
    assert result.mean_abs_delta_logprob.value == pytest.approx(np.log(2) / 2, rel=1e-6)
    assert result.kl_mean.value == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2, rel=1e-4)
    assert result.top1_agreement.value == 0.5


def test_rows_of_a_document_are_one_draw():
    first, second, _ = pair(0.3)
    third, fourth, _ = pair(0.3, seed=1, tokens=100)
    result = fidelity("x", INFO, [second, fourth, second], [first, third, first], [3, 0, 3])
    assert [each.tokens for each in result.documents] == [100, 200]


def test_the_99th_percentile_has_an_interval_over_documents():
    """20 documents of 30 tokens: the value by NumPy, the ends by drawing whole documents with their tokens."""
    parts = [pair(0.1 + 0.05 * number, tokens=30, seed=number)[:2] for number in range(20)]
    reference, scores = ([part[side] for part in parts] for side in (0, 1))
    result = fidelity("x", INFO, scores, reference, range(20), resamples=1000).kl_p99
    kl = [kl_lower_bound(*part) for part in parts]
    assert result.value == np.quantile(np.concatenate(kl), 0.99, method="inverted_cdf")
    generator = np.random.default_rng(1)
    drawn = [np.quantile(np.concatenate([kl[one] for one in generator.integers(0, 20, 20)]), 0.99, method="inverted_cdf") for _ in range(1000)]
    assert [result.low, result.high] == pytest.approx(np.quantile(drawn, [0.0189, 0.9811]).tolist(), rel=0.05)
    assert result.low < result.value < result.high


def test_paired_differences():
    first, second, _ = pair(0.05)
    _, third, _ = pair(0.5)
    pieces = [slice(start, start + 10) for start in range(0, 100, 10)]

    def cut(scores):
        return [TokenScores(scores.logprob[p], scores.top_ids[p], scores.top_logprobs[p]) for p in pieces]

    near = fidelity("near", INFO, cut(second), cut(first), range(10))
    far = fidelity("far", INFO, cut(third), cut(first), range(10))
    assert kl_difference(far, near).low > 0
    assert kl_difference(near, near).model_dump() == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert nll_difference(far, near).value == pytest.approx(-nll_difference(near, far).value)
    assert delta_difference(far, near).low > 0
    gap = far.mean_abs_delta_logprob.value - near.mean_abs_delta_logprob.value
    assert delta_difference(far, near).value == pytest.approx(gap)
    alone = fidelity("alone", INFO, [second], [first], [0])
    with pytest.raises(UsageError, match="far and alone were not scored on the same documents"):
        kl_difference(far, alone)


def test_what_cannot_be_compared():
    first, second, _ = pair(0.1)
    with pytest.raises(UsageError, match="other rows"):
        fidelity("x", INFO, [second], [first, first], [0, 1])
    with pytest.raises(UsageError, match="no rows"):
        fidelity("x", INFO, [], [], [])
    broken = TokenScores(np.full_like(second.logprob, np.nan), second.top_ids, second.top_logprobs)
    with pytest.raises(UsageError, match="variant x gives log probabilities that are not finite, first in row 1"):
        fidelity("x", INFO, [second, broken], [first, first], [0, 1])


def test_a_very_large_loss_stays_a_number():
    first, _, _ = pair(0.1)
    lost = TokenScores(np.full_like(first.logprob, -2000.0), first.top_ids, first.top_logprobs)
    result = fidelity("x", INFO, [lost, lost], [first, first], [0, 1])
    assert np.isfinite([result.perplexity, result.perplexity_ratio.value, result.perplexity_ratio.high]).all()


def test_the_bound_against_the_exact_divergence_of_a_model(tmp_path):
    """A real forward with a coarse FP8 cache: 64 of 256 tokens are listed, the exact figure takes all."""
    import torch

    from calibrate.collect import collect
    from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
    from calibrate.engines.session import Variant
    from calibrate.engines.transformers_engine import TransformersEngine
    from calibrate.model import SourceCheckpoint
    from calibrate.scales import PolicyOptions, solve
    from tests.conftest import collect_run, rows_corpus
    from tests.tiny import tiny_checkpoint

    path = tiny_checkpoint(tmp_path / "m")
    statistics = collect(collect_run(path, rows_corpus([60])))
    engine = TransformersEngine(SourceCheckpoint.open(path), device="cpu", dtype="float32", quantize_queries=False)
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(6.0)  # a trained model is surer than a random one
    row = rows_corpus([200], seed=3).samples[0].tokens.tolist()
    listed, exact = [], []
    for variant in (Variant("16-bit", None), Variant("fp8", solve(statistics, PolicyOptions(number_format="e5m2")))):
        with engine.session(variant) as session:
            listed.append(session.score([row])[0])
        cache = QuantizedCache(engine.model.config, CacheQuantizer(engine.layout, variant, torch.bfloat16, engine.model))
        with torch.inference_mode():
            logits = engine.model(torch.tensor([row[:-1]]), past_key_values=cache).logits[0]
        exact.append(logits.double().log_softmax(-1).numpy())
    true = (np.exp(exact[0]) * (exact[0] - exact[1])).sum(axis=1)
    bound = kl_lower_bound(*listed)
    assert (bound <= true + 1e-6).all()
    assert bound.mean() > 0.9 * true.mean() > 1e-3
