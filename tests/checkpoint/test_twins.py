"""Twins compute the same function and cache another magnitude: to the last bit for powers of two."""

import json
import os

import pytest
import torch
from transformers import DynamicCache

from calibrate.checkpoint.twins import write_twin
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from tests.tiny import VOCAB, edit_config, tiny_checkpoint

TOKENS = torch.arange(40).unsqueeze(0) * 37 % VOCAB


def logits_and_amax(path):
    """Logits in fp32 and the largest |K| and |V| of each layer."""
    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.inference_mode():
        logits = model(input_ids=TOKENS, past_key_values=cache).logits
    assert len(probe_layout(model).layers) == len(cache.layers)
    return logits, torch.tensor([[layer.keys.abs().max(), layer.values.abs().max()] for layer in cache.layers])


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"])
@pytest.mark.parametrize(("kind", "factor"), [("k", 64.0), ("k", 2.0**-10), ("v", 2.0**-12), ("v", 16.0)])
def test_powers_of_two_change_no_bit(family, kind, factor, tmp_path):
    source = tiny_checkpoint(tmp_path / "base", family, shard="100KB" if family == "llama" else None)
    if (family, kind, factor) == ("gemma3_text", "k", 2.0**-10):
        with pytest.raises(UsageError, match="no integer"):
            write_twin(source, tmp_path / "twin", kind=kind, factor=factor)
        return
    twin = write_twin(source, tmp_path / "twin", kind=kind, factor=factor)
    (logits, amax), (twin_logits, twin_amax) = logits_and_amax(source), logits_and_amax(twin)
    if family == "gemma3_text" and kind == "k":  # 1 + (λ(1 + w) − 1) is rounded in fp32
        assert torch.allclose(logits, twin_logits, atol=1e-4)
        assert torch.allclose(twin_amax[:, 0], factor * amax[:, 0], rtol=1e-4)
    else:
        assert torch.equal(logits, twin_logits)
        assert torch.equal(twin_amax[:, "kv".index(kind)], factor * amax[:, "kv".index(kind)])
    assert torch.equal(twin_amax[:, "vk".index(kind)], amax[:, "vk".index(kind)])


@pytest.mark.parametrize("kind", ["k", "v"])
def test_biases_are_scaled(kind, tmp_path):
    source = tiny_checkpoint(tmp_path / "base", "qwen2", dtype=torch.float32)
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("_proj.bias"):
            tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    twin = write_twin(source, tmp_path / "twin", kind=kind, factor=64)
    assert torch.equal(logits_and_amax(source)[0], logits_and_amax(twin)[0])


def test_other_factors_are_close(tmp_path):
    source = tiny_checkpoint(tmp_path / "base", dtype=torch.float32)
    twin = write_twin(source, tmp_path / "twin", kind="k", factor=7.3)
    (logits, amax), (twin_logits, twin_amax) = logits_and_amax(source), logits_and_amax(twin)
    assert torch.allclose(logits, twin_logits, atol=1e-4)
    assert torch.allclose(twin_amax[:, 0], 7.3 * amax[:, 0], rtol=1e-5)


def test_everything_else_is_linked_and_kept(tmp_path):
    source = tiny_checkpoint(tmp_path / "base")
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("x")
    twin = write_twin(source, tmp_path / "twin", kind="v", factor=2)
    assert os.path.samefile(source / "tokenizer.json", twin / "tokenizer.json")
    assert (twin / "sub" / "notes.txt").read_text() == "x"
    assert json.loads((twin / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    from safetensors.torch import load_file

    before, after = load_file(source / "model.safetensors"), load_file(twin / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"v_proj", "o_proj"}


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "gemma3n_text", "falcon"])
def test_architectures_that_are_not_known(family, tmp_path):
    source = tiny_checkpoint(tmp_path / "base", family)
    with pytest.raises(UsageError, match=f"no twin of a {family}"):
        write_twin(source, tmp_path / "twin", kind="k", factor=2)
    assert not (tmp_path / "twin").exists()


def test_what_is_refused(tmp_path):
    source = tiny_checkpoint(tmp_path / "base", dtype=torch.float16)
    for factor in (0.0, -2.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="must be positive and finite"):
            write_twin(source, tmp_path / "twin", kind="k", factor=factor)
    with pytest.raises(UsageError, match="leaves the range of float16"):
        write_twin(source, tmp_path / "twin", kind="k", factor=2.0**20)
    with pytest.raises(UsageError, match="leaves the range of float16"):
        write_twin(source, tmp_path / "twin", kind="v", factor=2.0**24)
    assert not (tmp_path / "twin").exists()
    with pytest.raises(UsageError, match="the source checkpoint itself"):
        write_twin(source, source, kind="k", factor=2)
    edit_config(source, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}})
    with pytest.raises(UsageError, match="quantized or calibrated"):
        write_twin(source, tmp_path / "twin", kind="k", factor=2)
    edit_config(source, quantization_config=None, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(UsageError, match=r"has no tensor …k_norm.weight"):
        write_twin(source, tmp_path / "twin", kind="k", factor=2)
