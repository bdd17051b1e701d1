"""`CacheLayout`: which layers of a model write a KV cache, what they write, and who reads it. Found by watching one tiny forward."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.errors import CalibrateError, UsageError
from calibrate.model.attention import watched_attention
from calibrate.model.cache import PassingCache, query_in, writing_frame

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        index: its index in the KV cache (`layer_idx`).
        module: path of the attention module in the model, "model.layers.0.self_attn".
        target: index of the layer whose K and V it reads; its own index where it writes them itself.
        num_heads: query heads. num_key_value_heads: cached heads (1 for MLA latents).
        head_dim: channels of a cached key. value_head_dim: channels of a cached value.
        sliding_window: tokens it keeps, None for all.
        latent: True for multi-head latent attention: "key" is the compressed latent, "value" the rotary key, both in one cache line.
        query_from: "interface", or "frame" for attention classes that do not use transformers' attention interface.
    """

    index: int
    module: str
    target: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None = None
    latent: bool = False
    query_from: str = "interface"

    @property
    def writes(self) -> bool:
        return self.target == self.index

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is observed here: "k", "v", "q"; only "q" for a layer that reads another's cache."""
        return ("k", "v", "q") if self.writes else ("q",)


@dataclass(frozen=True)
class CacheLayout:
    """The attention layers of a model in the order in which they run."""

    model_type: str
    layers: tuple[AttentionLayer, ...]

    def __getitem__(self, index: int) -> AttentionLayer:
        return next(layer for layer in self.layers if layer.index == index)

    def as_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "layers": [asdict(layer) for layer in self.layers]}


class _Probe:
    """Watches one forward and notes who wrote what, and whose keys each attention call used."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.written: dict[int, dict[str, Any]] = {}
        self.called: list[dict[str, Any]] = []

    def name(self, module: nn.Module, index: int) -> str:
        """Path of the module in the model. Raises UsageError where it is no part of it: nothing could be said of such a layer by name."""
        if module not in self.names:
            raise UsageError(
                f"layer {index} is computed by a {type(module).__name__} that the model makes while it runs: it has no name to write under"
            )
        return self.names[module]

    def on_update(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        found = writing_frame(sys._getframe(2))
        if found is None:
            raise UsageError(f"cache layer {index} is written by code that is no torch module: this model cannot be observed")
        frame, module = found
        self.written[index] = {"module": module, "key": key, "value": value, "query": query_in(frame, key)}

    def on_attention(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
        self.called.append({"module": module, "query": query, "key": key})


def probe_layout(model: PreTrainedModel) -> CacheLayout:
    """Run eight tokens through the model and describe its cache.

    Raises:
        UsageError: nothing was written (no causal LM with a KV cache), or a layer's Q cannot be observed.
    """
    config = model.config.get_text_config(decoder=True)
    probe = _Probe(model)
    tokens = torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0) % config.vocab_size
    try:
        cache = PassingCache(config, probe.on_update)
        with torch.inference_mode(), watched_attention(model, probe.on_attention):
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
    except CalibrateError:
        raise
    except Exception as error:  # from the model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where = model.name_or_path or type(model).__name__
        raise UsageError(f"{where} cannot run {_PROBE_TOKENS} tokens with its config: {reason}") from error
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    if not probe.written:
        raise UsageError(f"{type(model).__name__} wrote nothing to a KV cache: it is no decoder with attention layers")
    latent_rank = getattr(config, "kv_lora_rank", None)

    def describe(index: int, target: int, module: nn.Module, query: torch.Tensor, query_from: str) -> AttentionLayer:
        key, value = probe.written[target]["key"], probe.written[target]["value"]
        return AttentionLayer(
            index=index,
            module=probe.name(module, index),
            target=target,
            num_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            head_dim=key.shape[-1],
            value_head_dim=value.shape[-1],
            sliding_window=windows[target] if target < len(windows) else None,
            latent=bool(latent_rank) and key.shape[1] == 1 and key.shape[-1] == latent_rank,
            query_from=query_from,
        )

    layers = _interface_layers(probe, describe)
    layers += _frame_layers(probe, describe, {layer.index for layer in layers})
    _check_complete(probe, layers)
    return CacheLayout(model.config.model_type, tuple(layers))


def _interface_layers(probe: _Probe, describe: Callable[..., AttentionLayer]) -> list[AttentionLayer]:
    writers = {written["module"]: index for index, written in probe.written.items()}
    storages = {written["key"].data_ptr(): index for index, written in probe.written.items()}
    layers = []
    for call in probe.called:
        module, key = call["module"], call["key"]
        if module in writers:
            index = target = writers[module]
        elif key.data_ptr() in storages:  # a KV-shared reader was given the very tensor that its target wrote
            index, target = module.layer_idx, storages[key.data_ptr()]
        else:
            continue  # attention outside the language model's cache
        layers.append(describe(index, target, module, call["query"], "interface"))
    return layers


def _frame_layers(probe: _Probe, describe: Callable[..., AttentionLayer], seen: set[int]) -> list[AttentionLayer]:
    return [
        describe(index, index, written["module"], written["query"], "frame")
        for index, written in probe.written.items()
        if index not in seen and written["query"] is not None
    ]


def _check_complete(probe: _Probe, layers: list[AttentionLayer]) -> None:
    lost = set(probe.written) - {layer.index for layer in layers}
    if lost:
        index = min(lost)
        name = probe.name(probe.written[index]["module"], index)
        raise UsageError(f"layer {index} ({name}) writes a cache, but its Q is handed to no attention interface and cannot be observed")
