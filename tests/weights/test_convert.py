"""AWQ, GPTQ and FP8 → compressed-tensors: every weight is the one that the codes mean, bit for bit, and what cannot be is refused in one line."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file

from calibrate.errors import CheckFailed, UsageError
from calibrate.model import SourceCheckpoint, load_model
from calibrate.weights import check_convertible, convert_checkpoint
from calibrate.weights.awq import AwqGemm
from tests.weights import foreign
from tests.weights.compressed import meant

CASES = {
    "awq": lambda path: foreign.awq(path),
    "awq-128": lambda path: foreign.awq(path, group_size=128),
    "awq-channel": lambda path: foreign.awq(path, group_size=-1),
    "awq-symmetric": lambda path: foreign.awq(path, symmetric=True, zero_point=False),
    "awq-bf16": lambda path: foreign.awq(path, dtype=torch.bfloat16, group_size=64),
    "awq-old-names": lambda path: foreign.awq(path, bits=None, w_bit=4, q_group_size=32) and _old_names(path),
    "gptq": lambda path: foreign.gptq(path),
    "gptq-v2": lambda path: foreign.gptq(path, v2=True),
    "gptq-asymmetric": lambda path: foreign.gptq(path, symmetric=False, group_size=64),
    "gptq-asymmetric-v2": lambda path: foreign.gptq(path, symmetric=False, group_size=128, v2=True),
    "gptq-8": lambda path: foreign.gptq(path, bits=8, group_size=128),
    "gptq-8-asymmetric": lambda path: foreign.gptq(path, bits=8, symmetric=False),
    "gptq-channel": lambda path: foreign.gptq(path, group_size=-1),
    "gptq-bf16": lambda path: foreign.gptq(path, dtype=torch.bfloat16, symmetric=False),
    "gptq-ordered": lambda path: foreign.gptq(path, desc_act=True),
    "gptq-ordered-asymmetric": lambda path: foreign.gptq(path, desc_act=True, symmetric=False, bits=8),
    "fp8": lambda path: foreign.fp8(path),
    "fp8-static": lambda path: foreign.fp8(path, static=True),
    "fp8-block": lambda path: foreign.fp8(path, block=(64, 64)),
    "fp8-odd-block": lambda path: foreign.fp8(path, block=(48, 96)),
}


def _old_names(path):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_the_one_that_the_codes_mean(case, tmp_path):
    """In the files, by formulas of our own, and in the model that transformers makes of them."""
    path = tmp_path / "foreign"
    known = CASES[case](path) or foreign.awq(tmp_path / "again", group_size=32)  # old names: the same weights
    converted = convert_checkpoint(SourceCheckpoint.open(path), tmp_path / "converted")
    assert converted.modules == len(known.weights) == 21
    config = json.loads((converted.path / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["quant_method"], config["quantization_status"]) == ("compressed-tensors", "compressed")
    assert set(config["ignore"]) == {"lm_head", "model.embed_tokens"}
    tensors = load_file(converted.path / "model.safetensors")
    for module, weight in known.weights.items():
        found = meant(tensors, module, group)
        assert found.dtype == weight.dtype
        assert torch.equal(found, weight), module
    before = load_file(path / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(before[name], tensors[name])
    model = load_model(SourceCheckpoint.open(converted.path), device="cpu", dtype=torch.float32)
    for module, weight in known.weights.items():
        assert torch.equal(model.get_submodule(module).weight, weight.float()), module


def test_a_vision_language_models_towers_are_loaded_as_they_are(tmp_path):
    """The config ignores them under the checkpoint's names, which are not those of transformers."""
    known = foreign.fp8(tmp_path / "foreign", vision_language="gemma3")
    path = convert_checkpoint(SourceCheckpoint.open(tmp_path / "foreign"), tmp_path / "converted").path
    model = load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    before, loaded = load_file(tmp_path / "foreign/model.safetensors"), model.state_dict()
    towers = [name for name in before if name.startswith("vision_tower.") and name.endswith("proj.weight")]
    assert len(towers) == 9
    assert all(torch.equal(loaded[f"model.{name}"], before[name].float()) for name in towers)
    for module, weight in known.weights.items():
        assert torch.equal(loaded[module.replace("language_model.model", "model.language_model") + ".weight"], weight.float()), module
    foreign.edit_config(path, quantization_config=json.loads((path / "config.json").read_text())["quantization_config"] | {"ignore": ["re:.*proj"]})
    with pytest.raises(UsageError, match="quantized weights that its quantization_config does not name"):
        load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)
    foreign.edit_config(path, quantization_config=json.loads((path / "config.json").read_text())["quantization_config"] | {"ignore": "x"})
    with pytest.raises(UsageError, match="ignore Input should be a valid list"):
        load_model(SourceCheckpoint.open(path), device="cpu", dtype=torch.float32)


