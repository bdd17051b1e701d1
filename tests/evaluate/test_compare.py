"""`compare` from end to end: tiny models for the mechanics, real weights and their stress twins for the known answers."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from calibrate.checkpoint.twins import write_twin
from calibrate.cli import main
from calibrate.errors import UsageError
from calibrate.evaluate import compare as compare_module
from calibrate.evaluate.compare import CompareOptions, evidence_path, run_compare
from calibrate.evaluate.ladder import decide
from calibrate.evaluate.results import CompareResult, load
from calibrate.pipeline import JobOptions, run
from calibrate.scales import Scales
from tests.conftest import missing_here
from tests.tiny import tiny_checkpoint

TINY = CompareOptions(samples=6, sequence_length=64, random_length=128, attention_rows=1, device="cpu")
REAL = CompareOptions(samples=4, sequence_length=256, random_length=256, attention_rows=1, device="cpu")


def calibrated(source: Path, output: Path, *, samples=8, length=64, **options) -> Path:
    job = JobOptions(model=str(source), samples=samples, sequence_length=length, device="cpu", **options)
    return run(job, output, verify=False).written.path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    return calibrated(tiny_checkpoint(folder / "base"), folder / "calibrated")


@pytest.fixture(scope="module")
def result(checkpoint):
    return run_compare(checkpoint, TINY)


def test_what_a_comparison_holds(result, checkpoint):
    names = ["16-bit", "unit", "random", "old-formula", "calibrated"]
    assert [each.variant for each in result.fidelity] == names
    assert {row.variant for row in result.held_out} == set(names[1:])
    assert {(row.layer, row.kind) for row in result.held_out} == {(layer, kind) for layer in range(3) for kind in "kvq"}
    provenance = json.loads((checkpoint / "kv_calibration" / "provenance.json").read_text())
    assert result.subject.scales_digest == provenance["scales"]
    assert result.subject.weights_fingerprint == provenance["model"]["fingerprint"]
    assert result.corpus["data"] == "builtin:code"
    assert result.fidelity[0].perplexity_ratio.value == 1.0
    assert result.fidelity[0].engine.kv_cache_dtype == "bfloat16"
    assert len({tuple(each.tokens for each in one.documents) for one in result.fidelity}) == 1
    assert all((row.attention_error is not None) == (row.kind == "k") for row in result.held_out)
    assert all(0 < row.attention_error.value < 0.2 for row in result.held_out if row.kind == "k")
    assert all(row.calibration_amax > 0 for row in result.held_out)


def test_it_is_kept_in_the_checkpoint_and_leaves_nothing_else(result, checkpoint):
    assert load(CompareResult, evidence_path(checkpoint, "transformers")) == result
    assert [path.name for path in (checkpoint / "kv_calibration" / "evidence").iterdir()] == ["compare-transformers.json"]


def test_the_same_again_gives_the_same(result, checkpoint):
    assert run_compare(checkpoint, TINY) == result


def test_a_killed_run_goes_on(result, checkpoint, monkeypatch):
    """The third variant dies; the second run scores only what is missing, and its result is the uninterrupted one's."""
    scored = []
    original = compare_module._write_scores

    def dying(file, *rest):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(file.name)
        original(file, *rest)

    monkeypatch.setattr(compare_module, "_write_scores", dying)
    with pytest.raises(KeyboardInterrupt):
        run_compare(checkpoint, TINY)
    counted = []
    monkeypatch.setattr(compare_module, "_write_scores", lambda file, *rest: (counted.append(file.name), original(file, *rest)))
    assert run_compare(checkpoint, TINY) == result
    assert len(counted) == 3
    assert not set(counted) & set(scored)


