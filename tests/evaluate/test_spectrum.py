"""The comparison of formats: its parts against independent paths, resuming, what does not fit, and the command."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from calibrate.checkpoint import write_checkpoint
from calibrate.checkpoint.kvarn_reference import TABLES_FILE
from calibrate.cli import main
from calibrate.collect import collect
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate import spectrum
from calibrate.evaluate.baselines import checkpoint_scales
from calibrate.evaluate.compare import CompareOptions, held_out_corpus
from calibrate.evaluate.niah import NeedleGrid
from calibrate.evaluate.pareto_plot import draw
from calibrate.evaluate.reasoning import ReasoningPlan
from calibrate.evaluate.results import load
from calibrate.evaluate.spectrum import SpectrumOptions, evidence_path, quick, run_spectrum
from calibrate.evaluate.spectrum_result import SpectrumResult
from calibrate.evaluate.storage import cache_bytes, storage_errors
from calibrate.lowbit import FORMATS, Placement, make_format
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus
from tests.evaluate.calibrated import calibrated_copy
from tests.tiny import tiny_checkpoint

COMPARE = CompareOptions(samples=3, sequence_length=320, dtype="float32", block=96)
OPTIONS = SpectrumOptions(
    formats=("fp8_e4m3", "int4_per_token_head", "kivi_2bit", "gear_2bit", "kvarn_k2v2_g64+prescale", "kvarn_k2v2_g64"),
    compare=COMPARE,
    offline=CompareOptions(data="builtin", samples=2, sequence_length=300, dtype="float32"),
    needles=NeedleGrid(lengths=(300,), depths=(0.5,), needles_per_cell=2),
    reasoning=None,
    storage_rows=1,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectrum")
    return calibrated_copy(tiny_checkpoint(folder / "base"), folder / "calibrated")


@pytest.fixture(scope="module")
def result(checkpoint) -> SpectrumResult:
    return run_spectrum(checkpoint, OPTIONS)


def _rows(result):
    return {row.variant: row for row in result.rows}


def test_every_format_has_a_row_or_a_reason(result, checkpoint):
    rows = _rows(result)
    assert [*rows, *result.left_out] == ["16-bit", *(name for name in OPTIONS.formats if name != "gear_2bit"), "gear_2bit"]
    assert "no multiple" in result.left_out["gear_2bit"]  # 64 values share a scale, a head has 32
    assert rows["16-bit"].verdict == "reference"
    assert rows["16-bit"].fidelity.kl_mean.value == 0
    assert rows["16-bit"].bytes_per_token == 3 * 2 * 2 * 32 * 2  # layers, heads, K and V, channels, bytes
    assert rows["fp8_e4m3"].bytes_per_token * 2 == rows["16-bit"].bytes_per_token
    for name, row in rows.items():
        assert (row.needles.asked, row.reasoning) == (2, None)
        assert name == "16-bit" or row.fidelity.kl_mean.value > 0
    assert rows["kvarn_k2v2_g64"].fidelity.kl_mean != rows["kvarn_k2v2_g64+prescale"].fidelity.kl_mean
    assert rows["kvarn_k2v2_g64"].served_as is None
    assert (rows["fp8_e4m3"].served_as, rows["int4_per_token_head"].served_as) == ("fp8", "int4_per_token_head")
    assert load(SpectrumResult, evidence_path(checkpoint)) == result
    hidden = [path.name for path in evidence_path(checkpoint).parent.iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_fp8_through_the_formats_is_fp8_through_the_scales(result, checkpoint):
    """Two ways to one cache: the store of `lowbit`, and the engine's own quantizer with Q left alone."""
    source = SourceCheckpoint.open(checkpoint)
    engine = TransformersEngine(source, dtype="float32", device="cpu", block=96, quantize_queries=False)
    rows = [sample.tokens for sample in held_out_corpus(source, COMPARE, COMPARE.corpus()).samples]
    with engine.session(Variant("calibrated", checkpoint_scales(source))) as session:
        scores = session.score(rows)
    nll = -sum(float(each.logprob.astype(np.float64).sum()) for each in scores)
    assert nll == pytest.approx(sum(each.nll for each in _rows(result)["fp8_e4m3"].fidelity.documents), rel=1e-12)


