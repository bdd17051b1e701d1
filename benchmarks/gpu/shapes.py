"""Models of a shape with random weights, made on the device from one seed, and how much arithmetic a forward of theirs is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from calibrate.corpus import Corpus, Sample
from calibrate.model import SourceCheckpoint

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {  # Llama-3-8B
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
    },
    "moe": {  # Qwen3-MoE's layer with 32 experts, of which a token goes through 2: the same share, 1/16, as Qwen3-30B-A3B's 8 of 128
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1536,
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
    },
}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}
_TINY |= {"num_key_value_heads": 2, "vocab_size": 512}


def shape(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """Fields of a config; `tiny` keeps its mechanisms and runs anywhere."""
    full = SHAPES[name]
    return full | {field: value for field, value in _TINY.items() if field in full} if tiny else full


def build(fields: dict[str, Any], device: str) -> PreTrainedModel:
    """The same weights in every process on the same kind of device."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def source_of(fields: dict[str, Any], folder: Path) -> SourceCheckpoint:
    """A checkpoint folder with the config and one small tensor: the weights exist on the device alone, so nothing of them is hashed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}, folder / "model.safetensors", metadata={"format": "pt"})
    unused = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # rows are tokens already, but a checkpoint has one
    PreTrainedTokenizerFast(tokenizer_object=unused, pad_token="a").save_pretrained(folder)
    return SourceCheckpoint.open(folder)


def rows(count: int, length: int, vocabulary: int) -> Corpus:
    """Random tokens, a document a row."""
    tokens = np.random.default_rng(0).integers(3, vocabulary, (count, length)).astype(np.int32)
    samples = tuple(Sample(row, number, f"rows:{number + 1}") for number, row in enumerate(tokens))
    return Corpus(samples, count, f"rows-{count}-{length}", {"sources": [{"data": "random tokens"}], "seed": 0})


def flops(fields: dict[str, Any], tokens: int, length: int, *, to_last_cache_write: bool) -> float:
    """Of a forward without lm_head: two for each weight that a token meets, and causal attention's two products over half of the square.

    Args:
        to_last_cache_write: without what follows the last layer's Q: its attention, output projection and MLP.
    """
    hidden, width = fields["hidden_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * width, fields["num_key_value_heads"] * width
    projections = 2 * hidden * (queries + 2 * keys)
    experts = fields.get("num_experts_per_tok", 0)
    mlp = 2 * 3 * hidden * (experts * fields["moe_intermediate_size"] if experts else fields["intermediate_size"])
    mlp += 2 * hidden * fields.get("num_experts", 0)  # the router
    rest = 2 * queries * hidden + mlp + 2 * 2 * queries * (length + 1) / 2
    layers = fields["num_hidden_layers"]
    return tokens * (layers * projections + (layers - to_last_cache_write) * rest)
