"""The whole engine: real `vllm.LLM` starts, is asked, generates. Every start is half a minute: other cases are in test_light."""

import json

import numpy as np
import pytest

from calibrate.engines import verify_checkpoint
from calibrate.engines.host import check_parallel, choose_kv_dtype, read_config, uses_cuda, vllm_distribution
from calibrate.errors import CheckFailed, HostError

from .tiny import calibrated, rewrite_scales, scales_for, tiny_llama

pytestmark = pytest.mark.vllm


def test_per_tensor_loads_runs_and_reports(llama, tmp_path):
    folder = calibrated(llama, tmp_path / "tensor", scales_for("tensor"), "tensor")
    readback = verify_checkpoint(folder)
    assert readback.ok, readback.failures
    assert len(readback.rows) == 9
    choice = choose_kv_dtype(read_config(folder), uses_cuda(vllm_distribution()))
    assert readback.kv_cache_dtype == choice.kv_cache_dtype
    assert not choice.note or choice.note in readback.notes
    assert any("generated 4 tokens" in note for note in readback.notes)
    assert json.loads(json.dumps(readback.as_dict(), allow_nan=False))["engine"] == vllm_distribution()


def test_per_head_on_two_ranks(llama, tmp_path):
    try:
        check_parallel(2, uses_cuda(vllm_distribution()))
    except HostError as error:
        pytest.skip(str(error))
    scales = scales_for("attn_head")
    readback = verify_checkpoint(calibrated(llama, tmp_path / "head", scales, "attn_head"), tensor_parallel_size=2)
    assert readback.ok, readback.failures
    held = {(row.rank, row.kind): row.loaded for row in readback.rows if row.layer == "model.layers.0.self_attn"}
    k, q = (scales[f"model.layers.0.self_attn.{kind}_scale"] for kind in "kq")
    assert [held[rank, "k"] for rank in (0, 1)] == [(float(k[0]),), (float(k[1]),)]
    assert [held[rank, "q"] for rank in (0, 1)] == [(float(q[:2].max()),), (float(q[2:].max()),)]


def test_one_kv_head_is_on_both_ranks(tmp_path):
    try:
        check_parallel(2, uses_cuda(vllm_distribution()))
    except HostError as error:
        pytest.skip(str(error))
    scales = scales_for("attn_head", kv_heads=1)
    folder = calibrated(tiny_llama(tmp_path / "model", kv_heads=1), tmp_path / "head", scales, "attn_head")
    readback = verify_checkpoint(folder, tensor_parallel_size=2)
    assert readback.ok, readback.failures
    held = {(row.rank, row.kind): row.loaded for row in readback.rows if row.layer == "model.layers.1.self_attn"}
    expected = {kind: (float(scales[f"model.layers.1.self_attn.{kind}_scale"].max()),) for kind in "kvq"}
    assert held == {(rank, kind): expected[kind] for rank in (0, 1) for kind in "kvq"}


def test_removed_nan_and_zero_name_their_layers_whether_or_not_vllm_runs_them(llama, tmp_path):
    scales = scales_for("tensor")
    folder = calibrated(llama, tmp_path / "spoilt", scales, "tensor")
    spoilt = {name: value for name, value in scales.items() if "layers.0." not in name}
    spoilt["model.layers.1.self_attn.k_scale"] = np.array([np.nan], np.float32)
    spoilt["model.layers.2.self_attn.v_scale"] = np.zeros(1, np.float32)
    rewrite_scales(folder, spoilt)
    readback = verify_checkpoint(folder)
    assert {(row.layer, row.kind, row.reason) for row in readback.failures} == {
        *(("model.layers.0.self_attn.attn", kind, "vLLM layer without scales in the file") for kind in "kvq"),
        ("model.layers.1.self_attn", "k", "not finite in the file"),
        ("model.layers.2.self_attn", "v", "not positive in the file"),
    }


def test_refusal_is_one_clear_line(llama, tmp_path):
    scales = scales_for("tensor") | {"model.layers.0.self_attn.rotary.k_scales": np.ones(1, np.float32)}
    with pytest.raises(CheckFailed, match=r"There is no module or parameter named .*; its log: ") as caught:
        verify_checkpoint(calibrated(llama, tmp_path / "refused", scales, "tensor"))
    assert "\n" not in str(caught.value)


@pytest.mark.weights
def test_real_smollm2_all_thirty_layers(tmp_path):
    from calibrate.model.default import default_model

    try:
        source = default_model()
    except HostError as error:
        pytest.skip(f"the default model's weights are not here: {error}")
    scales = scales_for("tensor", layers=30)
    readback = verify_checkpoint(calibrated(source, tmp_path / "smollm2", scales, "tensor"))
    assert readback.ok, readback.failures
    assert len({row.layer for row in readback.rows}) == 30
    assert len(readback.rows) == 90
