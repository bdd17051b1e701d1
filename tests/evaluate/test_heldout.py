"""Exact held-out error against a direct computation, and the attention's output error against attention written out."""

import numpy as np
import pytest
import torch

from calibrate.collect import collect
from calibrate.engines.session import Variant
from calibrate.evaluate.heldout import attention_errors, held_out, observe_documents
from calibrate.model.cache import PassingCache
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import CACHE_DTYPES
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return collect_run(tiny_checkpoint(tmp_path_factory.mktemp("heldout") / "m"), rows_corpus([40, 30]))


@pytest.fixture(scope="module")
def variants(run):
    statistics = collect(run)
    return tuple(
        [Variant("16-bit", None)]
        + [Variant(granularity, solve(statistics, PolicyOptions(granularity=granularity))) for granularity in ("tensor", "head")]
        + [Variant("coarse", solve(statistics, PolicyOptions(policy="amax", margin=1024.0)))]
        + [Variant("e5m2", solve(statistics, PolicyOptions(policy="amax", number_format="e5m2")))]
    )


def seen(run, rows):
    """K and V as cached, rounded to bf16: (layer, kind) → [heads, elements]."""
    found = {}

    def note(index, key, value):
        for kind, tensor in (("k", key), ("v", value)):
            rounded = tensor.bfloat16().float().transpose(0, 1).flatten(1)
            found[index, kind] = torch.cat([found[index, kind], rounded], 1) if (index, kind) in found else rounded

    with torch.inference_mode():
        for row in rows:
            run.model(torch.tensor([row.tolist()]), past_key_values=PassingCache(run.model.config, note))
    return found


def test_rows_against_a_direct_computation(run, variants):
    other = rows_corpus([50, 20], seed=5)
    statistics = collect(collect_run(run.source.path, other))
    rows = held_out(statistics, variants, calibration=collect(run))
    assert [row.variant for row in rows] == sorted((row.variant for row in rows), key=["tensor", "head", "coarse", "e5m2"].index)
    assert len(rows) == 4 * 3 * 3
    direct = seen(run, [sample.tokens for sample in other.samples])
    for row in rows:
        if row.kind == "q":
            assert row.attention_error is None
            continue
        x = direct[row.layer, row.kind]
        scale = torch.tensor(row.scale).view(-1, 1)
        dtype, top = (torch.float8_e5m2, 57344.0) if row.variant == "e5m2" else (torch.float8_e4m3fn, 448.0)
        approximate = (x / scale).clamp(-top, top).to(dtype).float() * scale
        error = (approximate.double() - x.double()).square().sum(1)
        energy = x.double().square().sum(1)
        assert row.snr_db == pytest.approx(float(10 * (energy.sum() / error.sum()).log10()), abs=1e-6)
        assert row.head_snr_db == pytest.approx((10 * (energy / error).log10()).tolist(), abs=1e-6)
        assert row.amax == pytest.approx(x.abs().amax(1).tolist())
        assert row.saturated == pytest.approx(float(((x / scale).abs() > top).double().mean()))
        assert row.underflow == pytest.approx(float(((approximate == 0) & (x != 0)).double().mean()), abs=1e-3)
        assert row.head_saturated == pytest.approx(((x / scale).abs() > top).double().mean(1).tolist())
        assert row.head_underflow == pytest.approx(((approximate == 0) & (x != 0)).double().mean(1).tolist(), abs=1e-3)
        assert row.snr_interval is None  # of the text as a whole only


