"""A model whose decoder layers stay on disk: one of them at a time is read from the checkpoint's shards, the next one meanwhile."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module
from accelerate.utils import named_module_tensors, offload, set_module_tensor_to_device
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, modeling_utils
from transformers.integrations import accelerate as accelerate_integration

from calibrate.errors import UsageError
from calibrate.model.dequantize import is_compressed
from calibrate.model.layout import CacheLayout
from calibrate.model.load import auto_class, load_model, quiet_transformers
from calibrate.model.source import SourceCheckpoint

_WHOLE = "--streaming never loads it whole"


@dataclass(frozen=True)
class Skeleton:
    """A model's parts before a weight is read.

    Attributes:
        layers: name of its list of decoder layers, "model.layers".
        layer_bytes: size of each in the compute type. rest_bytes: of all else that stays in memory (embeddings, norms).
        head_bytes: of an output head of its own, which is on disk.
        hidden_size: width of what goes from layer to layer.
        placement: module name → "disk" for layers and an output head of its own, "cpu" for the rest.
    """

    layers: str
    layer_bytes: tuple[int, ...]
    rest_bytes: int
    head_bytes: int
    hidden_size: int
    placement: dict[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(self.layer_bytes) + self.rest_bytes + self.head_bytes


def skeleton(source: SourceCheckpoint, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Skeleton:
    """Build the model without memory for its weights and look at its parts.

    Raises:
        UsageError: it cannot be streamed; the message says why.
    """
    if is_compressed(source):
        raise UsageError(f"{source.path} has quantized weights, which are not streamed layer by layer; {_WHOLE}")
    if source.text_config.get("num_kv_shared_layers"):
        raise UsageError(f"{source.path} cannot be streamed layer by layer: its later layers read the keys and values of earlier ones; {_WHOLE}")
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    auto = auto_class(source.model_type, source.config.get("architectures"))
    with quiet_transformers(), torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers]
    if not lists or auto is AutoModelForImageTextToText:
        raise UsageError(f"{source.path} ({source.model_type}) has no single list of decoder layers: it cannot be streamed layer by layer; {_WHOLE}")
    return _measure(model, lists[0], text.hidden_size)


def _measure(model: PreTrainedModel, layers: str, hidden_size: int) -> Skeleton:
    sizes, rest, own_head, placement = [0] * len(model.get_submodule(layers)), 0, 0, {}
    head = model.get_output_embeddings()
    tied = head is not None and model.config.get_text_config(decoder=True).tie_word_embeddings
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        owner = name.rpartition(".")[0]
        if name.startswith(f"{layers}."):
            number = name.removeprefix(f"{layers}.").split(".")[0]
            placement[f"{layers}.{number}"] = "disk"
            sizes[int(number)] += tensor.nbytes
        elif not tied and head is not None and model.get_submodule(owner) is head:
            placement[owner] = "disk"
            own_head += tensor.nbytes
        else:
            placement[owner] = "cpu"
            rest += 0 if tied and model.get_submodule(owner) is head else tensor.nbytes
    return Skeleton(layers, tuple(sizes), rest, own_head, hidden_size, placement)


@contextmanager
def weights_read() -> Iterator[None]:
    """While it lasts, weights on disk are read into memory of their own when they are used, by transformers and accelerate too.

    They would map whole shards, privately, all of them at once to begin with: memory that they never fill, but that counts in full where a
    process's memory is limited (`ulimit -d`, `ulimit -v`) or the system promises no more than it has.
    """

    def opened(file: str, framework: str, device: Any = "cpu", **_: Any) -> Any:
        return safe_open(file, framework=framework, device=device, backend="pread")

    places = (modeling_utils, accelerate_integration, offload)
    before = [place.safe_open for place in places]
    for place in places:
        place.safe_open = opened
    try:
        yield
    finally:
        for place, function in zip(places, before, strict=True):
            place.safe_open = function


def load_streamed(source: SourceCheckpoint, parts: Skeleton, folder: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model with its decoder layers on disk: it runs whole, reading every weight whenever it is used.

    transformers and accelerate do this, renamed and merged tensors included; merged ones (experts) are kept in `folder`. Within `weights_read`
    no file is mapped.
    """
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of what is wanted here
    return load_model(source, device="cpu", dtype=dtype, trust_remote_code=trust_remote_code, placement=parts.placement, offload_folder=folder)


