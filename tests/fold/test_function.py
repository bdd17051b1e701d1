"""Any fold leaves the function as it was: random multipliers, rotations and means, in memory and on disk, in every family that can be folded."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.errors import UsageError
from calibrate.fold import Fold, LayerFold
from calibrate.fold.apply import fold_model
from calibrate.fold.parts import check_foldable, parts_of
from calibrate.fold.write import write_folded
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from tests.tiny import VOCAB, tiny_checkpoint, tiny_model

TOKENS = 3 + torch.arange(40).unsqueeze(0) * 37 % (VOCAB - 3)  # no padding: its embedding is zero, and norms blow rounding up there
PLAIN = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "phi3", "phimoe", "cohere", "cohere2", "glm4", "glm4_moe", "smollm3",
    "granite", "granitemoe", "seed_oss", "stablelm", "olmo", "starcoder2", "nemotron", "helium", "ernie4_5", "arcee", "jamba",
)  # fmt: skip
NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "apertus")


def random_fold(parts, origin: str, *, turn: bool = True, mean: bool = False, seed: int = 0) -> Fold:
    """Factors between 1/4 and 4, any angle."""
    rng = np.random.default_rng(seed)
    layers = []
    for index, part in parts.items():
        rows = 1 if part.norm else part.layer.num_key_value_heads
        values = (part.layer.num_key_value_heads, part.layer.value_head_dim)

        def factors(*shape: int) -> np.ndarray:
            return 2.0 ** rng.uniform(-2, 2, shape)

        pairs = factors(rows, len(part.first)) * np.exp(1j * rng.uniform(0, 7, (rows, len(part.first))) * (turn and not part.norm))
        shift = rng.normal(size=values) if mean else np.zeros(values)
        layers.append(LayerFold(index, part.layer.module, pairs, factors(rows, len(part.rest)), factors(*values), shift))
    return Fold(("turn", "k", "v", "mean")[not turn : 3 + mean], tuple(layers), origin)


def with_random_biases(path):
    """Biases of the projections that are not zero, as training leaves them, and norms that are not one."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("_proj.bias") or "_norm.weight" in name:
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def logits_of(path):
    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


def close(before: torch.Tensor, after: torch.Tensor) -> bool:
    return bool((after - before).norm() < 1e-4 * before.norm())


def folded(tmp_path, family, *, mean=False, turn=True, **changes):
    """(logits before, logits after, path of the folded checkpoint, path of the source)."""
    path = with_random_biases(tiny_checkpoint(tmp_path / "base", family, dtype=torch.float32, **changes))
    source = SourceCheckpoint.open(path)
    model = load_model(source, device="cpu", dtype=torch.float32)
    parts = parts_of(model, probe_layout(model), ())
    fold = random_fold(parts, source.fingerprint, mean=mean, turn=turn)
    write_folded(source, fold, parts, tmp_path / "folded")
    before = logits_of(path)
    fold_model(model, fold, parts)
    with torch.inference_mode():
        assert close(before, model(input_ids=TOKENS).logits)
    return before, logits_of(tmp_path / "folded"), tmp_path / "folded", path


@pytest.mark.parametrize("family", PLAIN + NORMED)
def test_the_function_stays(family, tmp_path):
    before, after, path, source = folded(tmp_path, family)
    assert close(before, after)
    old, new = load_file(source / "model.safetensors"), load_file(path / "model.safetensors")
    changed = {name.rsplit(".", 2)[1] for name in old if not torch.equal(old[name], new[name])}
    normed = {"q_norm", "k_norm"} if family in NORMED else {"q_proj", "k_proj"}
    assert changed == ({"qkv_proj", "o_proj"} if family == "phi3" else normed | {"v_proj", "o_proj"})


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("llama", {"attention_bias": True}), ("granite", {})])
def test_the_mean_of_v_goes_through_the_output_bias(family, changes, tmp_path):
    before, after, path, _ = folded(tmp_path, family, mean=True, **changes)
    assert close(before, after)
    assert json.loads((path / "config.json").read_text())["attention_bias"] is True
    assert Fold.load(path / "kv_calibration" / "fold.safetensors").adds_biases


def test_untouched_shards_are_linked(tmp_path):
    path = tiny_checkpoint(tmp_path / "base", "llama", shard="60KB")
    source = SourceCheckpoint.open(path)
    model = tiny_model("llama")
    parts = parts_of(model, probe_layout(model), ())
    fold = random_fold(parts, source.fingerprint, mean=True)
    still = [LayerFold(f.index, f.module, np.ones_like(f.pairs), np.ones_like(f.rest), np.ones_like(f.v), 0 * f.mean) for f in fold.layers]
    write_folded(source, Fold((), tuple(still), ""), parts, tmp_path / "same")
    assert all(os.path.samefile(path / name, tmp_path / "same" / name) for name in source.headers)
    write_folded(source, fold, parts, tmp_path / "folded")
    linked = [name for name in source.headers if os.path.samefile(path / name, tmp_path / "folded" / name)]
    assert linked
    assert len(linked) < len(source.headers)
    reopened = SourceCheckpoint.open(tmp_path / "folded")
    assert {name for name in reopened.weight_map if name not in source.weight_map} == {
        f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in parts for part in "qkvo"
    }


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", "cannot be folded"),
        ("deepseek_v3", "cannot be folded"),
        ("gpt2", "its parts are"),
        ("gpt_neox", "its parts are"),
        ("falcon", "its parts are"),
        ("qwen3_next", "cannot be folded"),
        ("gemma4_text", "cannot be folded"),
        ("opt", "its parts are"),
        ("phi", "its parts are"),
        ("olmoe", "its norm runs over all heads"),
        ("gpt_oss", "how it turns positions is not known"),
        ("minicpm3", "its cache holds latents"),
    ],
)
def test_what_cannot_be_folded_is_refused_by_name(family, reason):
    model = tiny_model(family)
    with pytest.raises(UsageError, match=reason):
        parts_of(model, probe_layout(model), ())


def test_norms_turn_no_pairs():
    model = tiny_model("qwen3")
    with pytest.raises(UsageError, match="leave `turn` out"):
        parts_of(model, probe_layout(model), ("turn",))


def test_a_bias_that_vllm_does_not_know_is_refused(tmp_path):
    source = SourceCheckpoint.open(tiny_checkpoint(tmp_path / "base", "qwen2"))
    with pytest.raises(UsageError, match="needs a bias of o_proj"):
        check_foldable(source, ("mean",))