def test_scales_symmetry_and_activations_are_told_as_they_are(tmp_path):
    wanted = {
        "awq": ("group", 32, False, None),
        "awq-symmetric": ("group", 32, True, None),
        "gptq": ("group", 32, True, None),
        "gptq-channel": ("channel", None, True, None),
        "fp8": ("tensor", None, True, ("token", True)),
        "fp8-static": ("tensor", None, True, ("tensor", False)),
        "fp8-block": ("block", None, True, ("group", True)),
    }
    for case, (strategy, size, symmetric, inputs) in wanted.items():
        CASES[case](tmp_path / case)
        made = convert_checkpoint(SourceCheckpoint.open(tmp_path / case), tmp_path / f"{case}-converted")
        (group,) = json.loads((made.path / "config.json").read_text())["quantization_config"]["config_groups"].values()
        weights, found = group["weights"], group["input_activations"]
        assert (weights["strategy"], weights["group_size"], weights["symmetric"]) == (strategy, size, symmetric), case
        assert (found and (found["strategy"], found["dynamic"])) == inputs, case
    tensors = load_file(tmp_path / "fp8-static-converted/model.safetensors")
    before = load_file(tmp_path / "fp8-static/model.safetensors")
    for name in (name for name in before if name.endswith("input_scale")):
        assert torch.equal(tensors[name], before[name].reshape(1))


def test_a_module_spread_over_files_and_old_kv_scales(tmp_path):
    known = foreign.gptq(tmp_path / "foreign", symmetric=False)
    foreign.edit_tensors(tmp_path / "foreign", lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}))
    foreign.shard(tmp_path / "foreign", lambda name: int(name.endswith(("scales", "qzeros"))))
    converted = convert_checkpoint(SourceCheckpoint.open(tmp_path / "foreign"), tmp_path / "converted")
    source = SourceCheckpoint.open(converted.path)
    assert not any("k_scale" in name for name in source.weight_map)
    model = load_model(source, device="cpu", dtype=torch.float32)
    for module, weight in known.weights.items():
        assert torch.equal(model.get_submodule(module).weight, weight.float())


def test_equal_input_gives_equal_bytes_and_other_files_come_along(tmp_path):
    foreign.awq(tmp_path / "foreign")
    (tmp_path / "foreign/README.md").write_text("card")
    (tmp_path / "foreign/quant_config.json").write_text("{}")  # AutoAWQ's own: no word of it is true of the result
    source = SourceCheckpoint.open(tmp_path / "foreign")
    first, second = (convert_checkpoint(source, tmp_path / name).path for name in ("first", "second"))
    names = sorted(path.name for path in first.iterdir())
    assert {"README.md", "tokenizer.json", "weights_provenance.json"} <= set(names)
    assert "quant_config.json" not in names
    assert len({(first / name).stat().st_mode for name in names}) == 1
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    record = json.loads((first / "weights_provenance.json").read_text())
    assert record["made"]["source"] == source.fingerprint


def _wrapped(tensors):
    tensors["model.layers.1.mlp.up_proj.qzeros"][0, 0] = -1  # every nibble 15


def _uneven(tensors):
    tensors["model.layers.0.self_attn.q_proj.g_idx"][:] = 0


def _settings(path, **config):
    foreign.gptq(path)
    foreign.edit_config(path, quantization_config=config)


