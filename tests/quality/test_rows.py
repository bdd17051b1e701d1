"""Every measured policy builds its scales, and differs from the others in what it says it differs in."""

import numpy as np
import pytest

from benchmarks.quality.rows import ROWS, Material, element_error, rows_for, searched
from calibrate.scales import Population, solve
from calibrate.scales.policies import PolicyOptions


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_every_row_builds_scales_that_fit_the_model(llama_statistics, granularity):
    material = Material(llama_statistics, llama_statistics, granularity)
    digests = set()
    for name, row in rows_for(granularity).items():
        scales = row.make(material)
        assert row.prediction, name
        heads = {layer["index"]: layer for layer in scales.layout["layers"]}
        for layer in scales.layers:
            for kind, value in layer.items():
                whole = heads[layer.index]["num_heads" if kind == "q" else "num_key_value_heads"]
                assert value.dtype == np.float32, name
                assert value.size in ({1, whole} if name == "old formula" else {1} if granularity == "tensor" else {whole}), name
                assert (np.isfinite(value) & (value > 0)).all(), name
        digests.add(tuple(value.tobytes() for layer in scales.layers for _, value in layer.items()))
    assert len(digests) >= len(rows_for(granularity)) - 2  # random tokens are the text here: that row is amax; a margin may change nothing


def test_the_registry_knows_its_granularities():
    assert set(rows_for("tensor")) < set(rows_for("head")) == set(ROWS)
    assert list(rows_for("tensor", ["mse", "mse per tensor", "amax"])) == ["mse", "amax"]


def test_the_worst_phase_is_worse_than_any_and_the_best_as_good_as_mse(llama_statistics):
    material = Material(llama_statistics, llama_statistics, "tensor")
    worst, best = searched(material, element_error, worst=True), searched(material, element_error)
    mse = solve(llama_statistics, PolicyOptions(search_octaves=1))
    values = llama_statistics.values()
    for index, layers in enumerate(zip(best.layers, mse.layers, worst.layers, strict=True)):
        counts = llama_statistics.layers[index]["k"].counts.sum(axis=0, keepdims=True)
        errors = [element_error(Population.of(counts, values), layer.k.astype(np.float64))[0, 0] for layer in layers]
        assert errors[0] == pytest.approx(errors[1], rel=0.01)
        assert errors[2] > 1.02 * errors[1]
