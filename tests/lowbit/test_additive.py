"""Additive codebooks: they commute with RoPE, EM fits them, they are files, and they fit real attention heads."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from calibrate.errors import UsageError
from calibrate.lowbit import Codebooks, LowBitCache, Offline, Placement, Samples, fit_codebooks, make_format, rope_frequencies
from calibrate.lowbit.additive import ENTRIES, GROUP, decode, encode, key_codewords, key_groups, key_ungroup, value_groups, value_ungroup
from calibrate.lowbit.rope import as_complex, as_real, turns
from calibrate.model import probe_layout
from tests.tiny import FAMILIES, VOCAB, tiny_model

FREQUENCIES = 10_000.0 ** -(np.arange(32) / 32)


def structured(tokens: int = 1024, heads: int = 2, dim: int = 64, seed: int = 0) -> Samples:
    """Keys that lie near a few directions before RoPE, as cached after it."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, heads, dim, generator=generator) * 3
    plain = centres[torch.randint(12, (tokens,), generator=generator)] + 0.3 * torch.randn(tokens, heads, dim, generator=generator)
    positions = torch.arange(tokens)
    keys = as_real(as_complex(plain) * turns(FREQUENCIES, 0, tokens, torch.device("cpu"))[:, None])
    values = torch.randn(tokens, heads, dim, generator=generator) * torch.randn(dim, generator=generator).exp()
    return Samples(keys, values, positions, FREQUENCIES)


@pytest.fixture(scope="module")
def books() -> Codebooks:
    return fit_codebooks({0: structured()}, bits=2)


def error(got: torch.Tensor, x: torch.Tensor) -> float:
    return float((got - x).square().sum() / x.square().sum())