UP = "model.layers.0.mlp.up_proj"
# name → (a checkpoint, what is done to its tensors, part of the message)
REFUSED = {
    "marlin": (lambda path: foreign.awq(path, version="marlin"), None, "version marlin"),
    "gemv": (lambda path: foreign.awq(path, version="GEMV"), None, "version gemv"),
    "awq 8 bits": (lambda path: foreign.awq(path, bits=8), None, "bits is 8: only 4 bits"),
    "no zeros": (foreign.awq, lambda tensors: tensors.pop(f"{UP}.qzeros"), "up_proj has no qzeros"),
    "scaled act": (foreign.awq, lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.ones(8)}), "belongs to no AWQ"),
    "wrapped zero": (lambda path: foreign.gptq(path, symmetric=False), _wrapped, "zero point 15"),
    "uneven groups": (lambda path: foreign.gptq(path, desc_act=True), _uneven, "groups of unequal size"),
    "3 bits": (lambda path: _settings(path, quant_method="gptq", bits=3, group_size=32), None, "bits is 3"),
    "group 0": (lambda path: _settings(path, quant_method="gptq", bits=4, group_size=0), None, "group_size is 0"),
    "other layout": (lambda path: foreign.gptq(path, checkpoint_format="marlin"), None, "checkpoint_format marlin"),
    "per layer": (lambda path: foreign.gptq(path, dynamic={"-:lm_head": {}}), None, "dynamic"),
    "lm_head": (lambda path: foreign.gptq(path, lm_head=True), None, "lm_head"),
    "wrong group": (foreign.gptq, lambda tensors: tensors.update({f"{UP}.scales": torch.ones(3, 256)}), "group size ask for"),
    "fp8 no scale": (foreign.fp8, lambda tensors: tensors.pop(f"{UP}.weight_scale"), "no weight_scale"),
    "fp8 other block": (lambda path: foreign.fp8(path, block=(64, 64), weight_block_size=[32, 64]), None, "are not those of"),
    "fp8 e5m2": (lambda path: foreign.fp8(path, fmt="e5m2"), None, "e4m3"),
    "nothing packed": (lambda path: _settings(path, quant_method="fp8"), None, "holds no weight of that format"),
    "other method": (lambda path: foreign.awq(path, quant_method="bitsandbytes"), None, "bitsandbytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_equal_is_refused_in_one_line(case, tmp_path):
    make, edit, message = REFUSED[case]
    make(tmp_path / "foreign")
    if edit:
        foreign.edit_tensors(tmp_path / "foreign", edit)
    with pytest.raises(UsageError, match=message) as refusal:
        convert_checkpoint(SourceCheckpoint.open(tmp_path / "foreign"), tmp_path / "converted")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def _to(change):
    return lambda tensors, name: tensors.update({name: change(tensors[name]).contiguous()})


def _head(tensors, name):
    module = name.rpartition(".")[0]
    tensors |= {f"lm_head.{part.rpartition('.')[2]}": tensor.clone() for part, tensor in tensors.items() if part.startswith(f"{module}.")}


WRONG = {
    "narrow": _to(lambda tensor: tensor[..., :4]),
    "short": _to(lambda tensor: tensor[:2]),
    "empty": _to(lambda tensor: tensor[:0]),
    "one row": _to(lambda tensor: tensor[0]),
    "one more dimension": _to(lambda tensor: tensor[None]),
    "float64": _to(lambda tensor: tensor.double()),
    "negative": _to(lambda tensor: -1 - tensor),
    "E8M0": _to(lambda tensor: tensor.float().to(torch.float8_e8m0fnu)),
    "two weights": lambda tensors, name: tensors.update({f"{UP}.weight": torch.zeros(256, 128)}),
    "head": _head,
}
SHAPES, TYPES = ("narrow", "short", "empty", "one row", "one more dimension"), ("float64", "E8M0")
DAMAGED = [
    *(("gptq", part, wrong) for part in ("qzeros", "scales") for wrong in (*SHAPES, *TYPES)),
    *(("gptq", "g_idx", wrong) for wrong in ("short", "empty", "one more dimension", "float64", "negative")),
    *(("gptq", "qweight", wrong) for wrong in (*SHAPES, "float64", "two weights", "head")),
    *(("awq", part, wrong) for part in ("qzeros", "scales") for wrong in (*SHAPES, *TYPES)),
    *(("awq", "qweight", wrong) for wrong in (*SHAPES, "two weights", "head")),
    *(("fp8", "weight_scale", wrong) for wrong in TYPES),
    *(("fp8-block", "weight_scale_inv", wrong) for wrong in ("short", "one row", "one more dimension", *TYPES)),
    *(("fp8-block", "weight", wrong) for wrong in ("one row", "one more dimension", "head")),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """Undamaged checkpoints and their tensors, by case."""
    made = {}
    for case in ("gptq", "awq", "fp8", "fp8-block"):
        path = tmp_path_factory.mktemp(case)
        CASES[case](path)
        made[case] = path, load_file(path / "model.safetensors")
    return made


@pytest.mark.parametrize(("case", "part", "wrong"), DAMAGED)
def test_tensors_that_do_not_fit_together_are_one_line(case, part, wrong, whole, tmp_path):
    """Whatever a file holds: shapes, types, groups that are none, modules that have no place."""
    path, tensors = whole[case]
    damaged = dict(tensors)
    WRONG[wrong](damaged, f"{UP}.{part}")
    foreign.rewrite(path, tmp_path / "foreign", damaged)
    with pytest.raises(UsageError, match=r"lm_head" if wrong == "head" else UP) as refusal:
        convert_checkpoint(SourceCheckpoint.open(tmp_path / "foreign"), tmp_path / "converted")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *(("gptq", {"bits": bits}) for bits in ("4", 4.0, True, [4], None)),
        *(("gptq", {"group_size": size}) for size in ("32", 32.0, True, 0, -2, 33, 10**30, None)),
        *(("awq", {"bits": bits}) for bits in (4.0, 3)),
        *(("fp8-block", {"weight_block_size": size}) for size in (64, "64", [64], [0, 64], [-64, 64], ["64", "64"], [64.0, 64.0], [64] * 3, {}, [])),
        *(("fp8", {"activation_scheme": value}) for value in (3, [])),
    ],
)
def test_settings_of_odd_shape_are_one_line(case, settings, whole, tmp_path):
    path, tensors = whole[case]
    config = json.loads((path / "config.json").read_text())["quantization_config"] | settings
    foreign.rewrite(path, tmp_path / "foreign", tensors, quantization_config=config)
    with pytest.raises(UsageError) as refusal:
        check_convertible(SourceCheckpoint.open(tmp_path / "foreign"))
    assert "\n" not in str(refusal.value)


