"""Phase tables: against a slow float64 path with the real FP8 cast, exactness under any split, and which rows and layers have them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from calibrate.collect import collect
from calibrate.collect.phases import PhaseErrors, looked_at
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import Statistics, merge, pack_layers
from calibrate.statistics.phases import OCTAVE, PHASES, QUERIES, ROWS, phase_table
from tests.conftest import collect_run, rows_corpus

LAYER = AttentionLayer(0, "attention", 0, 4, 2, 8, 6)
SCALING = 0.4


def drawn(seq: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """[batch 2, heads, seq, channels] of each kind, bfloat16 numbers; one channel of K stands far out, as a bias makes it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"k": (2, 2, seq, 8), "v": (2, 2, seq, 6), "q": (2, 4, seq, 8)}
    values = {kind: torch.randn(shape, generator=generator) for kind, shape in shapes.items()}
    values["k"][..., 3] += 41.0
    return {kind: value.to(torch.bfloat16).float() for kind, value in values.items()}


def tables(values: dict[str, torch.Tensor], layer: AttentionLayer = LAYER, lengths=(50, 37), samples=(7, 8), chosen=frozenset({8})) -> dict:
    seen = PhaseErrors(CacheLayout("planted", (layer,)), torch.bfloat16, {0: SCALING}, chosen)
    seen.begin(lengths, samples)
    for kind in ("k", "v", "q"):
        seen.see(0, kind, values[kind])
    seen.close()
    seen.end()
    return {kind: phase_table(seen.of((0, kind))) for kind in ("k", "v", "q")}


def slowly(values: dict[str, torch.Tensor], row: int, length: int, window: int | None) -> dict[str, np.ndarray]:
    """The same in float64, query by query, with torch's own FP8 cast at scales of this octave moved to where nothing saturates or underflows."""
    places = sorted({max(1, int(at)) - 1 for at in np.linspace(length / QUERIES, length, QUERIES)})
    found = {kind: np.zeros((2, PHASES)) for kind in values}
    exact = {kind: value[row, :, :length].double() for kind, value in values.items()}

    def output(head: int, place: int, given: dict[str, torch.Tensor]) -> torch.Tensor:
        first = 0 if window is None else max(0, place - window + 1)
        logits = given["k"][head // 2, first : place + 1] @ given["q"][head, place] * SCALING
        return logits.softmax(dim=0) @ given["v"][head // 2, first : place + 1]

    for phase, scale in enumerate(OCTAVE):
        for kind in values:
            small = scale * 2.0**-3  # |x| up to 47 meets at most 376
            fp8 = (exact[kind] / small).float().to(torch.float8_e4m3fn).double() * small
            for head in range(4):
                for place in places:
                    wrong = output(head, place, exact | {kind: fp8}) - output(head, place, exact)
                    found[kind][head // 2, phase] += float(wrong.square().sum())
    return found


@pytest.mark.parametrize("window", [None, 9])
def test_tables_are_what_fp8_does_to_attention(window):
    values = drawn(50)
    got, want = tables(values, replace(LAYER, sliding_window=window)), slowly(values, 1, 37, window)
    for kind in values:  # small values are subnormal at these scales for the cast, and not for the table: hence not closer
        np.testing.assert_allclose(got[kind], want[kind], rtol=0.02, err_msg=kind)


def test_only_real_tokens_of_chosen_rows_are_looked_at():
    values = drawn(50)
    spoilt = {kind: value.clone() for kind, value in values.items()}
    for value in spoilt.values():
        value[0] = torch.nan  # the row that is not chosen
        value[1, :, 37:] = torch.inf  # padding
    for kind, table in tables(spoilt).items():
        np.testing.assert_array_equal(table, tables(values)[kind])
    assert not any(table.any() for table in tables(values, chosen=frozenset({3})).values())


def test_a_power_of_two_moves_no_table_and_another_factor_rolls_it():
    values = drawn(50)
    moved = values | {"k": values["k"] * 64, "q": values["q"] / 64}
    for kind, table in tables(moved).items():
        np.testing.assert_allclose(table, tables(values)[kind], rtol=1e-6)


def test_latent_layers_and_readers_have_no_table_and_infinities_no_say():
    layout = CacheLayout("planted", (LAYER, replace(LAYER, index=1, target=0), replace(LAYER, index=2, target=2, latent=True)))
    seen = PhaseErrors(layout, torch.bfloat16, {}, frozenset())
    assert seen.of((0, "k")).shape == (4, 2, PHASES)
    assert seen.of((1, "q")) is None
    assert seen.of((2, "k")) is None
    values = drawn(50) | {"v": torch.full((2, 2, 50, 6), 3e38)}  # their squares are beyond float32
    assert all(np.isfinite(table).all() for table in tables(values).values())


def test_rows_are_the_longest_of_each_stretch():
    assert ROWS == 4
    assert looked_at(rows_corpus([3, 9, 9, 2, 8, 7, 1, 1])) == {1, 2, 4, 6}
    assert looked_at(rows_corpus([3, 9])) == {0, 1}


def test_the_order_of_batches_changes_no_bit(llama):
    run = collect_run(llama, rows_corpus([40, 33, 17, 29, 8, 12, 21]))
    assert len(run.batches) > 2
    one, other = collect(run), collect(replace(run, batches=run.batches[::-1]))
    for name, array in pack_layers(one.layers).items():
        np.testing.assert_array_equal(pack_layers(other.layers)[name], array, err_msg=name)
    assert phase_table(one.layers[0]["k"].phases).all()


def test_merged_tables_add_up_and_files_without_leave_none(llama, tmp_path):
    first, second = (collect(collect_run(llama, rows_corpus([30, 22], seed=seed))) for seed in (1, 2))
    both = merge([first, second])
    for kind in ("k", "v", "q"):
        wanted = sum(phase_table(each.layers[1][kind].phases) for each in (first, second))
        np.testing.assert_allclose(phase_table(both.layers[1][kind].phases), wanted, rtol=1e-12)
    both.save(tmp_path / "both.safetensors")
    assert Statistics.load(tmp_path / "both.safetensors").digest() == both.digest()
    older = replace(
        second, layers={index: {kind: replace(seen, phases=None) for kind, seen in kinds.items()} for index, kinds in second.layers.items()}
    )
    assert merge([first, older]).layers[0]["k"].phases is None
