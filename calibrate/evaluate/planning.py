"""Memory planning: what the KV cache of a model costs in each format, and how many sequences fit beside the weights. Needs no weights."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from calibrate.engines.serving import serving
from calibrate.errors import UsageError
from calibrate.evaluate.kvformats import FORMATS, SIXTEEN_BIT, CachedLayer, stored_in
from calibrate.evaluate.weightbytes import weight_bytes
from calibrate.model.cache import PassingCache
from calibrate.model.load import auto_class
from calibrate.model.skip import SkipLayers, skipped_layers
from calibrate.model.source import context_length_of

SCHEMA = "kv-calibrate/plan/1"
_PROBE_TOKENS = 8
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class ModelMemory:
    """What a model keeps on one rank.

    Attributes:
        layers: those that write a cache. readers: attention layers that read another's, at no cost.
        sixteen_bit: indices of the layers that keep 16 bits in every format.
        state_bytes: of recurrent and convolution states, a sequence, whatever its length. weight_bytes: on one rank.
        weights_from: "safetensors headers" or "config.json".
    """

    model_type: str
    layers: tuple[CachedLayer, ...]
    readers: int
    state_bytes: int
    weight_bytes: int
    weights_from: str
    longest_context: int | None
    sixteen_bit: tuple[int, ...] = ()

    @property
    def depth(self) -> int | None:
        """Number of layers, None for hybrids."""
        return None if self.state_bytes else len(self.layers) + self.readers


@dataclass(frozen=True)
class FormatPlan:
    """One format on one rank.

    Attributes:
        first_token_bytes: of a token in all layers. token_bytes: of a further token, in the layers that still grow at this context.
        sequence_bytes: one sequence of the whole context. sequences: how many fit. compression: of a sequence, against 16 bits.
        longest_single: tokens of the longest sequence that fits alone, at most the model's own limit.
    """

    name: str
    first_token_bytes: float
    token_bytes: float
    sequence_bytes: float
    sequences: int
    compression: float
    longest_single: int
    note: str


@dataclass(frozen=True)
class Plan:
    model: str
    memory: ModelMemory
    context: int
    gpu_memory: int
    utilization: float
    reserve: int
    tensor_parallel_size: int
    cache_bytes: int  # left for the cache on one rank
    formats: tuple[FormatPlan, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def parse_size(text: str) -> int:
    """`80GiB`, `24 GB`, `1.5TiB` or plain bytes. Raises UsageError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if found is None else _UNITS.get(found[2].upper())
    if unit is None or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is no memory size: write it as 80GiB or 24GB")
    return round(float(found[1]) * unit)


def model_memory(model: Path, tensor_parallel_size: int = 1, *, skip_layers: SkipLayers | None = None) -> ModelMemory:
    """Read a checkpoint folder, a folder with nothing but config.json, or a config.json. One forward on torch's meta device shows what is cached.

    Args:
        skip_layers: layers that are to keep 16 bits; None takes those of the checkpoint's serve.json.

    Raises:
        UsageError: `skip_layers` that the model lacks, no config, an unknown architecture, or a model that writes no KV cache.
    """
    folder = model.parent if model.is_file() else model
    config = _read_config(folder)
    text = config.get_text_config(decoder=True)
    network = _on_meta(config, folder)
    keys: dict[int, CachedLayer] = {}
    latent_rank = getattr(text, "kv_lora_rank", None)

    def on_update(index: int, key: torch.Tensor, value: torch.Tensor) -> None:  # [batch, kv_heads, seq, dim] each
        keys[index] = _layer(index, key, value, latent_rank, getattr(text, "qk_rope_head_dim", 0), tensor_parallel_size)

    cache = PassingCache(text, on_update)
    try:
        with torch.inference_mode():
            network(input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}: {type(network).__name__} cannot be run without its weights: {str(error).splitlines()[0]}") from error
    if not keys:
        raise UsageError(f"{folder}: {type(network).__name__} writes no KV cache")
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    layers = tuple(_with_window(layer, windows) for _, layer in sorted(keys.items()))
    weights, where = weight_bytes(folder, network)
    asked = serving(folder).kv_cache_dtype_skip_layers if skip_layers is None else skip_layers
    known = [{"index": layer.index, "target": layer.index, "sliding_window": layer.window} for layer in layers]
    # a checkpoint's list names readers too, which cost nothing
    asked = asked if skip_layers is not None else [index for index in asked if index in keys]
    return ModelMemory(
        model_type=config.model_type,
        layers=layers,
        readers=getattr(text, "num_kv_shared_layers", 0) or 0,
        state_bytes=sum(_tensor_bytes(layer) for layer in cache.layers) // tensor_parallel_size,
        weight_bytes=math.ceil(weights / tensor_parallel_size),
        weights_from=where,
        longest_context=context_length_of(text.to_dict()),
        sixteen_bit=skipped_layers(known, asked),
    )


def _read_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise UsageError(f"no config.json in {folder}: give a checkpoint folder, its config.json, or a hub id")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}/config.json cannot be read by transformers: {str(error).strip().splitlines()[0]}") from error


def _on_meta(config: Any, folder: Path) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return auto_class(config.model_type, config.architectures).from_config(config, dtype=torch.bfloat16).eval()
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise UsageError(f"{folder}/config.json describes no causal LM of transformers: {str(error).strip().splitlines()[0]}") from error


