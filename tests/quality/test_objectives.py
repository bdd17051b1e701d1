"""The search by attention's output: attention is right, and the search ends lower than it began."""

import numpy as np
import pytest
import torch

from benchmarks.quality import objectives
from benchmarks.quality.objectives import KINDS, Layer, grid, stored
from benchmarks.quality.rows import Material


def layer_of(seed: int, *, window: int | None = None) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Layer(normal(2, 2, 24, 8), normal(2, 2, 24, 8), normal(2, 2, 3, 24, 8), normal(16, 2, 3, 8), 8**-0.5, window)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_torchs(window):
    layer = layer_of(1, window=window)
    place = torch.arange(24)
    mask = place[None, :] <= place[:, None]
    if window:
        mask &= place[:, None] - place[None, :] < window
    key, value = (tensor.repeat_interleave(3, dim=1) for tensor in (layer.k, layer.v))
    expected = torch.nn.functional.scaled_dot_product_attention(layer.q.flatten(1, 2), key, value, attn_mask=mask)
    found = objectives._attend(layer.q, layer.k, layer.v, layer, fp8=False)
    torch.testing.assert_close(found.flatten(1, 2), expected, rtol=1e-5, atol=1e-6)
    coarse = objectives._attend(layer.q, layer.k, layer.v, layer, fp8=True)
    assert 0 < float((coarse - found).abs().max()) < 0.1


def test_a_channel_that_no_query_looks_at_has_no_say():
    """Channel 0 of K is large and nearly constant, but q is zero there: the start of the search serves the other channels."""
    layer = layer_of(2)
    layer.k[..., 0], layer.q[..., 0] = 100.0, 0.0
    chosen = objectives._weighted(layer)["k"]
    keys, weight = layer.k[..., 1:], layer.q[..., 1:].square().mean(dim=(0, 2, 3))
    others = [float(((stored(keys, scale) - keys).var(dim=2, unbiased=False).mean(dim=0) * weight).sum()) for scale in grid(layer.k)]
    assert grid(layer.k).index(chosen) == int(np.argmin(others))


def test_attentions_output_never_gets_worse_than_where_the_search_began():
    layer = layer_of(3)

    def error(scales: dict[str, float]) -> float:
        kept = {kind: stored(getattr(layer, kind), scales[kind]) for kind in KINDS}
        wrong = objectives._attend(kept["q"], kept["k"], kept["v"], layer, fp8=True) - objectives._attend(layer.q, layer.k, layer.v, layer, fp8=False)
        return float(torch.einsum("rhgsd,ohgd->rhgso", wrong, layer.output).square().sum())

    begun, ended = objectives._weighted(layer), objectives._attention_output(layer)
    assert ended != begun
    assert error(ended) < error(begun)
    for kind in KINDS:  # no single step from where it ended gets lower for v, the last that was moved
        assert ended[kind] in grid(getattr(layer, kind))
    assert all(error(ended) <= error(ended | {"v": scale}) * (1 + 1e-5) for scale in grid(layer.v))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_whole_model(llama, llama_statistics, granularity, monkeypatch):
    monkeypatch.setattr(objectives, "LENGTH", 64)
    material = Material(llama_statistics, llama_statistics, granularity, llama)
    like = material.solved()
    (scales,) = objectives.rows(material).values()
    for layer, other in zip(scales.layers, like.layers, strict=True):
        for kind, value in layer.items():
            expected = getattr(other, kind)
            assert value.shape == expected.shape, kind
            assert (np.abs(np.log2(value / expected)) < 2).all(), kind
