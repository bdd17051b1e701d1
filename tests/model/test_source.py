"""Checkpoint folders: what tells their weights apart, and what their config says."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.errors import HostError, UsageError
from calibrate.model import SourceCheckpoint, cache_dtype_of, choose_device, compute_dtype, load_model, load_tokenizer, probe_layout, resolve_model
from calibrate.model.source import context_length_of
from calibrate.model.weights import read_safetensors_header
from tests.tiny import edit_config, tiny_checkpoint


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "model")


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fingerprint(folder) -> str:
    return SourceCheckpoint.open(folder).fingerprint


def test_the_fingerprint_is_that_of_the_numbers_and_not_of_the_files(llama, tmp_path):
    sharded = tiny_checkpoint(tmp_path / "sharded", shard="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert fingerprint(sharded) == fingerprint(llama)
    assert fingerprint(tiny_checkpoint(tmp_path / "other", seed=1)) != fingerprint(llama)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.v_proj.weight", "model.embed_tokens.weight"])
def test_training_any_one_tensor_changes_the_fingerprint(llama, copy, name):
    change(copy, lambda tensors: tensors[name].mul_(1.01))
    assert fingerprint(copy) != fingerprint(llama)


def test_a_name_a_shape_or_a_type_changes_the_fingerprint(llama, copy):
    found = {fingerprint(llama)}
    for edit in (
        lambda tensors: tensors.update({"model.norm.renamed": tensors.pop("model.norm.weight")}),
        lambda tensors: tensors.update({"model.norm.renamed": tensors["model.norm.renamed"].view(1, -1)}),
        lambda tensors: tensors.update({"model.norm.renamed": tensors["model.norm.renamed"].view(torch.float16)}),
        lambda tensors: tensors.pop("model.norm.renamed"),
    ):
        change(copy, edit)
        assert fingerprint(copy) not in found
        found.add(fingerprint(copy))


def test_full_digests_read_every_byte(llama, copy):
    before = SourceCheckpoint.open(copy).weight_digests()
    assert before == SourceCheckpoint.open(llama).weight_digests()
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert SourceCheckpoint.open(copy).weight_digests() != before


def header_file(path, header: dict | bytes, size: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},  # size and shape disagree
        {"x": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},  # a gap
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [8]}},
        {"x": {"shape": [2], "data_offsets": [0, 8]}},
        {"x": 3},
        b"[]",
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_header_that_safetensors_would_not_load_is_refused_by_name(tmp_path, header):
    header_file(tmp_path / "w.safetensors", header, 8)
    with pytest.raises(UsageError) as caught:
        read_safetensors_header(tmp_path / "w.safetensors")
    assert str(tmp_path / "w.safetensors") in str(caught.value)


def test_a_missing_folder_and_a_file_are_no_checkpoints(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no", tmp_path / "file"):
        with pytest.raises(UsageError, match="no model folder"):
            SourceCheckpoint.open(resolve_model(str(path)))


def test_a_hub_id_without_network_is_one_line():
    with pytest.raises(UsageError, match="neither a folder here nor a model that the hub gave") as caught:
        resolve_model("nobody/nothing-here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stored", "cached"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"), (None, "bfloat16")])
def test_the_cache_has_the_checkpoints_type_if_that_has_16_bits(copy, stored, cached):
    edit_config(copy, dtype=stored, torch_dtype=None)
    source = SourceCheckpoint.open(copy)
    assert cache_dtype_of(source) == cached
    assert compute_dtype(source, "cuda", None) == getattr(torch, stored or "float32")
    assert compute_dtype(source, "cpu", "float16") is torch.float16


def test_devices_that_are_not_there_are_told_from_devices_that_are_none(monkeypatch):
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto") == "auto"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", None)  # asking must not start a context on a GPU that is another process's
    assert [choose_device(name) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    monkeypatch.undo()
    assert choose_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="give cpu, cuda"):
        choose_device("quantum")
    with pytest.raises(HostError, match="CUDA devices here"):
        choose_device("cuda:99")


def test_the_context_is_found_under_the_names_that_families_use(copy):
    assert SourceCheckpoint.open(copy).context_length == 512
    edit_config(copy, max_position_embeddings=None, n_positions=77)
    assert SourceCheckpoint.open(copy).context_length == 77
    assert context_length_of({"n_positions": None, "max_seq_len": 88}) == 88
    assert context_length_of({"text_config": {"n_ctx": 99}, "n_ctx": 1}) == 99
    edit_config(copy, n_positions=None)
    assert SourceCheckpoint.open(copy).context_length is None


def test_a_language_models_part_of_a_multimodal_config_is_read(copy):
    edit_config(copy, text_config={"vocab_size": 9, "max_position_embeddings": 11})
    source = SourceCheckpoint.open(copy)
    assert (source.vocab_size, source.context_length) == (9, 11)


def test_a_tokenizer_of_nonsense_is_one_line(copy):
    (copy / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')
    with pytest.raises(UsageError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(SourceCheckpoint.open(copy))


def test_the_layout_of_a_saved_model_is_that_of_its_config(llama):
    layout = probe_layout(load_model(SourceCheckpoint.open(llama), device="cpu", dtype=torch.float32))
    assert [layer.index for layer in layout.layers] == [0, 1, 2]
    assert {(layer.num_heads, layer.num_key_value_heads, layer.head_dim, layer.target == layer.index) for layer in layout.layers} == {
        (4, 2, 32, True)
    }