def test_a_disk_that_fills_is_one_line_and_nothing_is_left(whole, tmp_path):
    source, _ = whole["awq"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot write .*File too large"):
            convert_checkpoint(SourceCheckpoint.open(source), tmp_path / "converted")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_wrong_conversion_is_seen_and_nothing_is_written(tmp_path, monkeypatch):
    foreign.awq(tmp_path / "foreign")
    right = AwqGemm.convert

    def wrong(self, tensors, scheme):
        made = right(self, tensors, scheme)
        made["weight_packed"][3, 0] ^= 16  # one code off by one
        return made

    monkeypatch.setattr(AwqGemm, "convert", wrong)
    with pytest.raises(CheckFailed, match="would not have the same weights"):
        convert_checkpoint(SourceCheckpoint.open(tmp_path / "foreign"), tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_activation_order_is_exact_but_not_for_vllm(tmp_path):
    foreign.gptq(tmp_path / "foreign", desc_act=True)
    source = SourceCheckpoint.open(tmp_path / "foreign")
    check_convertible(source)
    with pytest.raises(UsageError, match="activation order"):
        check_convertible(source, for_vllm=True)
    assert convert_checkpoint(source, tmp_path / "converted").reordered


def test_groups_made_before_ordering_are_in_order(tmp_path):
    foreign.gptq(tmp_path / "foreign", desc_act=False)
    foreign.edit_config(
        tmp_path / "foreign", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    )
    check_convertible(SourceCheckpoint.open(tmp_path / "foreign"), for_vllm=True)
