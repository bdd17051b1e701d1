"""`smooth`: powers of two that change no bit of the 16-bit model, found where the theory puts them, and gaining what they say they gain."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.collect.watch import observe
from calibrate.errors import UsageError
from calibrate.fold import Fold, LayerFold, fold_checkpoint, folded, parse_switches
from calibrate.fold import carrier as carrier_module
from calibrate.fold import job as job_module
from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample
from calibrate.fold.smooth import smooth
from calibrate.lowbit import make_format
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from tests.conftest import rows_corpus
from tests.fold.test_function import TOKENS, with_random_biases
from tests.fold.test_job import CORPUS, invoke
from tests.fold.test_tables import normal, parts, sample
from tests.tiny import tiny_checkpoint

# how near the noise of real codes comes to the prediction: INT4's follows the range of a token's channels, not their norm, and gains less
ROTATING = {"int4_per_token_head": 0.6, "turboquant_4bit_nc": 0.1, "turboquant_3bit_nc": 0.1}
HEAD_DIM = 32
KEYS = {"phi3": slice(4 * HEAD_DIM, 6 * HEAD_DIM)}  # rows of K in the fused projection: after 4 query heads


def uneven(path, family: str, dtype: torch.dtype = torch.bfloat16):
    """A tiny checkpoint whose K has channels of very different size, and biases and norms that are not trivial."""
    with_random_biases(tiny_checkpoint(path, family, dtype=dtype))
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if any(part in name for part in ("k_proj.", "qkv_proj.", "k_norm.")):
            rows = tensor[KEYS.get(family, slice(None))]
            factors = 2.0 ** (6 * torch.rand(HEAD_DIM, generator=generator) - 3)
            factors = factors.repeat(len(rows) // HEAD_DIM) * (20 if name.endswith("k_proj.bias") else 1)
            rows.copy_(rows * (factors[:, None] if rows.dim() == 2 else factors))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def fold_to(path, output):
    return fold_checkpoint(SourceCheckpoint.open(path), rows_corpus([48] * 30), output, ("smooth",), device="cpu")


def sixteen_bit_logits(path) -> torch.Tensor:
    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.bfloat16)
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "glm4", "stablelm", "qwen3", "cohere"])
def test_no_bit_of_the_16_bit_model_changes(family, tmp_path):
    """Biases, one fused projection, partial rotary embeddings, neighbouring pairs, norms of each head."""
    path = uneven(tmp_path / "base", family)
    made = fold_to(path, tmp_path / "folded")
    assert made.fold.report["moved"]["pairs"] > 0
    assert (made.fold.report["moved"]["rest"] > 0) == (family in ("glm4", "stablelm"))
    assert made.fold.report["logits_change"] == 0
    assert made.fold.report["rounding"] == {"weights": 0, "tokens": 47, "mean_abs_dlogp": 0, "delta_nll": 0}
    assert made.summary().endswith("of what it was; no weight is rounded and no logit changes")
    for layer in made.fold.layers:
        assert np.array_equal(np.frexp(layer.pairs.real)[0], np.full(layer.pairs.shape, 0.5))
        assert not layer.pairs.imag.any()
    assert torch.equal(sixteen_bit_logits(path), sixteen_bit_logits(tmp_path / "folded"))
    old, new = (load_file(where / "model.safetensors") for where in (path, tmp_path / "folded"))
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_norms_that_add_one_are_rounded_and_that_is_told(tmp_path):
    path = uneven(tmp_path / "base", "gemma3_text")
    made = fold_to(path, tmp_path / "folded")
    report = made.fold.report
    assert report["moved"]["pairs"] > 0
    assert report["rounding"]["weights"] > 0
    assert 0 < report["rounding"]["mean_abs_dlogp"] < 0.1
    assert "rounding the weights again moves log p by" in made.summary()
    assert report["predicted"]["logits"]["mean"] < 0.95
    assert len(made.fold.layers[0].pairs) == 1


def test_small_weights_in_fp16_are_rounded_and_that_is_told(tmp_path):
    path = uneven(tmp_path / "base", "llama", torch.float16)
    made = fold_to(path, tmp_path / "folded")
    assert made.fold.report["logits_change"] == 0
    assert made.fold.report["rounding"]["weights"] > 0
    assert made.fold.report["rounding"]["mean_abs_dlogp"] < 1e-4
    assert "rounding the weights again moves log p by 0.0000" in made.summary()


def test_what_rounds_weights_does_not_say_that_it_does_not(tmp_path, monkeypatch):
    def rough(*arguments):
        layer, predicted = smooth(*arguments)
        return LayerFold(layer.index, layer.module, layer.pairs * 1.0001, layer.rest), predicted

    path = tiny_checkpoint(tmp_path / "base")
    monkeypatch.setattr(job_module, "smooth", rough)
    made = fold_to(path, tmp_path / "folded")
    assert made.fold.report["rounding"]["weights"] > 0
    assert "no weight is rounded" not in made.summary()


def test_the_factor_of_a_planted_pair_is_known():
    k, q = normal(2, 2000, 32), normal(2, 2000, 32, seed=1)
    k[0, :, [3, 19]] *= 16
    q[0, :, [3, 19]] /= 16
    fold, predicted = smooth(sample(k, q), parts(dim=32))
    expected = np.ones((2, 16))
    expected[0, 3] = 1 / 16
    np.testing.assert_array_equal(fold.pairs, expected)
    planted, even = (30 + 2 * 256) * (30 + 2 / 256), 32**2  # heads 0 and 1, which has nothing to gain
    assert predicted.before["k"] == pytest.approx(planted + even, rel=0.05)
    assert predicted.after["k"] == pytest.approx(2 * even, rel=0.05)


def test_channels_outside_rope_have_factors_of_their_own():
    k, q = normal(1, 2000, 16), normal(1, 2000, 16, seed=1)
    k[..., 9] *= 64
    fold, _ = smooth(sample(k, q), parts(dim=16, rest=8))
    assert fold.pairs.shape == (*fold.rest.shape[:1], 4)
    assert fold.rest[0, 1] / fold.rest[0, 0] == 1 / 8
    assert fold.moved == {"pairs": 0, "rest": 1}


def test_heads_of_one_norm_share_factors_and_the_largest_does_not_decide():
    k, q = normal(2, 2000, 16), normal(2, 2000, 16, seed=1)
    k[0] *= 100  # an even head that is large
    k[1, :, [2, 10]] *= 16
    plain = parts(dim=16)
    fold, _ = smooth(sample(k, q), Parts(plain.layer, False, "plain", plain.first, plain.second, plain.rest))
    assert fold.pairs.shape == (1, 8)
    assert fold.pairs[0, 2].real < fold.pairs[0, 0].real


def test_what_gains_nothing_stays():
    """Even channels, dead heads, and sizes that are the opposite in the other half: what was chosen on one half loses on the other."""
    even = sample(normal(1, 2000, 16), normal(1, 2000, 16, seed=1))
    dead = sample(torch.zeros(1, 2000, 16), torch.zeros(1, 2000, 16))
    k = normal(1, 2000, 16)
    k[:, :1000, [0, 8]] *= 16
    k[:, 1000:, [1, 9]] *= 16
    for one in (even, dead, sample(k, normal(1, 2000, 16, seed=1))):
        fold, predicted = smooth(one, parts(dim=16))
        assert fold.moved == {"pairs": 0, "rest": 0}
        assert predicted.after == predicted.before


def test_a_dead_channel_is_not_blown_up():
    k = normal(1, 2000, 16)
    k[..., [0, 8]] = 0
    fold, _ = smooth(sample(k, normal(1, 2000, 16, seed=1)), parts(dim=16))
    assert np.isfinite(fold.pairs).all()
    assert abs(fold.pairs).max() <= 128


def noise(sample: LayerSample, name: str) -> float:
    """Mean square of what a format's keys add to logits; keys and queries float32 [heads, tokens, head_dim]."""
    wrong = make_format(name).key(sample.k[None], 0, 0)[0] - sample.k
    return float((sample.q @ wrong.transpose(1, 2)).square().mean())