def test_other_options_start_over(checkpoint, monkeypatch):
    original = compare_module._write_scores
    monkeypatch.setattr(compare_module, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_compare(checkpoint, TINY.model_copy(update={"samples": 2}))
    monkeypatch.undo()
    counted = []
    monkeypatch.setattr(compare_module, "_write_scores", lambda file, *rest: (counted.append(file.name), original(file, *rest)))
    run_compare(checkpoint, TINY.model_copy(update={"samples": 2, "block": 16}))
    assert len(counted) == 5


def test_the_command(checkpoint, tmp_path):
    scales = Scales.load(checkpoint / "kv_calibration" / "scales.safetensors")
    scales.save(tmp_path / "mine.safetensors")
    arguments = ["compare", str(checkpoint), "--samples", "3", "--sequence-length", "64", "--variant", f"mine={tmp_path / 'mine.safetensors'}"]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "mine" in shown.stdout
    assert "is enough here" in shown.stdout or "Calibrate" in shown.stdout or "No FP8" in shown.stdout
    told = CliRunner().invoke(main, [*arguments, "--json"])
    value = json.loads(told.stdout)
    assert value["ladder"]["level"] in ("unit", "random", "calibrated", "none")
    figures = {each["variant"]: each for each in value["result"]["fidelity"]}
    assert figures["mine"]["documents"] == figures["calibrated"]["documents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "mine"], "write NAME=PATH"),
        (["--variant", "a=x", "--variant", "a=y"], "given twice"),
        (["--variant", "unit=x", "--samples", "2", "--sequence-length", "32"], "cannot be called 'unit'"),
        (["--variant", "mine=/nowhere", "--samples", "2", "--sequence-length", "32"], "no such variant: /nowhere"),
        (["--sequence-length", "100000"], "more than the model's context"),
        (["--samples", "0"], "must be at least 1"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(checkpoint, arguments, message):
    shown = CliRunner().invoke(main, ["compare", str(checkpoint), *arguments])
    assert shown.exit_code == 2, shown.output
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_calibration_text_is_no_held_out_text(checkpoint):
    with pytest.raises(UsageError, match="the very text that was calibrated on"):
        run_compare(checkpoint, TINY.model_copy(update={"data": "builtin", "samples": 8}))


def test_a_checkpoint_of_nobody(tmp_path):
    with pytest.raises(UsageError, match="not a checkpoint that kv-calibrate wrote"):
        run_compare(tiny_checkpoint(tmp_path / "m"), TINY)


def test_vllm_is_given_linked_checkpoints(result, checkpoint, monkeypatch):
    """All but vLLM itself: an engine that loads each overlay from disk, as vLLM does, and emulates its cache, comes to the same figures."""
    from calibrate.engines import vllm_engine
    from calibrate.engines.transformers_engine import TransformersEngine
    from calibrate.model import SourceCheckpoint

    opened = {}

    class Loader:
        def __init__(self, *, source, folder, overlay, **options):
            assert options["max_model_len"] == TINY.sequence_length
            self.folder, self.overlay = folder, overlay

        def session(self, variant):
            path = self.overlay(variant, self.folder)
            opened[variant.name] = path
            return TransformersEngine(SourceCheckpoint.open(path), device="cpu").session(variant)

    monkeypatch.setattr(vllm_engine, "VllmEngine", Loader)
    monkeypatch.setattr(compare_module, "_check_vllm", lambda source: None)
    monkeypatch.setattr("calibrate.engines.host.vllm_distribution", lambda: "vllm 0")
    found = run_compare(checkpoint, TINY.model_copy(update={"engine": "vllm"}))
    assert [each.documents for each in found.fidelity] == [each.documents for each in result.fidelity]
    assert list(opened) == [each.variant for each in result.fidelity]
    assert not any(path.exists() for path in opened.values())
    assert load(CompareResult, evidence_path(checkpoint, "vllm")) == found


def test_a_host_without_fp8_kernels_says_so(checkpoint):
    if not missing_here()["fp8_cpu"]:
        pytest.skip("this host runs FP8 kernels")
    shown = CliRunner().invoke(main, ["compare", str(checkpoint), "--engine", "vllm"])
    assert shown.exit_code == 3, shown.output
    assert len(shown.stderr.strip().splitlines()) == 1


# ---- known answers on real weights ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """SmolLM2 and its twins, calibrated alike and compared alike: name → result."""
    from calibrate.model.default import default_model

    folder = tmp_path_factory.mktemp("known")
    base = default_model()
    models = {
        "base": base,
        "k": write_twin(base, folder / "k", kind="k", factor=64.0),
        "v": write_twin(base, folder / "v", kind="v", factor=2.0**-12),
    }
    return {name: run_compare(calibrated(path, folder / f"{name}-fp8", samples=6, length=512), REAL) for name, path in models.items()}


def figures(result: CompareResult, variant: str):
    return next(each for each in result.fidelity if each.variant == variant)


@pytest.mark.weights
def test_untouched_smollm2_needs_no_calibration(known):
    ladder = decide(known["base"])
    assert ladder.level == "unit", ladder
    assert figures(known["base"], "calibrated").perplexity_ratio.value < 1.05


@pytest.mark.weights
@pytest.mark.parametrize("twin", ["k", "v"])
def test_a_twin_breaks_scale_one_and_calibration_holds(known, twin):
    unit, good = figures(known[twin], "unit"), figures(known[twin], "calibrated")
    assert unit.perplexity_ratio.low > 1.1
    assert good.perplexity_ratio.value < 1.05
    saturated = max(row.saturated for row in known[twin].held_out if row.variant == "unit" and row.kind == "k")
    flushed = max(row.underflow for row in known[twin].held_out if row.variant == "unit" and row.kind == "v")
    assert (saturated > 0.01) == (twin == "k")
    assert (flushed > 0.5) == (twin == "v")
    assert decide(known[twin]).level in ("random", "calibrated")


@pytest.mark.weights
@pytest.mark.parametrize("twin", ["k", "v"])
@pytest.mark.parametrize("variant", ["16-bit", "calibrated", "random", "old-formula"])
def test_a_twin_is_the_base_model_in_every_other_variant(known, twin, variant):
    """λ is a power of two: scales move with it, and every figure is the base model's, to the last digit."""
    assert figures(known[twin], variant).documents == figures(known["base"], variant).documents
    moved = {"k": {"k": 64.0, "q": 1 / 64, "v": 1.0}, "v": {"k": 1.0, "q": 1.0, "v": 2.0**-12}}[twin]
    pairs = zip(known["base"].held_out, known[twin].held_out, strict=True)
    for base, other in ((a, b) for a, b in pairs if a.variant == variant):
        assert other.scale == tuple(float(np.float32(scale * moved[base.kind])) for scale in base.scale)
        assert other.snr_db == pytest.approx(base.snr_db, abs=1e-9)
