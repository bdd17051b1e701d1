"""Some keys and queries of every layer, as attention sees them: what a fold is chosen on."""

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
        k: bfloat16 or float16 [kv_heads, tokens, head_dim]. q: the same, of all heads that read a KV head, [kv_heads, about tokens, head_dim].
        looked: Σp(1 − p) over the queries that saw each token, mean over the heads of a group, float32 [kv_heads, tokens]: how much of an error of
            its logit reaches the softmax.
    """

    k: torch.Tensor
    q: torch.Tensor
    looked: torch.Tensor

    def halves(self) -> tuple["LayerSample", "LayerSample"]:
        """The first half of the tokens and the second: other rows of the corpus."""
        cut = [getattr(self, name).tensor_split(2, dim=1) for name in ("k", "q", "looked")]
        return LayerSample(*(part[0] for part in cut)), LayerSample(*(part[1] for part in cut))


def chosen_rows(corpus: Corpus) -> list[torch.Tensor]:
    """Rows spread over the corpus, about `ROW_TOKENS` tokens together: int64 [length] each."""
    total = sum(len(sample.tokens) for sample in corpus.samples)
    step = max(1, total // ROW_TOKENS)
    return [torch.from_numpy(sample.tokens).long() for sample in corpus.samples[::step]]


def take_samples(model: PreTrainedModel, layout: CacheLayout, rows: Sequence[torch.Tensor], cache_dtype: torch.dtype) -> dict[int, LayerSample]:
    """Run the rows and keep some tokens of each layer, rounded to the cache's type, on the model's device."""
    stride, offset = -(-sum(len(row) for row in rows) // TOKENS), 0
    kept: dict[tuple[int, str], list[torch.Tensor]] = {}
    latest: dict[str, torch.Tensor] = {}

    def see(index: int, kind: str, values: torch.Tensor) -> None:
        if kind == "v":
            return
        layer, heads = layout[index], values[0]  # [heads, seq, channels]
        latest[kind] = heads
        part = heads[:, offset::stride].to(cache_dtype)
        if kind == "q":
            group = layer.num_heads // layer.num_key_value_heads
            part = heads[:, offset % group :: max(1, stride)].to(cache_dtype)
            part = part.unflatten(0, (layer.num_key_value_heads, group)).flatten(1, 2)[:, ::group]  # [kv_heads, about tokens, head_dim]
            scaling = getattr(model.get_submodule(layer.module), "scaling", None) or layer.head_dim**-0.5
            looked = _looked(heads, latest["k"], scaling, layer.sliding_window)
            kept.setdefault((index, "looked"), []).append(looked[:, offset::stride])
        kept.setdefault((index, kind), []).append(part.clone())

    for number, row in enumerate(rows):
        offset = number % stride  # first tokens are special: they count no more often than others
        observe(model, layout, row[None].to(model.device), see)
    names = ("k", "q", "looked")
    return {layer.index: LayerSample(*(torch.cat(kept[layer.index, name], dim=1) for name in names)) for layer in layout.layers}


def _looked(query: torch.Tensor, key: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
    """Σp(1 − p) over queries of each key, mean over a group's heads: float32 [kv_heads, seq]."""
    seq = key.shape[1]
    place = torch.arange(seq, device=key.device)
    hidden = place[None, :] > place[:, None]
    if window:
        hidden |= place[:, None] - place[None, :] >= window
    looked, group = torch.zeros((len(key), seq), device=key.device), len(query) // len(key)
    for head, rows in enumerate(query):  # one head at a time: [seq, seq] is all that is held
        weights = (rows.float() @ key[head // group].float().T).mul_(scaling).masked_fill_(hidden, float("-inf")).softmax(dim=-1)
        looked[head // group] += weights.sum(dim=0) - weights.square_().sum(dim=0)
    return looked / group
