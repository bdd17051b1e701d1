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
from calibrate.model import probe_layout
from calibrate.model.support import unsupported
from calibrate.recipes import CorpusChoice

_TOKENS = CorpusChoice().samples * CorpusChoice().sequence_length
_LEAST_SAMPLES = 32  # rows are documents or pieces of them: few rows are few documents
_WIDTH = 150
_SKIP = (
    "# Layers that vLLM can keep in 16 bits: these hold no more than their window, so FP8 saves little there.",
    "# skip_layers: [sliding_window]",
)


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
        return AutoConfig.from_pretrained(model, trust_remote_code=False)  # not None, with which it would ask
    except Exception as error:  # hub clients and config classes raise their own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"--model {model}: its config cannot be read: {reason}") from error


def new_recipe(family: str, config: PreTrainedConfig, origin: str) -> NewRecipe:
    """Write the recipe of a family.

    Args:
        config: of the model, in its own size.
        origin: the model's name, for the first lines of the file.

    Raises:
        UsageError: a family whose name is none.
    """
    if not family.strip() or "/" in family:
        raise UsageError(f"a recipe is not called {family!r}: give a name, which is no path")
    origin = " ".join(origin.split())  # it stands in comments
    kind = config.model_type
    fields = _plain(tiny_fields(config.to_dict(), type(config)().to_dict()))
    everywhere, fault = _probe(kind, fields)
    text = config.get_text_config(decoder=True).to_dict()
    refusal = unsupported(config.to_dict())
    window = _window(text)
    parts = [
        f"# {' '.join(family.split())}, from the config of {origin}.",
        f"# kv-calibrate run {origin if '/' in origin else 'MODEL'} --data chats.jsonl",
        f"family: {_quoted(family)}",
        f"description: {_quoted(_describe(text, everywhere))}",
        f"model_types: [{kind}]",
        *(["support: collect-only", f"reason: {_quoted(refusal)}"] if refusal else []),
        *_corpus(window),
        "# The default; a value that differs deserves a comment that says why.",
        "# scales: {policy: mse, granularity: tensor, margin: 2.0}",
        *(_SKIP if window else ()),
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


def _probe(kind: str, fields: dict[str, Any]) -> tuple[bool, str]:
    """Whether every layer of the tiny model has attention, and why it cannot be built or observed."""
    try:
        model = tiny_model(tiny_config(kind, fields))
        return len(probe_layout(model).layers) == model.config.get_text_config(decoder=True).num_hidden_layers, ""
    except UsageError as error:
        return True, str(error)


def _describe(text: dict[str, Any], everywhere: bool) -> str:
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    said = [f"{layers} layers"] if layers else []
    if heads and text.get("hidden_size"):
        size = text.get("head_dim") or text["hidden_size"] // heads
        said.append(f"{heads} query and {text.get('num_key_value_heads') or heads} KV heads of {size}")
    said += [f"windows of {_window(text)} tokens"] if _window(text) else []
    said += [f"{text['num_kv_shared_layers']} layers read another's cache"] if text.get("num_kv_shared_layers") else []
    said += [] if everywhere else ["not every layer has attention"]
    return f"{', '.join(said) or text['model_type']}."


def _window(text: dict[str, Any]) -> int:
    """Tokens that the sliding-window layers keep, 0 where there are none."""
    kinds = text.get("layer_types")
    if text.get("use_sliding_window") is False or (kinds and not any("sliding" in kind or "chunked" in kind for kind in kinds)):
        return 0
    found = (text.get(name) for name in ("sliding_window", "attention_chunk_size", "attention_window_size"))
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


def _quoted(text: str) -> str:
    """As YAML reads it: JSON's escapes, but no pairs of them for one character."""
    return json.dumps(text, ensure_ascii=False)


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
