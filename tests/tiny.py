"""Tiny random models of many families, each built from its own config class, and checkpoints of them."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 256
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}
_NO_HEAD_DIM = {key: value for key, value in _BASE.items() if key != "head_dim"} | {"hidden_size": 128}

# family → fields of its config that differ from the base
FAMILIES: dict[str, dict] = {
    "llama": _BASE,
    "qwen2": _NO_HEAD_DIM,
    "qwen3": _BASE,
    "qwen3_moe": _BASE | _MOE,
    "mistral": _BASE | {"sliding_window": 16},
    "mixtral": _BASE | _MOE,
    "gemma2": _BASE | {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": _BASE
    | {"sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "gemma3n_text": _BASE
    | {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gemma4_text": _BASE
    | {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 16,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
    },
    "phi3": _NO_HEAD_DIM,
    "gpt2": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 8},
    "gpt_oss": _BASE | _MOE | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "deepseek_v3": {key: value for key, value in _BASE.items() if key != "head_dim"}
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": _BASE
    | _MOE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
    "nemotron_h": _BASE
    | {
        "hybrid_override_pattern": "M*-M*-",
        "num_hidden_layers": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "multi_query": True,
        "alibi": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": _NO_HEAD_DIM | {"ffn_dim": 96, "word_embed_proj_dim": 128},
    "gpt_neox": _NO_HEAD_DIM,
}


def tiny_config(family: str, **changes):
    """The config of a tiny model."""
    return AutoConfig.for_model(family, **(FAMILIES[family] | changes))


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model in eval mode, weights larger than the library's initialization so that K and V are not near zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 256 tokens: three special ones and the printable bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512)


def tiny_checkpoint(path: Path, family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, shard: str | None = None, **changes) -> Path:
    """Save a tiny model with its tokenizer; `shard` is the shard size (as "100KB") where several files are wanted."""
    model = tiny_model(family, dtype=dtype, **changes)
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    tiny_tokenizer().save_pretrained(path)
    return path


def edit_config(path: Path, **changes) -> None:
    """Change fields of a checkpoint's config.json; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