def test_intervals_are_over_documents(run, variants):
    """Each document's sums are its own, whatever was counted before it: six documents, of which one has two rows."""
    lengths, owners = [50, 20, 30, 45, 25, 60, 35], [0, 1, 2, 2, 3, 4, 5]
    corpus = rows_corpus(lengths, seed=5, documents=owners)
    statistics, sums = observe_documents(collect_run(run.source.path, corpus), variants)
    assert statistics.counted["tokens"] == sum(lengths)
    rows = held_out(statistics, variants, documents=sums)
    scaled = [variant for variant in variants if variant.scales is not None]
    for document in range(6):
        alone = [sample for sample, owner in zip(corpus.samples, owners, strict=True) if owner == document]
        direct = seen(run, [sample.tokens for sample in alone])
        for variant in scaled[:3]:
            for kind in "kv":
                x, scale = direct[1, kind], torch.from_numpy(dict(variant.scales.layers[1].items())[kind]).view(-1, 1)
                approximate = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
                energy, error, elements, nonzero, cut, lost = sums[variant.name, 1, kind][document]
                assert (elements, nonzero) == (x.numel(), int((x != 0).sum()))
                assert energy == pytest.approx(float(x.double().square().sum()), rel=1e-4)
                assert error == pytest.approx(float((approximate.double() - x.double()).square().sum()), rel=1e-3)
                assert cut == int(((x / scale).abs() > 448).sum())
                assert lost == pytest.approx(int(((approximate == 0) & (x != 0)).sum()), abs=2)
    for row in rows:
        for value, interval in zip(
            (row.snr_db, row.saturated, row.underflow), (row.snr_interval, row.saturated_interval, row.underflow_interval), strict=True
        ):
            assert interval.value == pytest.approx(value, rel=1e-9, abs=1e-12)
            assert interval.low <= interval.value <= interval.high
        assert row.snr_interval.low < row.snr_interval.high


def test_one_document_gives_no_interval(run, variants):
    statistics, sums = observe_documents(collect_run(run.source.path, rows_corpus([50], seed=5)), variants)
    assert all(row.snr_interval.low == row.snr_interval.high for row in held_out(statistics, variants, documents=sums))


def test_growth_is_told(run, variants):
    statistics = collect(run)
    assert all(row.calibration_amax == max(row.amax) for row in held_out(statistics, variants, calibration=statistics))
    assert all(row.calibration_amax is None for row in held_out(statistics, variants))


def test_attention_error_against_attention_written_out(run, variants):
    """The first layer, causal attention in float64 from q, k, v caught on their way."""
    row = run.corpus.samples[0].tokens
    found = attention_errors(run.model, run.layout, [row], variants, torch.bfloat16)
    assert set(found) == {"tensor", "head", "coarse", "e5m2"}
    caught = {}

    def see(index, kind, tensor):
        caught.setdefault((index, kind), tensor)

    from calibrate.collect.watch import observe

    observe(run.model, run.layout, torch.tensor([row.tolist()]), see)
    scales = variants[1].scales.layers[0]

    def quantize(x, scale):
        s = torch.from_numpy(scale).view(1, -1, 1, 1)
        return (x.bfloat16().float() / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s

    def attention(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1).double() for x in (k, v))
        weights = (q.double() @ k.transpose(2, 3)) * 32**-0.5
        mask = torch.ones(weights.shape[-2:]).triu(1).bool()
        return weights.masked_fill(mask, float("-inf")).softmax(-1) @ v

    q, k, v = (caught[0, kind] for kind in "qkv")
    exact = attention(q, k.bfloat16().float(), v.bfloat16().float())
    wrong = attention(quantize(q, scales.q), quantize(k, scales.k), quantize(v, scales.v))
    assert found["tensor"][0].value == pytest.approx(float((exact - wrong).norm() / exact.norm()), rel=1e-4)


def test_e5m2_is_coarser(run, variants):
    found = attention_errors(run.model, run.layout, [run.corpus.samples[0].tokens], variants, torch.bfloat16)
    assert all(found["e5m2"][index].value > 1.5 * found["tensor"][index].value for index in range(3))
    assert all(0.001 < error.value < 0.1 for error in found["tensor"].values())


@pytest.mark.parametrize(("family", "layers"), [("gemma3n_text", range(6)), ("deepseek_v3", ()), ("mistral", range(3)), ("falcon", ())])
def test_families(family, layers, tmp_path):
    run = collect_run(tiny_checkpoint(tmp_path / "m", family), rows_corpus([40]))
    statistics = collect(run)
    variant = Variant("fp8", solve(statistics, PolicyOptions()))
    errors = attention_errors(run.model, run.layout, [run.corpus.samples[0].tokens], [variant], CACHE_DTYPES["bfloat16"].dtype)
    assert set(errors["fp8"]) == set(layers)
    rows = held_out(statistics, [variant], attention=errors)
    assert {(row.layer, row.kind) for row in rows} == {(index, kind) for index, kinds in statistics.layers.items() for kind in kinds}
    assert all(np.isfinite(row.snr_db) for row in rows)
