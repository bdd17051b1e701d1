"""Small calibrated checkpoints for the read-back tests, made without the rest of the program so that the rooms stay independent."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32


def scales_for(strategy: str, layers: int = LAYERS, heads: int = HEADS, kv_heads: int = KV_HEADS, seed: int = 7) -> dict[str, np.ndarray]:
    """Distinct fp32 scales per layer, kind and head: `[1]` for tensor, `[kv_heads]` / q `[heads]` for attn_head."""
    rng = np.random.default_rng(seed)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": rng.uniform(0.002, 0.9, size if strategy == "attn_head" else 1).astype(np.float32)
        for layer in range(layers)
        for kind, size in sizes.items()
    }


def tiny_llama(folder: Path, kv_heads: int = KV_HEADS) -> Path:
    """A random bf16 Llama: 3 layers, 4 query and 2 KV heads of 32, saved as one safetensors file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=HEADS * HEAD_DIM, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=kv_heads, head_dim=HEAD_DIM, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def calibrated(source: Path, folder: Path, scales: dict[str, np.ndarray], strategy: str, listed: bool = True) -> Path:
    """`source` linked into `folder` with a `kv_cache_scheme`, scales, and an index that lists them (or, `listed=False`, does not)."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "ignore": [], "config_groups": {},
        "kv_cache_scheme": scheme,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(source / "model.safetensors", framework="np") as file:
        weight_map = dict.fromkeys(file.keys(), "model.safetensors")
    rewrite_scales(folder, scales)
    if listed:
        weight_map |= dict.fromkeys(scales, "kv_scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rewrite_scales(folder: Path, scales: dict[str, np.ndarray]) -> None:
    """Replace the scale shard only; the index stays as it was."""
    save_file(scales, folder / "kv_scales.safetensors", metadata={"format": "pt"})
