import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from calibrate.engines.compare import compare_scales
from calibrate.engines.readback import Readback

from .tiny import scales_for


def record(layer: int, scales: dict[str, list[float]], kv_heads: int = 2, **changes) -> dict:
    return {
        "module": f"model.layers.{layer}.self_attn.attn",
        "scales": scales,
        "floats": {kind: max(values) for kind, values in scales.items()},
        "num_kv_heads": kv_heads,
        "caches": True,
    } | changes


def loaded(scales: dict[str, np.ndarray], layer: int) -> dict[str, list[float]]:
    return {kind: [float(x) for x in scales[f"model.layers.{layer}.self_attn.{kind}_scale"]] for kind in "kvq"}


@pytest.fixture
def per_tensor():
    scales = scales_for("tensor")
    return scales, [record(layer, loaded(scales, layer)) for layer in range(3)]


def failures(scales, ranks, strategy="tensor"):
    return {(row.layer, row.rank, row.kind): row.reason for row in compare_scales(scales, ranks, strategy) if not row.ok}


def test_equal_per_tensor(per_tensor):
    scales, records = per_tensor
    rows = compare_scales(scales, [records, records], "tensor")
    assert len(rows) == 2 * 3 * 3
    assert all(row.ok and row.reason == "" and row.loaded == row.expected for row in rows)


def test_one_bit_differs(per_tensor):
    scales, records = per_tensor
    name = "model.layers.1.self_attn.v_scale"
    scales[name] = np.nextafter(scales[name], np.float32(2))
    assert failures(scales, [records]) == {("model.layers.1.self_attn", 0, "v"): "differs"}


def test_stayed_at_one(per_tensor):
    scales, records = per_tensor
    records[2] = record(2, {"k": [1.0], "v": [1.0], "q": [1.0]})
    assert set(failures(scales, [records]).values()) == {"not loaded (stayed 1.0)"}


def test_file_without_one_layer_or_one_kind(per_tensor):
    scales, records = per_tensor
    del scales["model.layers.0.self_attn.q_scale"]
    for kind in "qkv":
        del scales[f"model.layers.2.self_attn.{kind}_scale"]
    found = failures(scales, [records])
    assert found.pop(("model.layers.0.self_attn", 0, "q")) == "no q_scale in the file"
    assert found == {("model.layers.2.self_attn.attn", 0, kind): "vLLM layer without scales in the file" for kind in "kvq"}


def test_engine_without_one_layer(per_tensor):
    scales, records = per_tensor
    found = failures(scales, [records, records[:2]])
    assert found == {("model.layers.2.self_attn", 1, kind): "layer missing in vLLM" for kind in "kvq"}


def test_encoder_attention_needs_no_scales(per_tensor):
    scales, records = per_tensor
    tower = record(0, {kind: [1.0] for kind in "kvq"}, module="vision.layers.0.attn", caches=False)
    assert failures(scales, [[tower, *records]]) == {}


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "not finite"), (np.inf, "not finite"), (0.0, "not positive"), (-0.5, "not positive")])
def test_bad_values_fail_even_when_loaded_as_they_are(per_tensor, value, reason):
    scales, records = per_tensor
    scales["model.layers.0.self_attn.k_scale"] = np.array([value], np.float32)
    records[0] = record(0, loaded(scales, 0))
    assert failures(scales, [records]) == {("model.layers.0.self_attn", 0, "k"): f"{reason} in the file"}
    scales["model.layers.0.self_attn.k_scale"] = np.array([0.25], np.float32)
    assert failures(scales, [records]) == {("model.layers.0.self_attn", 0, "k"): f"{reason} in the engine"}


def test_the_float_twin_must_follow(per_tensor):
    scales, records = per_tensor
    records[1]["floats"]["k"] = 1.0
    assert failures(scales, [records]) == {("model.layers.1.self_attn", 0, "k"): "_k_scale_float is 1.0, not the tensor's maximum"}