def _layer(index: int, key: torch.Tensor, value: torch.Tensor, latent_rank: int | None, rope_dim: int, ranks: int) -> CachedLayer:
    if latent_rank:  # engines cache the latent, also where a transformers version expands it before it caches
        return CachedLayer(index, 1, latent_rank, rope_dim, latent=True)
    return CachedLayer(index, max(1, key.shape[1] // ranks), key.shape[-1], value.shape[-1])


def _with_window(layer: CachedLayer, windows: list[int | None]) -> CachedLayer:
    window = windows[layer.index] if layer.index < len(windows) else None
    return CachedLayer(layer.index, layer.kv_heads, layer.key_dim, layer.value_dim, window, layer.latent)


def _tensor_bytes(cache_layer: Any) -> int:
    """Bytes of the recurrent and convolution states in a layer of transformers' cache."""
    found: list[Any] = []
    for name, value in vars(cache_layer).items():
        if name.endswith("_states"):
            found += value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
    return sum(one.numel() * one.element_size() for one in found if isinstance(one, torch.Tensor))


def cached_tokens(layer: CachedLayer, context: int, block_size: int = 1, in_flight: int | None = None) -> int:
    """Tokens that a layer holds of a sequence of `context` tokens, in whole blocks.

    Args:
        in_flight: tokens of one prefill step. Where given, sliding layers count as vLLM reserves them when it admits a request: the window, a
            step, and a block more since windows start anywhere. None: what a decoding sequence holds.
    """
    if layer.window is None:
        return math.ceil(context / block_size) * block_size
    if in_flight is None:
        return math.ceil(min(context, layer.window) / block_size) * block_size
    return (math.ceil(min(layer.window - 1 + in_flight, context) / block_size) + 1) * block_size


def _sizes(memory: ModelMemory, format_name: str) -> dict[int, float] | None:
    """Layer index → bytes a token; None where the format does not fit the model."""
    sizes = stored_in(FORMATS[format_name], memory.layers, memory.depth)
    wide = {layer.index: layer.sixteen_bit for layer in memory.layers if layer.index in memory.sixteen_bit}
    return None if sizes is None else sizes | wide


def sequence_bytes(memory: ModelMemory, format_name: str, context: int, **counting: Any) -> float | None:
    """Bytes of one sequence's cache and states on a rank (`counting` as for `cached_tokens`); None where the format does not fit the model."""
    fmt = FORMATS[format_name]
    sizes = _sizes(memory, format_name)
    if sizes is None:
        return None
    total = float(memory.state_bytes)
    for layer in memory.layers:
        tokens = cached_tokens(layer, context, **counting)
        wide = min(fmt.sixteen_bit_tokens, tokens)
        total += wide * layer.sixteen_bit + (tokens - wide) * sizes[layer.index]
    return total


def make_plan(
    name: str,
    memory: ModelMemory,
    *,
    gpu_memory: int,
    context: int,
    utilization: float = 0.9,
    reserve: int = 2 << 30,
    tensor_parallel_size: int = 1,
) -> Plan:
    """Every format beside the weights. Raises UsageError where the weights alone do not fit, or the context is longer than the model's."""
    if context < 1 or not 0 < utilization <= 1:
        raise UsageError("the context must be at least 1 token and the utilization within 0 and 1")
    if memory.longest_context and context > memory.longest_context:
        raise UsageError(f"a context of {context:,} tokens is longer than the model's {memory.longest_context:,}")
    left = math.floor(gpu_memory * utilization) - memory.weight_bytes - reserve
    if left <= 0:
        need = (memory.weight_bytes + reserve) / utilization / (1 << 30)
        raise UsageError(
            f"weights and reserve need {need:.1f} GiB of GPU memory on each rank, {gpu_memory / (1 << 30):.1f} GiB are there: "
            "more memory, a larger --tensor-parallel-size or quantized weights"
        )
    plans = [plan for fmt in FORMATS if (plan := _format_plan(fmt, memory, context, left)) is not None]
    return Plan(
        name, memory, context, gpu_memory, utilization, reserve, tensor_parallel_size, left, tuple(plans), _notes(memory, tensor_parallel_size)
    )


def _format_plan(name: str, memory: ModelMemory, context: int, left: int) -> FormatPlan | None:
    size = sequence_bytes(memory, name, context)
    sizes = _sizes(memory, name)
    if size is None or sizes is None:
        return None
    growing = sum(sizes[layer.index] for layer in memory.layers if layer.window is None or layer.window > context)
    sixteen = sequence_bytes(memory, SIXTEEN_BIT, context)
    longest = _longest(lambda tokens: sequence_bytes(memory, name, tokens) <= left, memory.longest_context or 1 << 24)
    return FormatPlan(name, sum(sizes.values()), growing, size, int(left // size), sixteen / size, longest, FORMATS[name].note)


def _longest(fits: Callable[[int], bool], most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _notes(memory: ModelMemory, ranks: int) -> tuple[str, ...]:
    sliding = sum(layer.window is not None for layer in memory.layers)
    notes = []
    if memory.readers:
        notes.append(f"{memory.readers} layers read another layer's cache and cost nothing")
    if memory.sixteen_bit:
        notes.append(
            f"layers {', '.join(map(str, memory.sixteen_bit))} keep 16 bits in every format; vLLM pads their pages to the others' or the other way "
            "round, which is not counted"
        )
    if sliding:
        notes.append(
            f"{sliding} of {len(memory.layers)} layers slide and stop growing at their window; vLLM reserves a prefill step more to admit a request"
        )
    if any(layer.latent for layer in memory.layers):
        notes.append("multi-head latent attention: one line a token and layer, the same on every rank")
    if memory.state_bytes:
        notes.append(f"recurrent states: {memory.state_bytes:,} bytes a sequence whatever its length, in no KV format; counted beside the cache")
    if ranks > 1 and not memory.layers[0].latent:
        notes.append("bytes are for one rank: KV heads are split over ranks, and repeated where there are more ranks than heads")
    if memory.weights_from.startswith("config"):
        notes.append("weights counted from config.json in 16 bits: there are no weight files")
    return tuple(notes)
