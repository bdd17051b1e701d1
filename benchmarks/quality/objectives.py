"""Scales by the error of attention's output after the output projection, computed as FP8 kernels do: a hook of run.py.

`--hook benchmarks/quality/objectives.py`. Keys, values and queries of some rows of the calibration text are kept whole, layer by layer; every scale
is then chosen from one octave above 2·amax/448, per tensor or per KV head, in turns over k, q and v. The best of most rows on FLASH_ATTN, and too
dear for the default (docs/scale-quality.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from benchmarks.quality.rows import KINDS, Material
from calibrate.collect.watch import observe
from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.model import AttentionLayer, SourceCheckpoint, load_model, load_tokenizer, probe_layout
from calibrate.scales import FORMATS, LayerScales, Scales

ROWS, LENGTH, STEPS, SWEEPS = 4, 1024, 16, 2
# Written before the first run: 1 to 2% below mse, since it alone knows which tokens are looked at.
_FORMAT = FORMATS["e4m3"]


@dataclass(frozen=True)
class Layer:
    """One layer's tensors, float32: k, v [rows, kv_heads, seq, dim], q [rows, kv_heads, group, seq, dim]; `output` [hidden, kv_heads, group, dim]."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    output: torch.Tensor
    scaling: float
    window: int | None


def rows(material: Material) -> dict[str, Scales]:
    """The hook: the scales by name."""
    chosen: list[LayerScales] = []
    like = material.solved()
    for scales, layer in zip(like.layers, layers_of(material), strict=True):
        groups = [slice(None)] if len(scales.k) == 1 else [slice(head, head + 1) for head in range(layer.k.shape[1])]
        parts = [_part(layer, group) for group in groups]
        found = [_attention_output(part) for part in parts]
        arrays = {kind: np.array([each[kind] for each in found], np.float32) for kind in KINDS}
        arrays["q"] = np.repeat(arrays["q"], len(scales.q) // len(arrays["q"]))
        chosen.append(LayerScales(scales.index, scales.module, *(arrays[kind] for kind in ("k", "v", "q"))))
    return {"attention output": replace(like, layers=tuple(chosen))}


def layers_of(material: Material) -> Iterator[Layer]:
    """Run the rows through the model as it is and give what each layer saw."""
    source = SourceCheckpoint.open(material.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(source, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    layout = probe_layout(model)
    options = CorpusOptions(samples=8 * ROWS, sequence_length=LENGTH)
    corpus = load_corpus(options, load_tokenizer(source), vocab_size=source.vocab_size, context_length=source.context_length)
    longest = sorted((sample.tokens for sample in corpus.samples), key=len, reverse=True)[:ROWS]
    kept: dict[tuple[int, str], torch.Tensor] = {}
    tokens = torch.from_numpy(np.stack([row[: len(longest[-1])] for row in longest])).long()
    observe(model, layout, tokens.to(device), lambda index, kind, values: kept.__setitem__((index, kind), values.to(torch.bfloat16)))
    for layer in layout.layers:
        yield _layer(model.get_submodule(layer.module), layer, {kind: kept[layer.index, kind].float() for kind in KINDS})


def _layer(module: nn.Module, layer: AttentionLayer, seen: dict[str, torch.Tensor]) -> Layer:
    heads = layer.num_key_value_heads
    output = module.o_proj.weight.float().unflatten(1, (heads, -1, layer.value_head_dim))
    scaling = getattr(module, "scaling", None) or layer.head_dim**-0.5
    return Layer(seen["k"], seen["v"], seen["q"].unflatten(1, (heads, -1)), output, scaling, layer.sliding_window)


def _part(layer: Layer, heads: slice) -> Layer:
    return replace(layer, k=layer.k[:, heads], v=layer.v[:, heads], q=layer.q[:, heads], output=layer.output[:, heads])


def grid(values: torch.Tensor) -> list[float]:
    """Candidates: bfloat16 numbers in the octave from 2·amax/448 on."""
    floor = 2 * float(values.abs().max()) / _FORMAT.max
    return [float(torch.tensor(floor * 2 ** (step / STEPS)).to(torch.bfloat16)) for step in range(STEPS)]


def stored(values: torch.Tensor, scale: float) -> torch.Tensor:
    """What FP8 keeps of values at a scale."""
    return _FORMAT.round_trip(values / scale) * scale


def _least(values: torch.Tensor, error: Callable[[torch.Tensor], torch.Tensor]) -> float:
    candidates = grid(values)
    return candidates[int(torch.stack([error(stored(values, scale) - values) for scale in candidates]).argmin())]


def _weighted(layer: Layer) -> dict[str, float]:
    """Where the search begins: K's error by E[q²] of its channel, Q's by Var(k), V's by the squared norm of the output projection's columns.

    Of K's error the variance over tokens: softmax does not see what moves all logits alike.
    """
    of_key = layer.q.square().mean(dim=(0, 2, 3))  # [kv_heads, head_dim]
    spread = layer.k.var(dim=2, unbiased=False).mean(dim=0)
    of_value = layer.output.square().sum(dim=(0, 2))  # [kv_heads, dim]

    return {
        "k": _least(layer.k, lambda wrong: (wrong.var(dim=2, unbiased=False).mean(dim=0) * of_key).sum()),
        "v": _least(layer.v, lambda wrong: (wrong.square().mean(dim=(0, 2)) * of_value).sum()),
        "q": _least(layer.q, lambda wrong: (wrong.square().mean(dim=(0, 2, 3)) * spread).sum()),
    }


def _attention_output(layer: Layer) -> dict[str, float]:
    """Coordinate descent over k, q and v from `_weighted`'s scales."""
    gram = torch.einsum("ohgd,ohge->hgde", layer.output, layer.output)
    right = _attend(layer.q, layer.k, layer.v, layer, fp8=False)
    chosen = _weighted(layer)
    tensors = {"k": layer.k, "v": layer.v, "q": layer.q}
    kept = {kind: stored(tensors[kind], chosen[kind]) for kind in KINDS}
    for _ in range(SWEEPS):
        for kind in ("k", "q", "v"):
            errors = []
            candidates = grid(tensors[kind])
            for scale in candidates:
                given = kept | {kind: stored(tensors[kind], scale)}
                wrong = _attend(given["q"], given["k"], given["v"], layer, fp8=True) - right
                errors.append(torch.einsum("rhgsd,hgde,rhgse->", wrong, gram, wrong))
            chosen[kind] = candidates[int(torch.stack(errors).argmin())]
            kept[kind] = stored(tensors[kind], chosen[kind])
    return chosen


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer, *, fp8: bool) -> torch.Tensor:
    """Causal attention, [rows, kv_heads, group, seq, dim]; with `fp8` the weights are stored as FlashAttention 3 does, 256 for a row's largest."""
    place = torch.arange(key.shape[2], device=key.device)
    hidden = place[None, :] > place[:, None]
    if layer.window:
        hidden = hidden | (place[:, None] - place[None, :] >= layer.window)
    outputs = []
    for row in range(len(key)):  # one at a time: [heads, seq, seq] is all that is held
        scores = (query[row] @ key[row][:, None].transpose(-1, -2)) * layer.scaling
        weights = torch.exp(scores.masked_fill_(hidden, -torch.inf) - scores.amax(dim=-1, keepdim=True))
        total = weights.sum(dim=-1, keepdim=True)
        if fp8:
            weights = _FORMAT.round_trip(weights * 256) / 256
        outputs.append((weights @ value[row][:, None]) / total)
    return torch.stack(outputs)
