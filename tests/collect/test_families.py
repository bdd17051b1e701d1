"""What is observed is what is cached: code for code, against the contents of a real DynamicCache."""

import sys

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from calibrate.collect.observer import Observer
from calibrate.collect.watch import observe
from calibrate.model import probe_layout
from calibrate.statistics import CACHE_DTYPES, CODES
from tests.tiny import FAMILIES, VOCAB, tiny_model

HYBRIDS = {"qwen3_next", "nemotron_h"}
SHARED = {"gemma3n_text": {4: 2, 5: 3}, "gemma4_text": {4: 2, 5: 3}}


def _counts(values: torch.Tensor) -> np.ndarray:
    """The slow independent path: [batch, heads, seq, dim] → int64 [heads, 32768], by numpy on the bf16 bit patterns."""
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16) & 0x7FFF
    return np.stack([np.bincount(bits[:, head].ravel(), minlength=CODES) for head in range(bits.shape[1])])


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_histograms_equal_the_cache(family, monkeypatch):
    model = tiny_model(family)
    layout = probe_layout(model)
    tokens = torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))  # shorter than every window: nothing is evicted
    observer = Observer(layout, CACHE_DTYPES["bfloat16"])
    observer.begin([14, 14], 14, model.device)
    observe(model, layout, tokens, observer.see)
    assert observer.end(0) == []
    seen = observer.layers()

    queries = _record_queries(monkeypatch, model)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    writers = [layer for layer in layout.layers if layer.writes]
    assert {layer.index: layer.target for layer in layout.layers if not layer.writes} == SHARED.get(family, {})
    assert [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None] == [layer.index for layer in writers]
    for layer in writers:
        np.testing.assert_array_equal(seen[layer.index]["k"].counts, _counts(cache.layers[layer.index].keys))
        np.testing.assert_array_equal(seen[layer.index]["v"].counts, _counts(cache.layers[layer.index].values))
    assert observer.missing() == []
    if queries:
        assert len(queries) == len(layout.layers)
        for layer, query in zip(layout.layers, queries, strict=True):
            np.testing.assert_array_equal(seen[layer.index]["q"].counts, _counts(query))
    else:
        assert family == "gptj"  # computes its attention inline: its Q is compared in test_frame_queries below


def _record_queries(monkeypatch, model) -> list[torch.Tensor]:
    """Q as the attention kernel itself is given it: scaled_dot_product_attention's argument, or the modeling file's own eager function's."""
    queries: list[torch.Tensor] = []

    def recorded(function, place):
        def attention(*args, **kwargs):
            queries.append(args[place])
            return function(*args, **kwargs)

        return attention

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded(functional.scaled_dot_product_attention, 0))
    file = sys.modules[type(model).__module__]
    if model.config._attn_implementation == "eager" and hasattr(file, "eager_attention_forward"):
        monkeypatch.setattr(file, "eager_attention_forward", recorded(file.eager_attention_forward, 1))
    return queries


def test_frame_queries(monkeypatch):
    """GPT-J uses no attention interface: Q is taken from the frame that writes the cache."""
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    model, queries = tiny_model("gptj"), []
    original = GPTJAttention._attn
    monkeypatch.setattr(GPTJAttention, "_attn", lambda self, query, *rest: (queries.append(query), original(self, query, *rest))[1])
    layout = probe_layout(model)
    queries.clear()
    observer = Observer(layout, CACHE_DTYPES["bfloat16"])
    tokens = torch.arange(3, 33).unsqueeze(0)
    observer.begin([30], 30, model.device)
    observe(model, layout, tokens, observer.see, to_the_end=True)
    observer.end(0)
    assert len(queries) == len(layout.layers) == 3
    for layer, query in zip(layout.layers, queries, strict=True):
        np.testing.assert_array_equal(observer.layers()[layer.index]["q"].counts, _counts(query))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stopping_early_changes_nothing(family):
    model = tiny_model(family)
    layout = probe_layout(model)
    tokens = torch.randint(3, VOCAB, (2, 33), generator=torch.Generator().manual_seed(2))
    results = []
    for to_the_end in (False, True):
        observer = Observer(layout, CACHE_DTYPES["bfloat16"])
        observer.begin([33, 33], 33, model.device)
        observe(model, layout, tokens, observer.see, to_the_end=to_the_end)
        observer.end(0)
        results.append(observer.layers())
    for index, kinds in results[0].items():
        for kind, seen in kinds.items():
            np.testing.assert_array_equal(seen.counts, results[1][index][kind].counts)