def test_storage_errors_and_bytes_are_those_of_the_tensors_themselves(checkpoint):
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), dtype="float32", device="cpu")
    fmt = make_format("kivi_4bit")
    config = engine.model.config
    placement = Placement(engine.layout, fmt, torch.bfloat16, config)
    row = np.random.default_rng(0).integers(3, 250, 320)
    ((key, value),) = storage_errors(engine.model, engine.layout, [row], [placement])
    with torch.inference_mode():
        cache = engine.model(torch.from_numpy(row)[None], use_cache=True).past_key_values
    sums = np.zeros(4)
    for layer in cache.layers:
        exact = layer.keys.to(torch.bfloat16).float()[..., : fmt.key_window.quantized(320), :]
        stored = fmt.key(exact, 0, 0)
        norms = exact.norm(dim=-1)
        sums += [
            float((stored - exact).square().sum()),
            float(exact.square().sum()),
            float(((stored.norm(dim=-1) - norms).abs() / norms).sum()),
            norms.numel(),
        ]
    assert key.relative_mse == pytest.approx(sums[0] / sums[1], rel=1e-4)
    assert key.norm_error == pytest.approx(sums[2] / sums[3], rel=1e-4)
    assert value.relative_mse != key.relative_mse
    tokens = 1000
    by_hand = 0.0
    for dim_bytes, window in ((fmt.key_bytes(32), fmt.key_window), (fmt.value_bytes(32), fmt.value_window)):
        quantized = window.quantized(tokens)
        by_hand += 3 * 2 * (quantized * dim_bytes + (tokens - quantized) * 64)
    assert cache_bytes(engine.layout, placement, tokens) == pytest.approx(by_hand)


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(result, checkpoint, monkeypatch):
    path = evidence_path(checkpoint)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(spectrum, "run_niah", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_spectrum(checkpoint, OPTIONS)
    scored = []
    original = TransformersEngine.session

    def counting(self, variant):
        scored.append(variant.name)
        return original(self, variant)

    monkeypatch.setattr(TransformersEngine, "session", counting)
    run_spectrum(checkpoint, OPTIONS)
    assert len(scored) == len(result.rows)  # for the needles alone: all scores were kept
    assert path.read_bytes() == before


def test_what_cannot_be_asked_is_one_line(checkpoint):
    for changed, message in (
        ({"formats": ("fp3",)}, "no such format"),
        ({"formats": ("kvarn_k3v3_g64",)}, "no such format, perhaps kvarn_k"),
        ({"formats": ()}, "names none"),
        ({"formats": ("kivi_2bit", "kivi_2bit")}, "kivi_2bit: named twice"),
        ({"formats": ("gear_2bit",)}, "none of the formats"),
        ({"compare": COMPARE.model_copy(update={"sequence_length": 1})}, "nothing to score"),
        ({"compare": COMPARE.model_copy(update={"engine": "vllm"})}, "transformers engine"),
        ({"compare": COMPARE.model_copy(update={"data": "builtin", "samples": 2, "sequence_length": 300})}, "very text"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            run_spectrum(checkpoint, OPTIONS.model_copy(update=changed))
        assert "\n" not in str(caught.value)


def test_text_that_was_calibrated_on_is_refused(checkpoint, monkeypatch):
    source = SourceCheckpoint.open(checkpoint)
    scales, corpus = checkpoint_scales(source), held_out_corpus(source, COMPARE, COMPARE.corpus())
    known = replace(scales, provenance=({"corpus": {"digest": corpus.digest}},))
    monkeypatch.setattr(spectrum, "checkpoint_scales", lambda _: known)
    with pytest.raises(UsageError, match="the very text that was calibrated on"):
        run_spectrum(checkpoint, OPTIONS)


def test_where_evidence_cannot_be_kept_is_said_first(checkpoint, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(spectrum, "TransformersEngine", None)  # nothing is loaded before
    with pytest.raises(UsageError, match="evidence cannot be written to"):
        run_spectrum(checkpoint, OPTIONS)


def test_problems_that_do_not_fit_are_left_out_and_needles_that_do_not_are_said_first(checkpoint, monkeypatch, capsys):
    few = OPTIONS.model_copy(update={"formats": ("int8_per_token_head",), "needles": None, "reasoning": ReasoningPlan(problems=1)})
    assert [row.reasoning for row in run_spectrum(checkpoint, few).rows] == [None, None]
    assert "no problems are asked: problem 0 of" in capsys.readouterr().err
    monkeypatch.setattr(spectrum, "TransformersEngine", None)
    with pytest.raises(UsageError, match="has no room"):
        run_spectrum(checkpoint, few.model_copy(update={"needles": NeedleGrid(lengths=(60,), depths=(0.5,), needles_per_cell=1)}))


def test_tables_of_another_model_are_refused(tmp_path):
    """Of the same shapes, so that nothing else tells them apart."""
    made = []
    for seed in (1, 2):
        run = collect_run(tiny_checkpoint(tmp_path / f"base{seed}", seed=seed), rows_corpus([300, 300]))
        statistics = collect(replace(run, second_moments=True))
        made.append(tmp_path / f"calibrated{seed}")
        source = SourceCheckpoint.open(tmp_path / f"base{seed}")
        write_checkpoint(source, solve(statistics, PolicyOptions()), made[-1], statistics=statistics)
    few = OPTIONS.model_copy(update={"formats": ("kvarn_k2v2_g64+balanced",), "needles": None})
    assert [row.variant for row in run_spectrum(made[0], few).rows] == ["16-bit", "kvarn_k2v2_g64+balanced"]
    shutil.copy(made[1] / TABLES_FILE, made[0] / TABLES_FILE)
    with pytest.raises(UsageError, match="of other statistics than its scales"):
        run_spectrum(made[0], few)


def test_a_format_that_quantizes_nothing_is_left_out(tmp_path):
    """TurboQuant keeps two layers at either end, here all four."""
    checkpoint = calibrated_copy(tiny_checkpoint(tmp_path / "base", num_hidden_layers=4), tmp_path / "calibrated")
    few = OPTIONS.model_copy(update={"formats": ("fp8_e4m3", "turboquant_k8v4"), "needles": None})
    assert run_spectrum(checkpoint, few).left_out == {"turboquant_k8v4": "turboquant_k8v4 leaves every layer of this model in 16 bits"}


def test_damaged_codebooks_are_fitted_again(checkpoint, capsys):
    few = OPTIONS.model_copy(update={"formats": ("additive",), "needles": None})
    run_spectrum(checkpoint, few)
    path = evidence_path(checkpoint).with_name("formats-codebooks.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    assert [row.variant for row in run_spectrum(checkpoint, few).rows] == ["16-bit", "additive"]
    assert "codebooks are fitted again" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_quick_keeps_the_formats_and_what_the_user_gave():
    plain = SpectrumOptions()
    short = quick(plain)
    assert (short.formats, short.reasoning, short.compare.samples, short.compare.sequence_length) == (plain.formats, None, 8, 768)
    grid = short.needles
    assert len(grid.lengths) * len(grid.depths) * grid.needles_per_cell >= short.bounds.least_hits
    kept = quick(plain.model_copy(update={"compare": COMPARE}), frozenset({"samples"})).compare
    assert (kept.samples, kept.sequence_length) == (3, 768)
    kept = quick(plain.model_copy(update={"compare": COMPARE}), frozenset({"sequence_length"})).compare
    assert (kept.samples, kept.sequence_length) == (8, 320)
    assert set(plain.formats) <= set(FORMATS)


def test_the_picture_is_one(result, tmp_path):
    picture = draw(result, tmp_path / "p.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command(checkpoint):
    run = CliRunner().invoke
    short = ["--samples", "2", "--sequence-length", "300", "--dtype", "float32", "--json"]
    done = run(main, ["compare", str(checkpoint), "--formats", "int8_per_token_head", "--quick", *short])
    assert done.exit_code == 0, done.stderr
    assert "needles in prompts of 480 tokens: with their answers the model's context holds no more" in done.stderr  # of 512
    for wrong, said in (
        (["--quick"], "--quick is for --formats"),
        (["--formats", "fp3"], "no such format"),
        (["--formats", " ,"], "names none"),
        (["--formats", "few,kivi_2bit"], "few stands alone"),
        (["--formats", "kivi_2bit", "--engine", "vllm"], "transformers engine"),
        (["--formats", "all", "--variant", "a=b"], "--variant does not go with --formats"),
        (["--formats", "kivi_2bit", "--no-quantize-queries"], "--quantize-queries changes nothing"),
        (["--formats", "kivi_2bit", "--attention-backend", "FLASH_ATTN"], "--attention-backend changes nothing"),
        (["--formats", "kivi_2bit", "--timeout", "5"], "--timeout changes nothing"),
    ):
        done = run(main, ["compare", str(checkpoint), *wrong])
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_command_shows_and_keeps_the_same(checkpoint, monkeypatch):
    monkeypatch.setattr(spectrum, "quick", lambda options, keep: OPTIONS.model_copy(update={"formats": options.formats}))
    asked = ["compare", str(checkpoint), "--formats", "int8_per_token_head,kivi_2bit", "--quick"]
    done = CliRunner().invoke(main, [*asked, "--json"])
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    kept = json.loads(evidence_path(checkpoint).read_text())
    assert shown["result"] == kept
    assert "kivi_2bit" in CliRunner().invoke(main, asked).stdout
