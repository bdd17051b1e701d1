"""Tiny random models of many families, as the recipes describe them, and checkpoints of them."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from calibrate.families import tiny
from calibrate.families.shrink import VOCAB
from calibrate.families.tiny import tiny_tokenizer
from calibrate.recipes import all_recipes

__all__ = ["FAMILIES", "VOCAB", "edit_config", "tiny_checkpoint", "tiny_config", "tiny_model", "tiny_tokenizer"]

# The model types that tests go through one by one: each brings a mechanism of its own. `recipes check` knows many more.
_NAMES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "phi3", "gpt2", "gptj",
    "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "falcon", "opt", "gpt_neox",
)  # fmt: skip
_TINY = {kind: fields for recipe in all_recipes().values() for kind, fields in recipe.tiny.items()}
# model type → fields of its tiny config
FAMILIES: dict[str, dict] = {name: _TINY[name] for name in _NAMES}


def tiny_config(family: str, **changes):
    """The config of a tiny model."""
    return tiny.tiny_config(family, _TINY[family] | changes)


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model in eval mode, weights larger than the library's initialization so that K and V are not near zero."""
    return tiny.tiny_model(tiny_config(family, **changes), dtype=dtype, seed=seed)


def tiny_checkpoint(
    path: Path, family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, shard: str | None = None, seed: int = 0, **changes
) -> Path:
    """Save a tiny model with its tokenizer; `shard` is the shard size (as "100KB") where several files are wanted."""
    return tiny.tiny_checkpoint(path, tiny_config(family, **changes), dtype=dtype, shard=shard, seed=seed)


def edit_config(path: Path, **changes) -> None:
    """Change fields of a checkpoint's config.json; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
