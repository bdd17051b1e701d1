"""The coordinate search on a kernel whose objective is known: it finds the best place of each octave and keeps to what it may touch."""

import json
from dataclasses import replace

import numpy as np

from benchmarks.quality.run import Text
from benchmarks.quality.scoring import Reference, Scores
from benchmarks.quality.search import PLACES, Search, parts_of
from calibrate.scales import LayerScales, Scales

from .engines import scales_of

TOKENS = 8


class Bowl:
    """KL is the squared distance, in sixteenths of an octave within the octave, of every scale from its best place."""

    def __init__(self, best: dict[int, dict[str, np.ndarray]]) -> None:
        self.best, self.layers = best, {}

    def set_scales(self, scales: Scales) -> None:
        for layer in scales.layers:
            self.set_layer(layer)

    def set_layer(self, layer: LayerScales) -> None:
        self.layers[layer.index] = layer

    def score(self, rows, reference: Reference) -> Scores:
        off = 0.0
        for index, layer in self.layers.items():
            for kind, value in layer.items():
                places = PLACES * np.log2(value / self.best[index][kind])
                off += float(np.square((places + PLACES / 2) % PLACES - PLACES / 2).sum())
        return Scores(reference.lengths, reference.logprob, np.full(TOKENS - 1, off, np.float32), reference.top_ids[:, 0])


def searched(tmp_path, scales: Scales, floor: Scales, kernel: Bowl) -> Search:
    columns = (np.zeros(TOKENS - 1, np.float32), np.zeros((TOKENS - 1, 1), np.int32), np.zeros((TOKENS - 1, 1), np.float32), np.zeros(TOKENS - 1))
    text = Text([np.arange(TOKENS)], [0], {})
    found = Search(kernel, text, Reference(np.array([TOKENS]), *columns), scales, floor, "kl", tmp_path)
    for kind in "kqv":
        for position, layer in enumerate(found.layers):
            for part in parts_of(layer, kind):
                found.improve(position, kind, part)
    return found


def test_each_scale_goes_to_its_best_place_above_the_floor(tmp_path):
    begun = scales_of({"k": 0.3, "v": 0.2, "q": 1.1})
    rng = np.random.default_rng(0)
    shift = {layer.index: {kind: 2 ** (rng.integers(-7, 8) / PLACES) for kind in "kvq"} for layer in begun.layers}
    kernel = Bowl({layer.index: {kind: value * shift[layer.index][kind] for kind, value in layer.items()} for layer in begun.layers})
    found = searched(tmp_path, begun, begun, kernel)
    assert found.start > 100
    assert found.best < 1e-3
    for old, new in zip(begun.layers, found.layers, strict=True):
        for kind, value in new.items():
            assert value >= getattr(old, kind) * (1 - 1e-6)  # the floor is where it began: what lies below comes an octave higher
            assert np.isclose(np.log2(value / kernel.best[new.index][kind]) % 1, [0, 1], atol=1e-3).any()
    assert kernel.layers[0] is found.layers[0]
    found.save()
    course = json.loads((tmp_path / "search.json").read_text())
    assert course["best"] == found.best
    assert len(course["kept"]) == sum(factor != 1 for kinds in shift.values() for factor in kinds.values())


def test_heads_move_apart_and_the_query_heads_of_one_together():
    layer = scales_of({"k": 1, "v": 1, "q": 1}).layers[0]
    head = replace(layer, k=np.ones(2, np.float32), v=np.ones(2, np.float32), q=np.ones(6, np.float32))
    assert list(parts_of(head, "q")) == [slice(0, 3), slice(3, 6)]
    assert list(parts_of(head, "v")) == [slice(0, 1), slice(1, 2)]
    assert list(parts_of(layer, "q")) == [slice(0, 1)]