class LayerStream:
    """Brings decoder layers into memory one after the other. From its making on the model no longer reads weights by itself.

    To be used within `weights_read`: mapped pages would be read when the layer computes, by the thread that waits for it.
    """

    def __init__(self, model: PreTrainedModel, layers: str) -> None:
        self.layers = list(model.get_submodule(layers))
        self._places = [_offloaded(layer) for layer in self.layers]
        for layer in self.layers:
            remove_hook_from_module(layer, recurse=True)

    def each(self, first: int, last: int) -> Iterator[int]:
        """Number of each layer from `first` to `last` while its weights are in memory; the next one's are read in a thread."""
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._read, first)
            for number in range(first, last + 1):
                weights = ahead.result()
                ahead = reader.submit(self._read, number + 1) if number < last else None
                for (module, name, _), value in zip(self._places[number], weights, strict=True):
                    set_module_tensor_to_device(module, name, "cpu", value=value)
                del weights, value
                yield number
                for module, name, _ in self._places[number]:
                    set_module_tensor_to_device(module, name, "meta")

    def _read(self, number: int) -> list[torch.Tensor]:
        return [weights[name] for _, name, weights in self._places[number]]


def _offloaded(layer: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """(module, tensor name, where accelerate finds it by that name) of every tensor of a layer that is on disk."""
    found = []
    for module in layer.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
            if isinstance(one, AlignDevicesHook) and one.offload:
                names = named_module_tensors(module, include_buffers=one.offload_buffers, recurse=one.place_submodules, remove_non_persistent=True)
                found += [(module, name, one.weights_map) for name, _ in names]
    return found


def check_chain(model: PreTrainedModel, layout: CacheLayout, layers: str) -> list[int | None]:
    """Run a few tokens and see that each decoder layer takes what the one before it gives, and nothing else from there.

    Returns:
        Length of the tuple that each layer returns, None where it returns the hidden state itself.

    Raises:
        UsageError: it is not so, or layers read the cache of others.
    """
    taken: list[torch.Tensor] = []
    given: list[Any] = []
    handles = []
    for layer in model.get_submodule(layers):
        handles.append(layer.register_forward_pre_hook(lambda _, args, kwargs: taken.append(hidden_of(args, kwargs)), with_kwargs=True))
        handles.append(layer.register_forward_hook(lambda _, args, output: given.append(output)))
    try:
        with torch.inference_mode():
            model.base_model(input_ids=torch.arange(8).unsqueeze(0) % model.config.get_text_config(decoder=True).vocab_size, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    why = ""
    if any(not layer.writes for layer in layout.layers):
        why = "its later layers read the keys and values of earlier ones"
    elif outside := [layer.module for layer in layout.layers if not layer.module.startswith(f"{layers}.")]:
        why = f"{outside[0]} is not in {layers}"
    elif len(taken) != len(model.get_submodule(layers)):
        why = f"of {layers} {len(taken)} ran"
    elif any(isinstance(output, tuple) and any(isinstance(part, torch.Tensor) for part in output[1:]) for output in given):
        why = "a layer hands on more than its hidden state"
    elif not all(_equal(first_of(output), hidden) for output, hidden in zip(given, taken[1:], strict=False)):
        why = "something is computed between its layers"
    if why:
        raise UsageError(f"{type(model).__name__} cannot be streamed layer by layer: {why}; {_WHOLE}")
    return [len(output) if isinstance(output, tuple) else None for output in given]


def hidden_of(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden state among a decoder layer's arguments: the first, by whatever name."""
    return args[0] if args else kwargs["hidden_states"]


def first_of(output: Any) -> torch.Tensor:
    """The hidden state that a decoder layer returned."""
    return output[0] if isinstance(output, tuple) else output


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit but for NaN, of which observation speaks later and by name."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
