"""Model families for which vLLM loads no KV scales whatever a checkpoint holds: known by name, with the reason, before hours of work."""

from typing import Any

# vLLM builds the attention layers of these without its quantization config, so they have no parameters that scales could be loaded into:
# model type → architectures. tests/model/test_support.py derives the list from vLLM's source and fails when it moves (vLLM 0.32).
WITHOUT_QUANT_CONFIG: dict[str, tuple[str, ...]] = {
    "bailing_moe": ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    "jamba": ("JambaForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2_moe": ("Lfm2MoeForCausalLM",),
    "plamo3": ("Plamo3ForCausalLM",),
    "sarvam_moe": ("SarvamMoEForCausalLM",),
    "step3_text": ("Step3TextForCausalLM",),
    "zamba2": ("Zamba2ForCausalLM",),
}
# vLLM serves their latent attention by its plain one, with a cache of whole keys and values.
_WHOLE_KEYS = {"minicpm3"}

NO_QUANT_CONFIG_REASON = "vLLM builds its attention without a quantization config, so there is nothing that KV scales could be loaded into"
LATENT_REASON = "uses multi-head latent attention, for which vLLM's own model code loads no scales from any tensor name"
OTHER_CACHE_REASON = "is cached as a latent by transformers and as whole keys and values by vLLM: what can be observed is not what would be scaled"


def is_latent(config: dict[str, Any]) -> bool:
    """Whether a config.json describes multi-head latent attention, of which engines cache the latent."""
    text = config.get("text_config") or config
    return bool(text.get("kv_lora_rank")) and text.get("model_type") not in _WHOLE_KEYS


def unsupported(config: dict[str, Any]) -> str:
    """Why vLLM loads no KV scales for the model of this config.json, with its name in front; "" where it does."""
    text = config.get("text_config") or config
    types = [holder.get("model_type") for holder in (text, config)]
    named = {*(text.get("architectures") or ()), *(config.get("architectures") or ())}
    for model_type, architectures in WITHOUT_QUANT_CONFIG.items():
        if model_type in types or named.intersection(architectures):
            return f"{model_type}: {NO_QUANT_CONFIG_REASON}"
    if text.get("model_type") in _WHOLE_KEYS:
        return f"{text['model_type']} {OTHER_CACHE_REASON}"
    return f"{types[0] or types[1]} {LATENT_REASON}" if is_latent(config) else ""
