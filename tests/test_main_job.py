"""The main job on the embedded default model, as `make calibrate` runs it: real weights, real text, real vLLM."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from calibrate.cli import main
from tests.real_models import gemma, qwen_coder


@pytest.mark.vllm
@pytest.mark.weights
def test_default_job_ends_with_thirty_layers_read_back(tmp_path):
    output = tmp_path / "calibrated"
    result = CliRunner().invoke(main, ["run", "-o", str(output), "--samples", "8", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    readback = report["readback"]
    assert readback["checkpoint"] == str(output.resolve())
    loaded = {(row["layer"], row["kind"]): row["loaded"] for row in readback["rows"]}
    assert len(loaded) == 90  # q, k and v of 30 layers
    assert all(row["ok"] for row in readback["rows"])
    written = load_file(output / "kv_scales.safetensors")
    assert len(written) == 90
    for name, scale in written.items():
        layer, kind = name.removesuffix("_scale").rsplit(".", 1)
        assert np.float32(loaded[layer, kind][0]) == scale[0]
    assert report["counted"]["samples"] == 8
    assert report["summary"]["k"]["saturated"] == 0
    assert 5 < report["summary"]["k"]["amax"][0] < report["summary"]["k"]["amax"][1] < 60


@pytest.mark.vllm
@pytest.mark.weights
@pytest.mark.parametrize(
    ("model", "layers", "family", "amax"),
    [
        (qwen_coder, 24, "qwen2", (150, 250)),  # QKV biases: K far beyond the others'
        (gemma, 18, "gemma3", (15, 150)),  # sliding windows and QK-norm, head_dim 256
    ],
)
def test_two_more_families_with_real_weights(tmp_path, model, layers, family, amax):
    output = tmp_path / "calibrated"
    words = ["run", str(model()), "-o", str(output), "--samples", "4", "--sequence-length", "512", "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert f"recipe {family}" in result.stderr
    report = json.loads(result.stdout)
    rows = report["readback"]["rows"]
    assert len(rows) == 3 * layers
    assert all(row["ok"] for row in rows)
    written = load_file(output / "kv_scales.safetensors")
    assert {f"{row['layer'].removesuffix('.attn')}.{row['kind']}_scale" for row in rows} == set(written)
    assert amax[0] < report["summary"]["k"]["amax"][1] < amax[1]
    assert report["summary"]["k"]["saturated"] == 0