@pytest.mark.parametrize(("world", "here"), [(1, 2), (2, 1), (4, 1)])
def test_heads_are_sharded_or_replicated(world, here):
    """4 query and 2 KV heads: a query scale is its group's maximum; 4 ranks hold each KV head twice."""
    scales = scales_for("attn_head", layers=1)
    k, v, q = (scales[f"model.layers.0.self_attn.{kind}_scale"] for kind in "kvq")
    groups = q.reshape(2, 2).max(axis=1)
    ranks = []
    for rank in range(world):
        heads = slice(rank * here, (rank + 1) * here) if world <= 2 else slice(rank // 2, rank // 2 + 1)
        ranks.append([record(0, {"k": k[heads].tolist(), "v": v[heads].tolist(), "q": groups[heads].tolist()}, here)])
    assert failures(scales, ranks, "attn_head") == {}
    if world > 1:
        assert set(failures(scales, ranks[::-1], "attn_head").values()) == {"differs"}


@pytest.mark.vllm
@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 2, 2), (9, 3, 3), (4, 1, 2), (4, 1, 4), (8, 2, 8), (32, 8, 4)])
def test_vllm_s_own_loader_puts_the_same_slice_on_each_rank(monkeypatch, heads, kv_heads, world):
    """No engine: the loader that vLLM gives its scale parameters, told which rank it is."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as theirs

    scales = scales_for("attn_head", layers=1, heads=heads, kv_heads=kv_heads)
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    config = SimpleNamespace(kv_cache_scheme=scheme, total_num_heads=heads, total_num_kv_heads=kv_heads)
    monkeypatch.setattr(theirs, "get_tensor_model_parallel_world_size", lambda: world)
    here, ranks = max(1, kv_heads // world), []
    for rank in range(world):
        monkeypatch.setattr(theirs, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = torch.nn.Module()
        layer.num_kv_heads = here
        theirs.CompressedTensorsKVCacheMethod.create_weights(SimpleNamespace(quant_config=config), layer)
        for kind in "qkv":
            parameter = getattr(layer, f"{kind}_scale")
            parameter.weight_loader(parameter, torch.from_numpy(scales[f"model.layers.0.self_attn.{kind}_scale"]))
        ranks.append([record(0, {kind: getattr(layer, f"{kind}_scale").tolist() for kind in "kvq"}, here)])
    assert failures(scales, ranks, "attn_head") == {}
    assert set(failures(scales, ranks[1:] + ranks[:1], "attn_head").values()) == ({"differs"} if kv_heads > 1 else set())


def test_shapes_that_cannot_be():
    scales = scales_for("attn_head", layers=1)
    records = [record(0, loaded(scales_for("attn_head", layers=1), 0), 3)]
    assert set(failures(scales, [records], "attn_head").values()) == {"file holds 2 KV heads, vLLM has 3 on each of 1 ranks"}
    assert failures(scales, [records], "tensor")["model.layers.0.self_attn", 0, "q"] == "file holds 4 values, strategy tensor needs 1"


def test_as_dict_is_exact_strict_json(per_tensor):
    scales, records = per_tensor
    scales["model.layers.0.self_attn.k_scale"] = np.array([np.nan], np.float32)
    readback = Readback("folder", "vllm 0", "fp8", "FLASH_ATTN", 1, compare_scales(scales, [records], "tensor"), ("a",), 1.0)
    data = json.loads(json.dumps(readback.as_dict(), allow_nan=False))
    assert (data["schema"], data["ok"], len(data["rows"])) == ("kv-calibrate/readback/1", False, 9)
    assert data["rows"][0]["expected"] == ["nan"]
    assert np.float32(data["rows"][1]["expected"][0]) == scales["model.layers.0.self_attn.v_scale"][0]


def test_nothing_compared_is_not_ok():
    assert not Readback("folder", "vllm 0", "fp8", "", 1, (), (), 1.0).ok
