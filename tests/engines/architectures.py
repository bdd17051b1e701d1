"""Tiny checkpoints of architectures that no recipe carries, vision-language ones in the hub's spelling: their config fields, and how to save them."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from calibrate.families.tiny import tiny_checkpoint, tiny_config

_TEXT = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_QWEN2 = {name: value for name, value in _TEXT.items() if name not in ("head_dim", "bos_token_id")}
_TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
    "num_channels": 3,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 64, "embed_dim": 64, "num_heads": 2, "patch_size": 14, "out_hidden_size": 128, "intermediate_size": 96,
    "spatial_merge_size": 2,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_CLIP = _TOWER | {"model_type": "clip_vision_model", "projection_dim": 64}
_SHARED = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256,
}  # fmt: skip

# keys and values of different size, and KV heads that differ per layer
MIXED = {
    "mimo_v2_flash": {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "v_head_dim": 32, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 64, "swa_v_head_dim": 32, "sliding_window": 16, "sliding_window_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"] * 2, "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "layernorm_epsilon": 1e-5,
    },
}  # fmt: skip
# model type → fields of its config
VISION_LANGUAGE: dict[str, dict] = {
    "idefics3": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER, "image_token_id": 250, "scale_factor": 1},
    "smolvlm": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER, "image_token_id": 250, "scale_factor": 1},
    "paligemma": {
        "text_config": _TEXT | {"model_type": "gemma"}, "vision_config": _TOWER | {"projection_dim": 128}, "projection_dim": 128,
        "image_token_index": 250,
    },
    "gemma3": {
        "text_config": _TEXT | _SLIDING | {"query_pre_attn_scalar": 32}, "vision_config": _TOWER, "mm_tokens_per_image": 4,
        "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252,
    },
    "gemma4": {
        "text_config": _TEXT | _SHARED | {"global_head_dim": 64, "num_global_key_value_heads": 2},
        "vision_config": _TOWER | {"model_type": "gemma4_vision", "head_dim": 32, "num_key_value_heads": 2},
        "image_token_id": 250, "video_token_id": 249, "audio_token_id": 248, "boi_token_id": 251, "eoi_token_id": 252,
    },
    "llava": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _CLIP, "image_token_index": 250},
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 32},
        "image_token_index": 250, "spatial_merge_size": 1,
    },
    "internvl": {
        "text_config": _QWEN2 | {"model_type": "qwen2"},
        "vision_config": _TOWER | {"model_type": "internvl_vision", "image_size": [32, 32], "patch_size": [16, 16]},
        "image_token_id": 250, "downsample_ratio": 0.5,
    },
    "llama4": {
        "text_config": _TEXT | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96},
        "vision_config": _TOWER
        | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5},
        "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252,
    },
    "qwen2_vl": {
        "text_config": _QWEN2 | {"rope_parameters": _MROPE}, "vision_config": _QWEN_TOWER | {"hidden_size": 128, "mlp_ratio": 2}, **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": _QWEN2 | {"rope_parameters": _MROPE},
        "vision_config": _QWEN_TOWER | {"window_size": 28, "fullatt_block_indexes": [1]}, **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": _QWEN2 | {"head_dim": 32, "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **_QWEN_TOKENS,
    },
    "glm4v": {
        "text_config": _QWEN2 | {"head_dim": 32, "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": _QWEN_TOWER | {"image_size": 28},
        "image_token_id": 250, "video_token_id": 251, "image_start_token_id": 252, "image_end_token_id": 253,
        "video_start_token_id": 254, "video_end_token_id": 255,
    },
}  # fmt: skip
# vLLM imports these model files only where torchvision is installed, which its CPU build goes without (docs/environment.md)
NEED_TORCHVISION = set(VISION_LANGUAGE) - {"idefics3", "smolvlm", "paligemma"}


def vision_language_checkpoint(path: Path, model_type: str) -> Path:
    """A tiny random checkpoint; the names of SigLIP and CLIP towers are the hub's, which transformers 5 reads but no longer writes."""
    tiny_checkpoint(path, tiny_config(model_type, VISION_LANGUAGE[model_type]))
    if model_type in ("gemma3", "paligemma", "llava"):
        file = path / "model.safetensors"
        tensors = load_file(file)
        old, new = "vision_tower.", "vision_tower.vision_model."
        assert sum(name.startswith(old) for name in tensors) > 10
        save_file({name.replace(old, new, 1) if name.startswith(old) else name: one for name, one in tensors.items()}, file, {"format": "pt"})
    assert "vision_config" in json.loads((path / "config.json").read_text())
    return path
