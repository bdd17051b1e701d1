"""The cache: what is quantized when, what a block attends to, going back, and every family of models."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from calibrate.engines import session as sessions
from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.errors import UsageError
from calibrate.lowbit import FORMATS, LowBitCache, Offline, Placement, make_format
from calibrate.lowbit.base import LowBitFormat, Window
from calibrate.model import SourceCheckpoint, probe_layout
from calibrate.scales import FORMATS as SCALE_FORMATS
from calibrate.scales import LayerScales, PolicyOptions, Scales
from tests.tiny import FAMILIES, VOCAB, tiny_checkpoint, tiny_model

READY = [name for name in FORMATS if "+" not in name and name != "additive"]
GROUPED = ["kivi_2bit", "gear_2bit", "kvarn_k2v2_g128", "kvarn_k4v2_g64"]
"""Formats whose tokens wait in 16 bits."""


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=6, head_dim=64)


def new_cache(model, fmt) -> LowBitCache:
    fmt = make_format(fmt) if isinstance(fmt, str) else fmt
    config = model.config.get_text_config(decoder=True)
    return LowBitCache(config, Placement(probe_layout(model), fmt, torch.bfloat16, config))


def states(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, exact in bf16: [1, 2, tokens, 64]."""
    return tuple(torch.randn(2, 1, 2, tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().float())


def fill(cache: LowBitCache, block: int, key: torch.Tensor, value: torch.Tensor, layer: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [cache.update(key[:, :, start : start + block], value[:, :, start : start + block], layer) for start in range(0, key.shape[2], block)]


@dataclass(frozen=True, kw_only=True)
class Adding(LowBitFormat):
    """Adds a number to a token each time it is quantized."""

    name: str = "adding"
    source: str = "test"
    number: float

    def key(self, tile, layer, start):
        return tile + self.number

    value = key

    def key_bytes(self, dim):
        return dim

    value_bytes = key_bytes


@pytest.mark.parametrize(
    ("window", "counts"),
    [
        (Window(), {0: 0, 1: 1, 7: 7}),
        (Window(group=128), {127: 0, 128: 128, 255: 128, 256: 256}),  # KIVI's keys
        (Window(residual=128), {128: 0, 129: 1, 300: 172}),  # its values
        (Window(group=64, sink=128), {128: 0, 191: 0, 192: 64, 1000: 832}),
        (Window(group=32, residual=128, sink=4), {163: 0, 164: 32}),
    ],
)
def test_windows(window, counts):
    assert {tokens: window.quantized(tokens) for tokens in counts} == counts


@pytest.mark.parametrize("name", READY)
def test_contents_do_not_depend_on_the_blocks(model, name):
    """The same tokens in blocks of 1, 64 and 512: the same bits in the cache."""
    key, value = states(530)
    filled = {}
    for block in (1, 64, 512):
        filled[block] = new_cache(model, name)
        fill(filled[block], block, key, value)
    for block in (1, 64):
        assert torch.equal(filled[block].layers[2].keys, filled[512].layers[2].keys)
        assert torch.equal(filled[block].layers[2].values, filled[512].layers[2].values)
    assert not torch.equal(filled[512].layers[2].keys, key)


@pytest.mark.parametrize("name", GROUPED)
def test_sink_history_and_tail(model, name):
    """The sink and the newest tokens are exact, the rest is what the format makes of whole groups counted from the sink."""
    fmt, (key, value) = make_format(name), states(530)
    cache = new_cache(model, name)
    fill(cache, 100, key, value)
    layer = cache.layers[2]
    for kind, exact, held, window, read in (
        ("keys", key, layer.keys, fmt.key_window, fmt.key),
        ("values", value, layer.values, fmt.value_window, fmt.value),
    ):
        start, end = window.sink, window.sink + window.quantized(530)
        assert cache.quantized_tokens()[2, kind] == end - start > 0
        assert torch.equal(held[:, :, :start], exact[:, :, :start])
        assert torch.equal(held[:, :, end:], exact[:, :, end:])
        for group in range(start, end, window.group):
            assert torch.equal(held[:, :, group : group + window.group], read(exact[:, :, group : group + window.group], 2, group))


def test_kivi_keeps_its_residual(model):
    """As in its code: with n tokens the newest n mod 128 keys and the newest 128 values are exact, at every step."""
    key, value = states(300)
    cache = new_cache(model, "kivi_2bit")
    for number in range(300):
        cache.update(key[:, :, number : number + 1], value[:, :, number : number + 1], 2)
        held, tokens = cache.layers[2], number + 1
        exact_keys, exact_values = tokens % 128, min(tokens, 128)
        assert torch.equal(held.keys[:, :, tokens - exact_keys :], key[:, :, tokens - exact_keys : tokens])
        assert torch.equal(held.values[:, :, tokens - exact_values :], value[:, :, tokens - exact_values : tokens])
        if tokens > 128:
            assert (held.values[:, :, : tokens - 128] != value[:, :, : tokens - 128]).any(dim=-1).all()
            assert (held.keys[:, :, : tokens - exact_keys] != key[:, :, : tokens - exact_keys]).any(dim=-1).all()


def test_nothing_is_quantized_twice(model):
    fmt = Adding(number=1.0, key_window=Window(group=4, sink=2), value_window=Window(residual=3), skip_sliding=True)
    zeros = torch.zeros(1, 2, 50, 32)
    cache = new_cache(model, fmt)
    fill(cache, 7, zeros, zeros)
    assert cache.layers[2].keys[0, 0, :, 0].tolist() == [0.0] * 2 + [1.0] * 48
    assert cache.layers[2].values[0, 0, :, 0].tolist() == [1.0] * 47 + [0.0] * 3


@pytest.mark.parametrize("name", GROUPED)
def test_a_block_attends_to_itself_in_sixteen_bits(model, name):
    key, value = states(1024)
    reads = fill(cache := new_cache(model, name), 512, key, value)
    assert torch.equal(reads[0][0], key[:, :, :512])  # as the method's prefill
    assert torch.equal(reads[1][0][:, :, 512:], key[:, :, 512:])
    assert not torch.equal(reads[1][0][:, :, :512], key[:, :, :512])  # but to earlier blocks as they are stored
    assert not torch.equal(cache.layers[2].keys[:, :, 512:], key[:, :, 512:])


def test_eight_bit_blocks_attend_to_what_is_stored(model):
    key, value = states(64)
    read = fill(new_cache(model, "fp8_e5m2"), 64, key, value)[0]
    assert torch.equal(read[0], make_format("fp8_e5m2").key(key, 2, 0))


def test_turboquant_attends_as_vllm_does(model):
    """First block exact, later ones of more than 128 tokens exact, smaller ones as stored."""
    key, value = states(20 + 128 + 129)
    cache, fmt = new_cache(model, "turboquant_3bit_nc"), make_format("turboquant_3bit_nc")
    start = 0
    for tokens, exact in ((20, True), (128, False), (129, True)):
        own = key[:, :, start : start + tokens]
        read = cache.update(own, value[:, :, start : start + tokens], 2)[0][:, :, start:]
        assert torch.equal(read, own if exact else fmt.key(own, 2, start))
        start += tokens


def test_turboquant_leaves_the_ends(model):
    key, value = states(8)
    cache = new_cache(model, "turboquant_3bit_nc")
    for layer in range(6):
        cache.update(key, value, layer)
    assert [torch.equal(layer.keys, key) for layer in cache.layers] == [True, True, False, False, True, True]


@pytest.mark.parametrize("name", ["fp8_e4m3", "kivi_2bit", "kvarn_k2v2_g128", "kvarn_k4v2_g64"])
def test_going_back_is_exact_or_refused(name):
    """Wherever `can_return_to` says yes, the cropped cache is the one that had just that many tokens, and goes on like it."""
    key, value = states(700)
    model, allowed = tiny_model("llama", num_hidden_layers=1), []
    for length in (64, 128, 200, 256, 320, 384, 512, 640):
        cache = new_cache(model, name)
        fill(cache, 100, key[:, :, :650], value[:, :, :650], layer=0)
        if not cache.can_return_to(length):
            with pytest.raises(ValueError, match="cannot go back"):
                cache.crop(length - 650)
            continue
        allowed.append(length)
        cache.crop(length - 650)
        fresh = new_cache(model, name)
        fill(fresh, 64, key[:, :, :length], value[:, :, :length], layer=0)
        for each in (cache, fresh):
            fill(each, 60, key[:, :, length : length + 60], value[:, :, length : length + 60], layer=0)
        assert torch.equal(cache.layers[0].keys, fresh.layers[0].keys)
        assert torch.equal(cache.layers[0].values, fresh.layers[0].values)
        assert cache.quantized_tokens() == fresh.quantized_tokens()
    expected = {
        "fp8_e4m3": [64, 128, 200, 256, 320, 384, 512, 640],
        "kivi_2bit": [],  # the 128 values before any place that far back are quantized by now
        "kvarn_k2v2_g128": [64, 128, 256, 384, 512, 640],
        "kvarn_k4v2_g64": [64, 128, 256, 320, 384, 512, 640],
    }
    assert allowed == expected[name]


def test_sliding_windows(tmp_path):
    """Formats with groups leave sliding layers in 16 bits; the others quantize each token there as it comes."""
    model = tiny_model("gemma3_text")
    key, value = states(20)
    cache = new_cache(model, "kvarn_k2v2_g128")
    cache.update(key, value, 0)
    assert torch.equal(cache.layers[0].keys, key[:, :, -15:])
    cache, fmt = new_cache(model, "int8_per_token_head"), make_format("int8_per_token_head")
    fill(cache, 6, key, value, layer=0)
    assert torch.equal(cache.layers[0].keys, fmt.key(key, 0, 0)[:, :, -15:])
    with pytest.raises(ValueError, match="need skip_sliding"):
        type(make_format("kivi_2bit"))(name="x", source="y", bits=2, key_window=Window(group=128))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_runs(family):
    """In blocks, against the 16-bit cache: the same bits with a format that loses nothing, others with formats that do."""
    model = tiny_model(family)
    layout, config = probe_layout(model), model.config.get_text_config(decoder=True)
    if any(layer.latent for layer in layout.layers):
        with pytest.raises(UsageError, match="latents"):
            new_cache(model, "int8_per_token_head")
        return
    tokens = torch.randint(3, VOCAB, (1, 240), generator=torch.Generator().manual_seed(0))
    exact = Window(group=16, sink=4)
    lossless = Adding(number=0.0, key_window=exact, value_window=exact, skip_sliding=True, own_exact_above=0)
    plain = CacheQuantizer(layout, sessions.Variant("16-bit", None), torch.bfloat16, model)
    caches = {"16-bit": QuantizedCache(config, plain)} | {
        name: new_cache(model, fmt) for name, fmt in (("lossless", lossless), ("int8", "int8_per_token_head"), ("kvarn", "kvarn_k4v4_g64"))
    }
    logits = {}
    with torch.inference_mode():
        for name, cache in caches.items():
            for start in range(0, 240, 48):
                logits[name] = model(tokens[:, start : start + 48], past_key_values=cache, use_cache=True).logits
            assert cache.get_seq_length() == 240
    assert torch.equal(logits["lossless"], logits["16-bit"])
    for name in ("int8", "kvarn"):
        assert torch.isfinite(logits[name]).all()
        spared = name == "kvarn" and all(layer.sliding_window for layer in layout.layers)
        assert torch.equal(logits[name], logits["16-bit"]) == spared


def variant(name: str) -> sessions.Variant:
    return sessions.Variant(name, None, make_format(name))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("lowbit") / "llama", num_hidden_layers=6)
    return TransformersEngine(SourceCheckpoint.open(folder), device="cpu", dtype="float32", block=64)


def test_sessions_say_what_they_hold_and_differ(engine):
    row = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    scores = {}
    for name in ("fp8_e4m3", "kvarn_k4v4_g64", "kvarn_k2v2_g64", "kivi_2bit"):
        with engine.session(variant(name)) as session:
            info = session.info()
            assert (info.kv_cache_dtype, "fp8 queries" in info.attention_backend) == (name, False)
            scores[name] = session.score([row])[0].logprob
    with engine.session(sessions.Variant("16-bit", None)) as session:
        assert session.info().kv_cache_dtype == "bfloat16"
        exact = session.score([row])[0].logprob
    apart = {name: float(abs(logprob - exact)[200:].mean()) for name, logprob in scores.items()}
    assert 0 < apart["fp8_e4m3"] < apart["kvarn_k2v2_g64"]
    assert apart["kvarn_k4v4_g64"] < apart["kvarn_k2v2_g64"]
    assert (scores["kvarn_k2v2_g64"][:128] == exact[:128]).all()  # the sink, and two blocks that attend to themselves exactly
    assert (scores["kvarn_k2v2_g64"][200:] != exact[200:]).any()


@pytest.mark.parametrize("name", ["kvarn_k2v2_g64", "kivi_2bit", "int4_per_token_head"])
def test_prefix_reuse_changes_nothing(engine, name):
    """A second prompt that shares 256 tokens gets the answer that it would get alone."""
    generator = torch.Generator().manual_seed(2)
    shared, ends = torch.randint(3, VOCAB, (256,), generator=generator).tolist(), torch.randint(3, VOCAB, (2, 70), generator=generator).tolist()
    prompts = [shared + end for end in ends]
    with engine.session(variant(name)) as session:
        together = session.generate(prompts, 12, [])
    alone = []
    for prompt in prompts:
        with engine.session(variant(name)) as session:
            alone += session.generate([prompt], 12, [])
    assert together == alone


def test_vllm_refuses_a_format_before_it_starts(engine, tmp_path):
    def overlay(variant, folder):
        raise AssertionError("nothing is written")

    other = VllmEngine(engine.source, folder=tmp_path, overlay=overlay)
    with pytest.raises(UsageError, match="kivi_2bit runs in the transformers engine alone"), other.session(variant("kivi_2bit")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_fp8_by_scales_or_low_bit(engine):
    layers = tuple(LayerScales(layer.index, layer.module, *(np.ones((3, 1), dtype=np.float32))) for layer in engine.layout.layers)
    scales = Scales(layers, PolicyOptions(), engine.layout.as_dict(), "none", {"tokens": 0, "documents": 0, "samples": 0}, ())
    with pytest.raises(ValueError, match="one or the other"):
        sessions.Variant("both", scales, make_format("kivi_2bit"))
    key, value = states(10)
    for layer in scales.layers:
        layer.k[:] = 0.25
    fmt = make_format("fp8_e4m3", Offline(scales=scales))
    assert fmt.digest == scales.digest()
    assert torch.equal(fmt.key(key, 1, 0), SCALE_FORMATS["e4m3"].round_trip(key / 0.25) * 0.25)
    assert torch.equal(fmt.value(value, 1, 0), SCALE_FORMATS["e4m3"].round_trip(value))
    with pytest.raises(UsageError, match="solved for e4m3"):
        make_format("fp8_e5m2", Offline(scales=scales))
    foreign = Scales(scales.layers[:2], *(getattr(scales, name) for name in ("options", "layout", "statistics_digest", "counted", "provenance")))
    with (
        pytest.raises(UsageError, match="of another model"),
        engine.session(sessions.Variant("foreign", None, make_format("fp8_e4m3", Offline(scales=foreign)))),
    ):
        pass


def test_variants_are_told_apart():
    digests = [variant("kivi_2bit").digest(), variant("kivi_4bit").digest(), sessions.Variant("16-bit", None).digest()]
    assert len(set(digests)) == 3
    assert digests[2] is None
