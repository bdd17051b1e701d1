"""The emulated FP8 cache: exact values, blocks, every family, and what sessions refuse."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import LayerScales, PolicyOptions, Scales
from tests.tiny import FAMILIES, VOCAB, tiny_checkpoint

SIXTEEN = Variant("16-bit", None)


def scales_for(engine: TransformersEngine, k=0.05, v=0.03, q=0.02, *, granularity="tensor", number_format="e4m3") -> Scales:
    layers = []
    for layer in engine.layout.layers:
        heads = {"k": layer.num_key_value_heads, "v": layer.num_key_value_heads, "q": layer.num_heads}
        sizes = {kind: 1 if granularity == "tensor" else number for kind, number in heads.items()}
        given = {kind: np.full(sizes[kind], scale, dtype=np.float32) for kind, scale in (("k", k), ("v", v), ("q", q))}
        layers.append(LayerScales(layer.index, layer.module, given["k"], given["v"], given["q"]))
    options = PolicyOptions(granularity=granularity, number_format=number_format)
    return Scales(tuple(layers), options, engine.layout.as_dict(), "none", {"tokens": 0, "documents": 0, "samples": 0}, ())


def rows(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture(scope="module")
def engine(checkpoint):
    return TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32", block=16)


def test_values_are_those_of_the_engine_cast(engine):
    """Against a scalar reference written out: round to bf16, divide, clamp, cast, multiply."""
    quantizer = CacheQuantizer(engine.layout, Variant("x", scales_for(engine, k=0.05)), torch.bfloat16, engine.model)
    x = torch.tensor([0.0, 1e-6, 0.3, -1.7, 22.39, 22.5, 1e4, -1e4]).view(1, 1, 1, 8).expand(1, 2, 1, 8)
    got = quantizer(0, "k", x)[0, 0, 0].tolist()
    scale = np.float32(0.05)
    for value, result in zip(x[0, 0, 0].tolist(), got, strict=True):
        rounded = np.float32(torch.tensor(value).bfloat16().float().item())
        level = torch.tensor(float(np.clip(rounded / scale, -448, 448))).to(torch.float8_e4m3fn).float().item()
        assert result == float(np.float32(level) * scale)
    assert got[-1] == -float(np.float32(448) * scale)


def test_one_scale_a_head(engine):
    scales = scales_for(engine, granularity="head")
    scales.layers[0].k[:] = [0.5, 0.001]
    quantizer = CacheQuantizer(engine.layout, Variant("x", scales), torch.bfloat16, engine.model)
    got = quantizer(0, "k", torch.full((1, 2, 1, 4), 3.0))
    assert got[0, 0].unique().item() == 3.0
    assert got[0, 1].unique().item() == pytest.approx(0.448)  # saturated


def test_query_scale_is_the_largest_of_its_group(engine):
    scales = scales_for(engine, granularity="head")
    scales.layers[0].q[:] = [0.001, 0.5, 0.001, 0.001]
    quantizer = CacheQuantizer(engine.layout, Variant("x", scales), torch.bfloat16, engine.model)
    got = quantizer(0, "q", torch.full((1, 4, 1, 4), 3.0))[0, :, 0, 0]
    assert got.tolist() == pytest.approx([3.0, 3.0, 0.448, 0.448])


def test_the_cache_stores_and_returns_quantized_values(engine):
    quantizer = CacheQuantizer(engine.layout, Variant("x", scales_for(engine)), torch.bfloat16, engine.model)
    cache = QuantizedCache(engine.model.config, quantizer)
    key, value = torch.randn(2, 1, 2, 5, 32)
    for block in (slice(0, 3), slice(3, 5)):
        k, v = cache.update(key[:, :, block], value[:, :, block], 0)
    assert torch.equal(k, quantizer(0, "k", key))
    assert torch.equal(cache.layers[0].keys, k)
    assert torch.equal(cache.layers[0].values, v)
    assert torch.equal(quantizer(0, "k", k), k)  # what is on the grid stays


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_and_decoding_give_what_one_forward_gives(family, tmp_path):
    """Sliding windows, KV sharing, latents, hybrids: 16-bit by blocks against the plain model; FP8 by blocks against FP8 in one block."""
    path = tiny_checkpoint(tmp_path / "m", family, dtype=torch.float32)
    whole = TransformersEngine(SourceCheckpoint.open(path), device="cpu", dtype="float32")
    (row,) = rows([50])
    with torch.inference_mode():
        plain = whole.model(input_ids=torch.tensor([row]), past_key_values=DynamicCache(config=whole.model.config.get_text_config()))
        expected = plain.logits[0, :-1].float().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    variant = Variant("fp8", scales_for(whole, k=0.25, v=0.25, q=0.25))
    found = {}
    for block in (512, 7):
        whole.block = block
        for each in (SIXTEEN, variant):
            with whole.session(each) as session:
                found[each.name, block] = session.score([row])[0]
    # K and V were rounded to bf16; in a mixture of experts that may send a token to another expert
    assert np.median(np.abs(found["16-bit", 512].logprob - expected.numpy())) < 0.03
    for name in ("16-bit", "fp8"):
        # a K a hair beside a rounding boundary may fall to either side when a matmul of another shape rounds differently, as CPUs do each in its way
        assert np.median(np.abs(found[name, 512].logprob - found[name, 7].logprob)) < 1e-3
    assert np.abs(found["fp8", 512].logprob - found["16-bit", 512].logprob).max() > 1e-4


def test_scores_are_log_probabilities(engine):
    with engine.session(SIXTEEN) as session:
        first, second = session.score(rows([40, 9]))
    assert first.logprob.shape == (39,)
    assert second.top_ids.shape == (8, 64)
    assert first.logprob.dtype == first.top_logprobs.dtype == np.float32
    assert first.top_ids.dtype == np.int32
    assert (np.diff(first.top_logprobs, axis=1) <= 0).all()
    assert (np.exp(first.top_logprobs.astype(np.float64)).sum(axis=1) < 1 + 1e-6).all()
    row = rows([40, 9])[0]
    for place in range(39):
        (hit,) = np.nonzero(first.top_ids[place] == row[place + 1])
        assert not len(hit) or first.top_logprobs[place, hit[0]] == pytest.approx(first.logprob[place], abs=1e-6)


def test_generation_is_greedy_and_stops(engine):
    (prompt,) = rows([20])
    with engine.session(SIXTEEN) as session:
        (free,) = session.generate([prompt], 8, ())
        assert len(free) == 8
        (stopped,) = session.generate([prompt], 8, (free[3],))
        assert stopped == free[: free.index(free[3])]
        scores = session.score([prompt + free])[0]
        assert scores.top_ids[len(prompt) - 1 :, 0].tolist() == free
        assert session.generate([prompt], 0, ()) == [[]]


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3", "qwen3_next"])
def test_a_shared_prefix_changes_nothing(family, tmp_path):
    engine = TransformersEngine(SourceCheckpoint.open(tiny_checkpoint(tmp_path / "m", family)), device="cpu", dtype="float32", block=8)
    (prefix,) = rows([37])
    prompts = [prefix + tail for tail in rows([5, 9, 1], seed=1)] + [prefix[:24], prefix[:8] + rows([20], seed=2)[0]]
    variant = Variant("fp8", scales_for(engine))
    with engine.session(variant) as session:
        together = session.generate(prompts, 6, ())
    alone = []
    for prompt in prompts:
        with engine.session(variant) as session:
            alone += session.generate([prompt], 6, ())
    assert together == alone


def test_queries_are_quantized_only_when_asked(checkpoint, engine):
    variant = Variant("fp8", scales_for(engine, q=1e6))  # Q becomes zero: every token attends to all alike
    bare = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32", quantize_queries=False)
    with engine.session(variant) as session, torch.inference_mode():
        with_q = session.score(rows([30]))[0].logprob
        assert session.info().attention_backend == "sdpa, fp8 queries"
    with bare.session(variant) as session:
        without = session.score(rows([30]))[0].logprob
        assert session.info().attention_backend == "sdpa"
    with engine.session(SIXTEEN) as session:
        reference = session.score(rows([30]))[0].logprob
    assert np.abs(with_q - without).max() > 0.01
    assert np.abs(without - reference).max() < 0.3


def test_info_names_format_and_types(engine):
    with engine.session(Variant("x", scales_for(engine, number_format="e5m2"))) as session:
        info = session.info()
    assert (info.engine, info.kv_cache_dtype, info.compute_dtype, info.device) == ("transformers", "fp8_e5m2", "float32", "cpu")
    with engine.session(SIXTEEN) as session:
        assert session.info().kv_cache_dtype == "bfloat16"


def test_scales_of_another_model_are_refused(engine):
    scales = scales_for(engine)
    short = Scales(scales.layers[:2], scales.options, scales.layout, "none", scales.counted, ())
    with pytest.raises(UsageError, match="variant x has no scales for layer 2"), engine.session(Variant("x", short)):
        pass
    scales.layers[1].k.resize(3, refcheck=False)
    with pytest.raises(UsageError, match="k of layer 1 has 3 scales, the model 2 heads"), engine.session(Variant("x", scales)):
        pass


@pytest.mark.parametrize(
    ("row", "message"),
    [([5], "at least 2"), ([5] * 513, "more than the model's context of 512"), ([5, VOCAB], "outside the model's vocabulary"), ([], "at least")],
)
def test_rows_that_cannot_be_scored(engine, row, message):
    with engine.session(SIXTEEN) as session, pytest.raises(UsageError, match=message):
        session.score([row])


def test_prompts_that_leave_no_room(engine):
    with engine.session(SIXTEEN) as session, pytest.raises(UsageError, match="500 tokens and 20 new ones"):
        session.generate([[5] * 500], 20, ())


def test_a_block_has_tokens(checkpoint):
    with pytest.raises(UsageError, match="block of 0"):
        TransformersEngine(SourceCheckpoint.open(checkpoint), block=0)
