"""Rotary positions taken off keys and put back: channels i and i + head_dim/2 are a complex number that turns with the position."""

import sys

import numpy as np
import torch
from transformers import PreTrainedModel

from calibrate.errors import UsageError
from calibrate.lowbit.base import Start
from calibrate.model import CacheLayout

_MOVING = ("dynamic", "longrope")  # their frequencies depend on the length of the text


def as_complex(keys: torch.Tensor) -> torch.Tensor:
    """[..., dim] → complex64 [..., dim/2]."""
    half = keys.shape[-1] // 2
    return torch.complex(keys[..., :half], keys[..., half:])


def as_real(pairs: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def turns(frequencies: np.ndarray, start: Start, tokens: int, device: torch.device) -> torch.Tensor:
    """e^(i · position · frequency) for `tokens` positions from `start`: complex64 [tokens, dim/2], or [sequences, 1, tokens, dim/2] where each has a
    start of its own. Angles are float64."""
    angles = (start + np.arange(tokens, dtype=np.float64))[..., None] * frequencies
    return torch.from_numpy(np.exp(1j * angles)).to(device=device, dtype=torch.complex64)


def rope_frequencies(model: PreTrainedModel, layout: CacheLayout) -> dict[int, np.ndarray]:
    """For each layer that writes a cache the radians a position of its channel pairs, float64 [head_dim/2].

    Raises:
        UsageError: the model's positions are not rotary, turn other pairs than (i, i + head_dim/2), turn only some channels, or turn at a speed that
            depends on the text's length.
    """
    config = model.config.get_text_config(decoder=True)
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "vision" not in name}
    found = {}
    for layer in layout.layers:
        if not layer.writes:
            continue
        kinds = getattr(config, "layer_types", None)
        frequencies = buffers.get("inv_freq", buffers.get(f"{kinds[layer.index]}_inv_freq") if kinds else None)
        if frequencies is None or layer.latent or 2 * len(frequencies) != layer.head_dim or not _turns_halves(model, layer.module):
            raise UsageError(
                f"{layer.module} does not turn channels i and i + {layer.head_dim // 2} of a whole head: codebooks that commute with RoPE need that"
            )
        found[layer.index] = frequencies.to(torch.float64).cpu().numpy()
    parameters = getattr(config, "rope_parameters", None) or {}
    types = {parameters.get("rope_type"), *(each.get("rope_type") for each in parameters.values() if isinstance(each, dict))}
    if types & set(_MOVING):
        raise UsageError("the model's rotary frequencies change with the length of the text: keys cannot be turned back")
    return found


def _turns_halves(model: PreTrainedModel, module: str) -> bool:
    """Whether the model's own code turns (i, i + half) rather than neighbours."""
    rotate_half = getattr(sys.modules[type(model.get_submodule(module)).__module__], "rotate_half", None)
    return rotate_half is not None and rotate_half(torch.arange(4.0)).tolist() == [-2.0, -3.0, 0.0, 1.0]