def test_turning_is_what_the_models_do():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(1, 2, 7, 64, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(5, 12)[:, None] * torch.from_numpy(FREQUENCIES)
    cos, sin = (torch.cat([part, part], dim=-1).float()[None] for part in (angles.cos(), angles.sin()))
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(as_real(as_complex(x) * turns(FREQUENCIES, 5, 7, x.device)), expected, atol=1e-5)


def test_groups_go_back():
    x = torch.arange(2 * 3 * 96.0).view(2, 3, 96)
    assert torch.equal(key_ungroup(key_groups(x)), x)
    assert torch.equal(value_ungroup(value_groups(x)), x)
    group = key_groups(x)[0, 1, 0]  # the second group of pairs of the first token: channels 16…31 and 64…79
    assert group.tolist() == [*range(16, 32), *range(64, 80)]


def test_codewords_are_sums_of_structured_blocks():
    """Code (a, b): [[x, −y], [y, x]] of entry a times (1, 0), and of entry b times (0, 1), for each pair."""
    tables = torch.randn(ENTRIES, GROUP // 2, 2, generator=torch.Generator().manual_seed(0))
    words = key_codewords(tables)
    for a, b in ((0, 0), (3, 11), (15, 2)):
        for pair in (0, 7):
            (xa, ya), (xb, yb) = tables[a, pair].tolist(), tables[b, pair].tolist()
            first = np.array([[xa, -ya], [ya, xa]]) @ [1, 0]
            second = np.array([[xb, -yb], [yb, xb]]) @ [0, 1]
            np.testing.assert_allclose(words[a * ENTRIES + b][[pair, GROUP // 2 + pair]].numpy(), first + second, atol=1e-6)


def test_codebooks_commute_with_rope(books):
    """Turning the tables by a position's angle and decoding gives what decoding and then turning gives: R·C = C·R. Plain codebooks do not commute."""
    tables = torch.from_numpy(books.layers[0].key)  # [heads, groups, stages, ENTRIES, pairs, 2]
    turn = turns(FREQUENCIES, 777, 1, torch.device("cpu"))[0].view(-1, GROUP // 2)  # [groups, pairs]
    turned = torch.view_as_real(torch.view_as_complex(tables) * turn[:, None, None])
    codes = torch.randint(ENTRIES**2, (2, 2, 50, 8), generator=torch.Generator().manual_seed(1))
    after = as_real(as_complex(decode(codes, key_codewords(tables))) * turn[:, None])
    assert torch.allclose(decode(codes, key_codewords(turned)), after, atol=1e-5)

    def blocks(matrix: np.ndarray) -> float:
        """How far a 2×2 block is from commuting with a rotation."""
        angle = 0.7
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        return float(np.abs(rotation @ matrix - matrix @ rotation).max())

    assert blocks(np.array([[0.3, -1.2], [1.2, 0.3]])) < 1e-12
    assert blocks(np.array([[0.3, -1.2], [0.9, 0.5]])) > 0.1


def test_quantizing_before_rope_is_what_the_cache_does_after_it(books):
    """x̂ of cached keys = RoPE of x̂ of the keys before it, at any place; and a wrong place costs accuracy."""
    plain = as_real(as_complex(structured().keys[:400]) * turns(FREQUENCIES, 0, 400, torch.device("cpu")).conj()[:, None])
    fmt = make_format("additive", Offline(codebooks=books))
    at = 3000
    keys = as_real(as_complex(plain.movedim(0, 1)) * turns(FREQUENCIES, at, 400, torch.device("cpu")))[None]  # [1, heads, tokens, dim]
    table = fmt.books(0, "k", torch.device("cpu"))
    norm = plain.movedim(0, 1).norm(dim=-1, keepdim=True)
    groups = key_groups(plain.movedim(0, 1) / norm)
    before = norm.half().float() * key_ungroup(decode(encode(groups, table), table))
    expected = as_real(as_complex(before) * turns(FREQUENCIES, at, 400, torch.device("cpu")))
    got = fmt.key(keys, 0, at)[0]
    assert error(got, expected) < 1e-5
    assert error(fmt.key(keys, 0, at + 9), keys) > 1.5 * error(got[None], keys)


def test_fitting_helps_and_is_deterministic(books):
    sample = structured(tokens=600, heads=1)
    keys, values = sample.keys.movedim(0, 1)[None], sample.values.movedim(0, 1)[None]
    fitted = {bits: fit_codebooks({0: sample}, bits=bits) for bits in (1, 2)}
    assert fit_codebooks({0: sample}, bits=1).digest() == fitted[1].digest()
    assert fit_codebooks({0: sample}, bits=1, seed=1).digest() != fitted[1].digest()
    one, two = (make_format("additive", Offline(codebooks=fitted[bits])) for bits in (1, 2))
    for kind, x in (("key", keys), ("value", values)):
        assert error(getattr(two, kind)(x, 0, 0), x) < 0.75 * error(getattr(one, kind)(x, 0, 0), x)
    assert error(two.key(keys, 0, 0), keys) < 0.03
    random = torch.randn(1, 1, 512, 64, generator=torch.Generator().manual_seed(9))
    assert error(two.key(random, 0, 0), random) > 0.1  # what it was not fitted to


def test_bytes(books):
    fmt = make_format("additive", Offline(codebooks=books))
    assert fmt.key_bytes(64) == 64 * 2 / 8 + 2  # eight one-byte codes for each 32 channels, and the norm
    codes = encode(key_groups(torch.randn(5, 64)), fmt.books(0, "k", torch.device("cpu"))[0])
    assert codes.numpy().astype(np.uint8).tobytes().__len__() / 5 + 2 == fmt.key_bytes(64)
    assert codes.max() < 256


def test_files_round_trip_and_refuse_damage(books, tmp_path):
    path = tmp_path / "books.safetensors"
    books.save(path)
    loaded = Codebooks.load(path)
    assert loaded.digest() == books.digest()
    assert loaded.origin == books.origin
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(UsageError, match="not a readable safetensors"):
        Codebooks.load(path)
    path.write_bytes(data.replace(b"layers.0.value", b"layers.0.volue"))
    with pytest.raises(UsageError, match="damaged"):
        Codebooks.load(path)


def test_what_cannot_be_fitted_is_refused(books):
    with pytest.raises(UsageError, match="give more text"):
        fit_codebooks({0: structured(tokens=100)}, bits=2)
    with pytest.raises(UsageError, match="no multiple of 32"):
        fit_codebooks({0: Samples(torch.randn(300, 1, 80), torch.randn(300, 1, 80), torch.arange(300), np.ones(40))}, bits=2)
    with pytest.raises(UsageError, match="needs codebooks"):
        make_format("additive")
    model = tiny_model("llama")  # three layers of 2 heads of 32
    with pytest.raises(UsageError, match="of another model"):
        Placement(probe_layout(model), make_format("additive", Offline(codebooks=books)), torch.bfloat16, model.config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_frequencies_are_the_models_own(family):
    model = tiny_model(family)
    found = rope_frequencies(model, probe_layout(model))
    assert {len(each) for each in found.values()} == {16}
    assert found[0][0] == 1.0


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neox", "cohere2"])
def test_models_without_half_turns_are_refused(family):
    """Learned positions, neighbours turned, a quarter of the channels turned."""
    model = tiny_model(family) if family in FAMILIES else AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES["llama"]))
    with pytest.raises(UsageError, match="commute with RoPE"):
        rope_frequencies(model, probe_layout(model))


def test_moving_frequencies_are_refused():
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    with pytest.raises(UsageError, match="change with the length"):
        rope_frequencies(model, probe_layout(model))


def test_it_runs_in_a_model():
    """Fitted to what a model caches, unrotated with its own frequencies; the keys before RoPE are those that its projection makes."""
    model = tiny_model("llama")
    layout = probe_layout(model)
    frequencies = rope_frequencies(model, layout)
    tokens = torch.randint(3, VOCAB, (1, 400), generator=torch.Generator().manual_seed(0))
    projected = {}
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, out: projected.update(key=out))
    with torch.inference_mode():
        plain = model(tokens, use_cache=True)
    hook.remove()
    held = enumerate(plain.past_key_values.layers)
    cached = {index: (layer.keys[0].movedim(0, 1).clone(), layer.values[0].movedim(0, 1).clone()) for index, layer in held}
    back = as_real(as_complex(cached[0][0]) * turns(frequencies[0], 0, 400, torch.device("cpu")).conj()[:, None])
    assert torch.allclose(back.flatten(1), projected["key"][0], atol=1e-4)
    samples = {index: Samples(key, value, torch.arange(400), frequencies[index]) for index, (key, value) in cached.items()}
    fmt = make_format("additive", Offline(codebooks=fit_codebooks(samples, bits=2)))
    cache = LowBitCache(model.config, Placement(layout, fmt, torch.bfloat16, model.config))
    with torch.inference_mode():
        for start in range(0, 400, 100):
            logits = model(tokens[:, start : start + 100], past_key_values=cache, use_cache=True).logits
    assert torch.isfinite(logits).all()
    assert error(cache.layers[1].values, cached[1][1].movedim(0, 1)[None]) < 0.2
    with torch.inference_mode():
        assert error(cache.layers[0].keys, cached[0][0].movedim(0, 1)[None]) < 0.2
