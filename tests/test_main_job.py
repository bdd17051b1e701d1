"""The main job on the embedded default model, as `make calibrate` runs it: real weights, real text, real vLLM."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from calibrate.cli import main


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