@pytest.mark.parametrize("name", ROTATING)
def test_the_noise_of_planted_keys_falls_as_predicted(name):
    k, q = normal(1, 1000, 64), normal(1, 1000, 64, seed=1)
    k *= 2.0 ** torch.linspace(-2, 3, 64)
    k[..., 5] += 40  # a bias
    fold, predicted = smooth(sample(k, q), parts(dim=64))
    factors = torch.from_numpy(np.tile(fold.pairs.real, 2)).float()[:, None]
    measured = noise(sample(k * factors, q / factors), name) / noise(sample(k, q), name)
    assert predicted.after["k"] / predicted.before["k"] < 0.5
    assert measured < 0.7
    assert measured == pytest.approx(predicted.after["k"] / predicted.before["k"], rel=ROTATING[name])


def first_layer(path) -> LayerSample:
    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    layout, seen = probe_layout(model), {}
    for row in rows_corpus([48] * 10, seed=5).samples:
        tokens = torch.from_numpy(row.tokens).long()[None]
        observe(model, layout, tokens, lambda index, kind, values: seen.setdefault((index, kind), []).append(values[0]))
    k, q = (torch.cat(seen[0, kind], dim=1) for kind in "kq")
    return sample(k, q.unflatten(0, (len(k), -1)).flatten(1, 2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_folded_model_loses_less(family, tmp_path):
    path = uneven(tmp_path / "base", family)
    made = fold_to(path, tmp_path / "folded")
    before, after = first_layer(path), first_layer(tmp_path / "folded")
    predicted = made.fold.report["predicted"]["logits"]["layers"][0]
    assert predicted < 0.8
    for name, near in ROTATING.items():
        measured = noise(after, name) / noise(before, name)
        assert measured < 0.85
        assert measured == pytest.approx(predicted, rel=near)


def test_run_folds_first_and_the_record_says_what_for(tmp_path):
    path = uneven(tmp_path / "base", "qwen2")
    result = invoke("run", path, "--output", tmp_path / "out", "--fold", "smooth", "--no-verify", *CORPUS)
    assert result.exit_code == 0, result.output
    assert "noise of rotated keys in logits predicted at" in result.stderr
    assert "FP8 error" not in result.output
    assert "were folded" in (tmp_path / "out" / "README.md").read_text()
    assert Fold.load(tmp_path / "out" / "kv_calibration" / "fold.safetensors").switches == ("smooth",)
    assert torch.equal(sixteen_bit_logits(path), sixteen_bit_logits(tmp_path / "out"))
    result = invoke("fold", path, "--output", tmp_path / "folded", "--fold", "smooth", "--json", *CORPUS)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["predicted"]) == {"logits"}


def test_an_interrupted_run_goes_on_with_what_it_folded(tmp_path, monkeypatch):
    source, corpus = SourceCheckpoint.open(uneven(tmp_path / "base", "llama")), rows_corpus([48] * 6)
    first = folded(source, corpus, tmp_path / "out", "smooth", device="cpu", trust=False)

    def again(*_, **__):
        raise AssertionError("folded again")

    monkeypatch.setattr(carrier_module, "fold_checkpoint", again)
    assert folded(source, corpus, tmp_path / "out", "smooth", device="cpu", trust=False).path == first.path
    with pytest.raises(AssertionError, match="folded again"):
        folded(source, corpus, tmp_path / "out", "k", device="cpu", trust=False)


def test_smooth_goes_alone(llama, tmp_path):
    assert parse_switches(" smooth ") == ("smooth",)
    for asked in ("smooth,k", "turn,smooth", "turn,k,smooth"):
        with pytest.raises(UsageError, match="smooth goes alone"):
            parse_switches(asked)
        for command in ("fold", "run"):
            result = invoke(command, llama, "--output", tmp_path / "x", "--fold", asked, *CORPUS)
            assert (result.exit_code, result.stderr.count("\n"), "--fold smooth goes alone" in result.stderr) == (2, 1, True)
    assert not (tmp_path / "x").exists()
