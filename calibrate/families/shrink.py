"""A model's config made tiny by rule: its mechanisms stay (layer types, norms, biases, shared caches), its sizes go."""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN, HEADS, HEAD_DIM, VOCAB = 128, 4, 32, 256
POSITIONS, WINDOW = 512, 16
_MOST_LAYERS = 12

# the first pattern that a field's whole name matches gives its largest value
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?", VOCAB),
    (r"hidden_size|n_embd|d_model|word_embed_proj_dim|(out|projection)_hidden_size|decoder_hidden_size", HIDDEN),
    (r"intermediate_size|ffn_dim|n_inner|intermediate_size_mlp", 96),
    (r"ffn_hidden_size", 4 * HIDDEN),  # of Falcon, whose engine code knows no other ratio
    (r"(moe_|shared_expert_|shared_|moe_shared_expert_|expert_)(intermediate|ffn_hidden)_size", 64),
    (r"num_attention_heads|n_heads?|num_heads", HEADS),
    (r"head_dim|query_pre_attn_scalar", HEAD_DIM),
    (r"global_head_dim|attention_head_dim", 2 * HEAD_DIM),  # the second is Zamba's, whose attention is twice as wide as the model
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|seq_length|model_max_length|original_max_position_embeddings", POSITIONS),
    (r"(attention_|initial_)?(sliding_window|window_size|chunk_size)|attention_window|mamba_chunk_size", WINDOW),
    (r"kv_lora_rank", 32),
    (r"q_lora_rank", 24),
    (r"qk_(rope|nope)_head_dim|v_head_dim|rotary_dim", 16),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_n_heads|n_mamba_heads|mamba_num_heads", 2 * HIDDEN // HEAD_DIM),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", HEAD_DIM),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"mamba_dt_rank", 8),
    (r"(mamba_)?n_groups|mamba_ngroups", 1),
    (r"linear_num_value_heads", 4),
    (r"linear_num_key_heads", 2),
    (r"linear_(key|value)_head_dim", 16),
    (r"hidden_size_per_layer_input", 16),
    (r"laurel_rank", 8),
    (r"depth|num_layers", 2),  # of an image tower
    (r"image_size", 56),
)
_KV_HEADS = re.compile(r"num_key_value_heads|num_kv_heads|num_global_key_value_heads|n_kv_heads?")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# no part of a model's shape or function: file format, training, output
_NOISE = re.compile(
    r"_.*|transformers_version|architectures|dtype|torch_dtype|id2label|label2id|problem_type|output_.*|return_dict|chunk_size_feed_forward"
    r"|is_encoder_decoder|use_cache|initializer_range|.*dropout|.*pdrop|auto_map|quantization_config|pretraining_tp|.*aux_loss_coef|model_type|name"
    r"|router_jitter_noise|rescale_prenorm_residual|num_nextn_predict_layers|num_mtp_layers|mtp_.*|use_mamba_kernels|summary_.*|task_specific_params"
)


def tiny_fields(config: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The fields that make a tiny model of a config.

    Args:
        config: the model's config as a dict (its own class's `to_dict`), parts such as `text_config` as dicts inside it.
        default: the same class's defaults.

    Returns:
        only the fields whose tiny value differs from the default.
    """
    fields: dict[str, Any] = {}
    for name, value in _shrunk(config).items():
        if _NOISE.fullmatch(name):
            continue
        if name.endswith("_config") and isinstance(value, dict):
            inner = default.get(name)
            part = tiny_fields(config[name], inner if isinstance(inner, dict) else {})
            fields |= {name: part} if part else {}
        elif name not in default or value != default[name]:
            fields[name] = value
    return fields


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    count = next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), 0)
    keep = _layers_kept(config, count)
    small = {name: _small(name, value, config) for name, value in config.items()}
    for name, value in small.items():
        if count and isinstance(value, list) and len(value) == count:
            small[name] = value[:keep]
    small |= {name: keep for name in _LAYERS if isinstance(config.get(name), int)}
    small |= {name: HEADS for name in config if _KV_HEADS.fullmatch(name) and config[name] is None}
    derived = config.get("kv_lora_rank") or "attention_head_dim" in config
    if "num_key_value_heads" in config and config.get("head_dim") is None and not derived:
        small["head_dim"] = HEAD_DIM  # what it is anyway; some engines ask for it by name
    if config.get("kv_lora_rank") and isinstance(config.get("head_dim"), int):
        small["head_dim"] = small["qk_rope_head_dim"]  # latent attention calls its rotary part that
    if config.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = keep // 2
    if config.get("attn_layer_period"):  # every other layer instead of every eighth
        small |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    if isinstance(config.get("attn_layer_indices"), list):
        small["attn_layer_indices"] = [1]
    return small


def _layers_kept(config: dict[str, Any], count: int) -> int:
    """The shortest start of the model, of two layers or more, in which every kind of layer occurs; twice that where layers share a cache."""
    lists = [value for name, value in config.items() if count and isinstance(value, list) and len(value) == count and not name.startswith("_")]
    kinds = [tuple(map(str, one)) for one in zip(*lists, strict=True)]
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    if config.get("attn_layer_period") or isinstance(config.get("attn_layer_indices"), list):
        needed = 4 if config.get("attn_layer_period") else 2
    needed = min(max(needed, 2), count or 2, _MOST_LAYERS)
    return min(2 * needed, count) if config.get("num_kv_shared_layers") else needed


def _small(name: str, value: Any, config: dict[str, Any]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name.endswith("_token_id"):
        return _token(name, value)
    if name == "rope_parameters":
        return _plain_rope(value)
    if _KV_HEADS.fullmatch(name):
        return _kv_heads(value, config)
    if isinstance(value, list):
        return [_small(name, one, config) for one in value]
    if isinstance(value, int):
        return min(value, _largest(name, value))
    return value


def _largest(name: str, otherwise: int) -> int:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), otherwise)


def _kv_heads(value: int, config: dict[str, Any]) -> int:
    heads = next((config[name] for name in ("num_attention_heads", "n_head", "n_heads") if isinstance(config.get(name), int)), value)
    return HEADS if value >= heads else min(value, 2)


def _token(name: str, value: Any) -> Any:
    if name in _TOKENS:
        return _TOKENS[name]
    numbers = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return value if all(not isinstance(one, int) or one < VOCAB for one in numbers) else VOCAB - 1 - sum(map(ord, name)) % 128


def _plain_rope(value: dict[str, Any]) -> dict[str, Any]:
    """RoPE without tables that are made for the original's sizes (longrope). Nested where layer types have their own."""
    if value and all(isinstance(one, dict) for one in value.values()):
        return {name: _plain_rope(one) for name, one in value.items()}
    if value.get("rope_type") in ("longrope", "su"):
        value = {name: one for name, one in value.items() if name in ("rope_theta", "partial_rotary_factor")} | {"rope_type": "default"}
    return value | ({"mrope_section": [4, 6, 6]} if "mrope_section" in value else {})
