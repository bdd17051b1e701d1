"""`run --fold` and `fold` from end to end: what is chosen lowers the error that it says it lowers, and is kept beside the scales."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from calibrate.cli import main
from calibrate.errors import CheckFailed, UsageError
from calibrate.fold import Fold, fold_checkpoint, parse_switches
from calibrate.fold import job as job_module
from calibrate.model import SourceCheckpoint, load_model
from tests.conftest import rows_corpus
from tests.fold.test_function import TOKENS, logits_of, with_random_biases
from tests.tiny import edit_config, tiny_checkpoint

CORPUS = ("--data", "builtin", "--samples", "6", "--sequence-length", "48", "--device", "cpu")


def invoke(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A tiny Qwen2 whose K biases dwarf what varies, as the real one's do."""
    from safetensors.torch import load_file, save_file

    path = with_random_biases(tiny_checkpoint(tmp_path_factory.mktemp("fold") / "base", "qwen2", dtype=torch.bfloat16))
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name] = tensors[name] * 30
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_run_folds_first_and_keeps_the_record(biased, tmp_path):
    output = tmp_path / "out"
    result = invoke("run", biased, "--output", output, "--fold", "k,turn", "--no-verify", *CORPUS)
    assert result.exit_code == 0, result.output
    fold = Fold.load(output / "kv_calibration" / "fold.safetensors")
    assert fold.switches == ("turn", "k")
    assert fold.origin == SourceCheckpoint.open(biased).fingerprint
    assert fold.report["moved"]["pairs"] > 0
    assert fold.report["predicted"]["logits"]["mean"] < 0.9
    assert fold.report["logits_change"] < 1e-4
    assert "were folded" in (output / "README.md").read_text()
    assert "kv_calibration/fold.safetensors" in json.loads((output / "kv_calibration" / "provenance.json").read_text())["files"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    difference = (logits_of(output) - logits_of(biased)).norm() / logits_of(biased).norm()
    assert 0 < difference < 0.02  # bf16's rounding of the weights


def test_fold_and_run_are_run_with_fold(biased, tmp_path):
    assert invoke("run", biased, "--output", tmp_path / "a", "--fold", "turn", "--no-verify", *CORPUS).exit_code == 0
    result = invoke("fold", biased, "--output", tmp_path / "folded", "--fold", "turn", "--json", *CORPUS)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["predicted"]) == {"k", "q", "logits"}
    assert invoke("run", tmp_path / "folded", "--output", tmp_path / "b", "--no-verify", *CORPUS).exit_code == 0
    for name in ("kv_scales.safetensors", "kv_calibration/fold.safetensors", "model-00001-of-00001.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_prediction_is_what_happens(biased, tmp_path):
    """The logit error of real K and Q through FP8, in the first layer, falls as predicted."""
    made = fold_checkpoint(SourceCheckpoint.open(biased), rows_corpus([48] * 40), tmp_path / "folded", ("turn", "k"), device="cpu")
    predicted = made.fold.report["predicted"]["k"]["layers"][0]
    errors = [_logit_error(path) for path in (biased, tmp_path / "folded")]
    assert errors[1] / errors[0] == pytest.approx(predicted, abs=0.15)


def _logit_error(path) -> float:
    """Σ of the centred squared error of q·k in the first layer for K in FP8, at the best of many scales."""
    from calibrate.collect.watch import observe
    from calibrate.model import probe_layout

    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    layout, seen = probe_layout(model), {}
    for sample in rows_corpus([48] * 30, seed=5).samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        observe(model, layout, tokens, lambda index, kind, values: seen.setdefault((index, kind), []).append(values[0]))
    k, q = (torch.cat(seen[0, kind], dim=1) for kind in "kq")  # [heads, tokens, head_dim]
    q = q.unflatten(0, (len(k), -1)).flatten(1, 2)
    least = np.inf
    for scale in float(k.abs().max()) / 200 * 2 ** (np.arange(32) / 32):
        wrong = (k / scale).to(torch.float8_e4m3fn).float() * scale - k
        logits = wrong @ q.transpose(1, 2)  # [kv_heads, keys, queries]
        least = min(least, float((logits - logits.mean(dim=1, keepdim=True)).square().sum()))
    return least


def test_a_change_of_the_function_is_caught(biased, tmp_path, monkeypatch):
    real = job_module.choose

    def broken(*arguments):
        layer, predicted = real(*arguments)
        layer.pairs[0, 0] = np.nan
        return layer, predicted

    monkeypatch.setattr(job_module, "choose", broken)
    with pytest.raises(CheckFailed, match="nothing was written"):
        fold_checkpoint(SourceCheckpoint.open(biased), rows_corpus([40, 30]), tmp_path / "folded", ("k",), device="cpu")
    assert not (tmp_path / "folded").exists()


def test_what_is_asked_is_checked(biased, tmp_path):
    assert parse_switches(" k,turn ") == ("turn", "k")
    for wrong in ("", "v", "turn,w"):
        with pytest.raises(UsageError, match=r"known are turn, k, smooth$"):
            parse_switches(wrong)
    for command in ("fold", "run"):
        result = invoke(command, biased, "--output", tmp_path / "x", "--fold", "v", *CORPUS)
        assert (result.exit_code, result.stderr.count("\n"), "--fold v: known are turn, k, smooth" in result.stderr) == (2, 1, True)
    source = tiny_checkpoint(tmp_path / "quantized")
    edit_config(source, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}})
    result = invoke("fold", source, "--output", tmp_path / "x", "--fold", "k", *CORPUS)
    assert (result.exit_code, "quantized or calibrated" in result.stderr) == (2, True)
    result = invoke("run", biased, "--output", tmp_path / "x", "--fold", "k", "--weights", "fp8", *CORPUS)
    assert (result.exit_code, "do not go together" in result.stderr) == (2, True)
    assert not (tmp_path / "x").exists()
    assert TOKENS.min() > 0
