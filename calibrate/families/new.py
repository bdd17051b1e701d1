"""`recipes new`: a complete, commented recipe file for a model that the library does not know yet, from its config."""

import json
import math
from dataclasses import dataclass
from typing import Any

import yaml
from transformers import AutoConfig, PreTrainedConfig

from calibrate.errors import UsageError
from calibrate.families.shrink import tiny_fields
from calibrate.families.tiny import tiny_config, tiny_model
from calibrate.model import CacheLayout, probe_layout
from calibrate.model.support import unsupported
from calibrate.recipes import CorpusChoice

_TOKENS = CorpusChoice().samples * CorpusChoice().sequence_length
_LEAST_SAMPLES = 32  # rows are documents or pieces of them: few rows are few documents
_WIDTH = 150


@dataclass(frozen=True)
class NewRecipe:
    """A recipe file to be. `fault` says why its tiny model cannot be built or observed, "" where it can."""

    text: str
    fault: str


def model_config(model: str | None, model_type: str | None) -> PreTrainedConfig:
    """The config of a folder or hub id, or a config class's defaults. No weights are fetched, no code of the model's is run.

    Raises:
        UsageError: neither or both given, no such model, or a type that transformers does not know.
    """
    if (model is None) == (model_type is None):
        raise UsageError("give --model (a folder or a hub id) or --model-type, one of them")
    if model_type is not None:
        return tiny_config(model_type, {})
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:  # hub clients and config classes raise their own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"--model {model}: its config cannot be read: {reason}") from error


def new_recipe(family: str, config: PreTrainedConfig, origin: str) -> NewRecipe:
    """Write the recipe of a family.

    Args:
        config: of the model, in its own size.
        origin: the model's name, for the first lines of the file.
    """
    kind = config.model_type
    fields = _plain(tiny_fields(config.to_dict(), type(config)().to_dict()))
    layout, fault = _probe(kind, fields)
    text = config.get_text_config(decoder=True)
    refusal = unsupported(config.to_dict())
    window = _window(text)
    parts = [
        f"# {family}, from the config of {origin}.",
        f"# kv-calibrate run {origin if '/' in origin else 'MODEL'} --data chats.jsonl",
        f"family: {json.dumps(family)}",
        f"description: {json.dumps(_describe(text, layout))}",
        f"model_types: [{kind}]",
        *(["support: collect-only", f"reason: {json.dumps(refusal)}"] if refusal else []),
        *_corpus(window),
        "# The default; a value that differs deserves a comment that says why.",
        "# scales: {policy: mse, granularity: tensor, margin: 2.0}",
        *(
            [
                "# Layers that vLLM can keep in 16 bits: these keep no more than their window, so FP8 saves little there.",
                "# skip_layers: [sliding_window]",
            ]
            if window
            else []
        ),
        "# engine_notes:",
        '#   - "What whoever serves the model should know."',
        "# traps:",
        '#   - what: "What went wrong in the field."',
        "#     source: https://…",
        "tiny:",
        "  # A random model of a few layers with every mechanism of the family: `recipes check` calibrates it and loads it in vLLM.",
        *_yaml({kind: fields}),
    ]
    return NewRecipe("\n".join(parts) + "\n", fault)


def _probe(kind: str, fields: dict[str, Any]) -> tuple[CacheLayout | None, str]:
    try:
        return probe_layout(tiny_model(tiny_config(kind, fields))), ""
    except UsageError as error:
        return None, str(error)


def _describe(text: PreTrainedConfig, layout: CacheLayout | None) -> str:
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    said = [f"{text.num_hidden_layers} layers"] if getattr(text, "num_hidden_layers", None) else []
    said += [f"{heads} query and {kv_heads} KV heads of {size}"] if heads else []
    if _window(text):
        said.append(f"windows of {_window(text)} tokens")
    if getattr(text, "num_kv_shared_layers", None):
        said.append(f"{text.num_kv_shared_layers} layers read another's cache")
    tiny = len(getattr(layout, "layers", ()))
    if layout is not None and tiny < (_tiny_layers(text, layout) or tiny):
        said.append("not every layer has attention")
    return f"{', '.join(said) or text.model_type}."


def _tiny_layers(text: PreTrainedConfig, layout: CacheLayout) -> int:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    plain = {"full_attention", "sliding_attention", "chunked_attention"}
    return len(layout.layers) + 1 if any(kind not in plain for kind in kinds) else len(layout.layers)


def _window(text: PreTrainedConfig) -> int:
    """Tokens that the sliding-window layers keep, 0 where there are none."""
    kinds = getattr(text, "layer_types", None)
    if kinds and not any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds):
        return 0
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    found = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "attention_window_size"))
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _corpus(window: int) -> list[str]:
    if window < CorpusChoice().sequence_length:
        return []
    length = 2 ** math.ceil(math.log2(2 * window))
    return [
        "corpus:",
        f"  # Longer than the window of {window} tokens, so that the sliding layers are seen in their steady state.",
        f"  sequence_length: {length}",
        f"  samples: {max(_LEAST_SAMPLES, _TOKENS // length)}",
    ]


def _plain(value: Any) -> Any:
    """Only what YAML has: tuples become lists, types and the like their names."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _yaml(value: dict[str, Any]) -> list[str]:
    dumped = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=_WIDTH - 38)
    return [f"  {line}" for line in dumped.splitlines()]
