"""The attention policy: what it takes from phase tables, what it falls back on, and that it helps where keys stand far from zero."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from calibrate.collect.phases import PhaseErrors
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import Statistics
from calibrate.statistics.phases import OCTAVE, PHASES, UNIT_BITS
from tests.planted import observed_of, planted

HEADS, SEQ, DIM = 2, 96, 16


def with_table(statistics: Statistics, table: np.ndarray) -> Statistics:
    """The same with this table, [kv_heads, PHASES] of whole numbers, for every kind of every layer."""
    limbs = np.zeros((4, *table.shape), dtype=np.int64)
    limbs[3] = table.astype(np.int64) << (UNIT_BITS - 40)  # limb 3 counts units of 2^40
    layers = {index: {kind: replace(seen, phases=limbs) for kind, seen in kinds.items()} for index, kinds in statistics.layers.items()}
    return replace(statistics, layers=layers)


@pytest.mark.parametrize("best", [0, 5, 15])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_scale_is_the_least_place_in_the_octave_above_the_floor(best, granularity):
    table = np.full((2, PHASES), 9)
    table[:, best] = 4
    table[1, (best + 3) % PHASES] = 3  # of the second head alone; both together still prefer `best`
    scales = solve(with_table(planted(), table), PolicyOptions(granularity=granularity))
    floors = solve(planted(), PolicyOptions(policy="amax", granularity=granularity))
    for layer, floor in zip(scales.layers, floors.layers, strict=True):
        for (kind, value), (_, low) in zip(layer.items(), floor.items(), strict=True):
            assert ((value >= low) & (value < 2 * low)).all()
            wanted = OCTAVE[best] if granularity == "tensor" else np.repeat(OCTAVE[[best, (best + 3) % PHASES]], len(value) // 2)
            np.testing.assert_array_equal(np.frexp(value)[0] * 2, np.broadcast_to(wanted, value.shape).astype(np.float32), err_msg=kind)


def test_without_a_table_and_in_e5m2_it_is_mse():
    table = np.ones((2, PHASES)) * np.arange(1, PHASES + 1)
    for statistics, options in (
        (planted(), {}),
        (with_table(planted(), np.zeros((2, PHASES))), {}),
        (with_table(planted(), table), {"number_format": "e5m2"}),
    ):
        got, wanted = (solve(statistics, PolicyOptions(policy=policy, **options)) for policy in ("attention", "mse"))
        for one, other in zip(got.layers, wanted.layers, strict=True):
            assert all((a == b).all() for (_, a), (_, b) in zip(one.items(), other.items(), strict=True))
    assert PolicyOptions().policy == "attention"


def attention(values: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = (values["q"] @ values["k"].transpose(-1, -2)) * DIM**-0.5
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ values["v"]


def lost(values: dict[str, torch.Tensor], policy: str) -> float:
    """‖ô − o‖² of attention's output with K in FP8 at the policy's scale, K being all of the text."""
    layer = AttentionLayer(0, "model.layers.0.self_attn", 0, HEADS, HEADS, DIM, DIM)
    seen = PhaseErrors(CacheLayout("planted", (layer,)), torch.bfloat16, {0: DIM**-0.5}, frozenset({0}))
    seen.begin([SEQ], [0])
    for kind in ("k", "v", "q"):
        seen.see(0, kind, values[kind][None])
    seen.close()
    seen.end()
    entry = {**planted().layout["layers"][0], "num_heads": HEADS, "head_dim": DIM, "value_head_dim": DIM}
    observed = {kind: replace(observed_of(value.numpy(), kind=kind), phases=seen.of((0, kind))) for kind, value in values.items()}
    (chosen,) = solve(replace(planted(entries=[entry]), layers={0: observed}), PolicyOptions(policy=policy)).layers
    stored = (values["k"] / float(chosen.k[0])).to(torch.float8_e4m3fn).float() * float(chosen.k[0])
    return float((attention(values | {"k": stored}) - attention(values)).square().sum())


def test_keys_with_a_bias_lose_less_than_by_element_error():
    """Qwen2's keys: a few channels stand far from zero and hardly move. Their error is nearly all of the element error, and what of it is the same
    for every token, softmax does not see."""
    found = {"attention": 0.0, "mse": 0.0}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        values = {kind: torch.randn((HEADS, SEQ, DIM), generator=generator) for kind in ("k", "v", "q")}
        values["k"][..., :2] = torch.tensor([37.0, -53.0]) + values["k"][..., :2] / 32
        for policy in found:
            found[policy] += lost({kind: value.to(torch.bfloat16).float() for kind, value in values.items()}, policy)
    assert found["attention"] < 0.95 * found["mse"]
