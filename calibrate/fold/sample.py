"""Some keys, values and queries of every layer, as attention sees them: what a fold is chosen on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from calibrate.collect.watch import observe
from calibrate.corpus import Corpus
from calibrate.model import CacheLayout

ROW_TOKENS = 8192  # of these rows are run
TOKENS = 2048  # and of their tokens these are kept, evenly spaced


@dataclass
class LayerSample:
    """What was kept of one layer.

    Attributes:
        k, v: bfloat16 or float16 [kv_heads, tokens, channels]. q: the same, of all heads that read a KV head, [kv_heads, about tokens, head_dim].
        mass: Σp² over the queries that saw each token, mean over the heads of a group, float32 [kv_heads, tokens]; None where it was not asked for.
            Independent errors of values reach attention's output with these weights.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    mass: torch.Tensor | None


def chosen_rows(corpus: Corpus) -> list[torch.Tensor]:
    """Rows spread over the corpus, about `ROW_TOKENS` tokens together: int64 [length] each."""
    total = sum(len(sample.tokens) for sample in corpus.samples)
    step = max(1, total // ROW_TOKENS)
    return [torch.from_numpy(sample.tokens).long() for sample in corpus.samples[::step]]


def take_samples(
    model: PreTrainedModel, layout: CacheLayout, rows: Sequence[torch.Tensor], cache_dtype: torch.dtype, *, masses: bool
) -> dict[int, LayerSample]:
    """Run the rows and keep some tokens of each layer, rounded to the cache's type, on the model's device."""
    stride = max(1, sum(len(row) for row in rows) // TOKENS)
    kept: dict[tuple[int, str], list[torch.Tensor]] = {}
    latest: dict[str, torch.Tensor] = {}

    def see(index: int, kind: str, values: torch.Tensor) -> None:
        layer = layout[index]
        heads = values[0]  # [heads, seq, channels]
        latest[kind] = heads
        part = heads[:, ::stride].to(cache_dtype)
        if kind == "q":
            grouped = heads.to(cache_dtype).unflatten(0, (layer.num_key_value_heads, -1)).flatten(1, 2)  # [kv_heads, group * seq, head_dim]
            part = grouped[:, :: stride * (layer.num_heads // layer.num_key_value_heads) + 1]
            if masses:
                scaling = getattr(model.get_submodule(layer.module), "scaling", None) or layer.head_dim**-0.5
                mass = _mass(heads, latest["k"], scaling, layer.sliding_window)
                kept.setdefault((index, "mass"), []).append(mass[:, ::stride])
        kept.setdefault((index, kind), []).append(part.clone())

    for row in rows:
        observe(model, layout, row[None].to(model.device), see)

    def whole(index: int, kind: str) -> torch.Tensor:
        return torch.cat(kept[index, kind], dim=1)

    return {
        layer.index: LayerSample(*(whole(layer.index, kind) for kind in "kvq"), mass=whole(layer.index, "mass") if masses else None)
        for layer in layout.layers
    }


def _mass(query: torch.Tensor, key: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
    """Σ over queries of the squared attention weight of each key, mean over a group's heads: float32 [kv_heads, seq]."""
    seq = key.shape[1]
    place = torch.arange(seq, device=key.device)
    hidden = place[None, :] > place[:, None]
    if window:
        hidden |= place[:, None] - place[None, :] >= window
    mass = torch.zeros((len(key), seq), device=key.device)
    group = len(query) // len(key)
    for head, rows in enumerate(query):  # one head at a time: [seq, seq] is all that is held
        scores = (rows.float() @ key[head // group].float().T) * scaling
        mass[head // group] += scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1).square_().sum(dim=0)
    return mass / group
