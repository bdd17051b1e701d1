"""Any fold leaves the function as it was: random multipliers and rotations, in memory and on disk, in every family that can be folded."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.errors import UsageError
from calibrate.fold import Fold, LayerFold
from calibrate.fold.apply import fold_model
from calibrate.fold.parts import parts_of
from calibrate.fold.write import write_folded
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from tests.tiny import VOCAB, tiny_checkpoint, tiny_model

TOKENS = 3 + torch.arange(40).unsqueeze(0) * 37 % (VOCAB - 3)  # no padding: its embedding is zero, and norms blow rounding up there
PLAIN = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "phi3", "phimoe", "cohere", "cohere2", "glm4", "glm4_moe", "smollm3",
    "granite", "granitemoe", "seed_oss", "stablelm", "olmo", "starcoder2", "nemotron", "helium", "ernie4_5", "arcee", "jamba",
)  # fmt: skip
NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "apertus")


def random_fold(parts, origin: str) -> Fold:
    """Factors between 1/4 and 4, any angle."""
    rng = np.random.default_rng(0)
    layers = []
    for index, part in parts.items():
        rows = 1 if part.norm else part.layer.num_key_value_heads

        def factors(*shape: int) -> np.ndarray:
            return 2.0 ** rng.uniform(-2, 2, shape)

        pairs = factors(rows, len(part.first)) * np.exp(1j * rng.uniform(0, 7, (rows, len(part.first))) * (not part.norm))
        layers.append(LayerFold(index, part.layer.module, pairs, factors(rows, len(part.rest))))
    return Fold(("turn", "k"), tuple(layers), origin)


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


def folded(tmp_path, family):
    """(logits before, logits after, path of the folded checkpoint, path of the source)."""
    path = with_random_biases(tiny_checkpoint(tmp_path / "base", family, dtype=torch.float32))
    source = SourceCheckpoint.open(path)
    model = load_model(source, device="cpu", dtype=torch.float32)
    parts = parts_of(model, probe_layout(model), ())
    fold = random_fold(parts, source.fingerprint)
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
    assert changed == ({"qkv_proj"} if family == "phi3" else normed)


def test_untouched_shards_are_linked(tmp_path):
    path = tiny_checkpoint(tmp_path / "base", "llama", shard="60KB")
    source = SourceCheckpoint.open(path)
    model = tiny_model("llama")
    parts = parts_of(model, probe_layout(model), ())
    fold = random_fold(parts, source.fingerprint)
    still = [LayerFold(f.index, f.module, np.ones_like(f.pairs), np.ones_like(f.rest)) for f in fold.layers]
    write_folded(source, Fold((), tuple(still), ""), parts, tmp_path / "same")
    assert all(os.path.samefile(path / name, tmp_path / "same" / name) for name in source.headers)
    write_folded(source, fold, parts, tmp_path / "folded")
    linked = [name for name in source.headers if os.path.samefile(path / name, tmp_path / "folded" / name)]
    assert linked
    assert len(linked) < len(source.headers)
    assert SourceCheckpoint.open(tmp_path / "folded").headers == source.headers


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
