"""Calibrating compressed-tensors checkpoints of every scheme: what is observed is the quantized model, what is written is the same checkpoint."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from calibrate.checkpoint import write_checkpoint
from calibrate.collect import CollectRun, collect
from calibrate.corpus import plan_batches
from calibrate.engines import load_scales
from calibrate.model import SourceCheckpoint, load_model, probe_layout
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import Statistics
from calibrate.weights import convert_checkpoint
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint
from tests.weights import foreign
from tests.weights.compressed import SCHEMES, compressed, meant, quantized_input, scheme_of
from tests.weights.foreign import SHAPE, linears, rewrite

CORPUS = rows_corpus([24, 30, 17])
CONVERTED = {
    "awq": foreign.awq,
    "gptq": foreign.gptq,
    "gptq-asymmetric": lambda path: foreign.gptq(path, symmetric=False, group_size=64, dtype=torch.bfloat16),
}


def _config(path) -> dict:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def _group(module: str, path) -> dict:
    """The config group of a module, as the file has it."""
    groups = _config(path)["config_groups"]
    from compressed_tensors.quantization import QuantizationScheme

    parsed = {name: QuantizationScheme(**group) for name, group in groups.items()}
    chosen = scheme_of(module, parsed)
    return next(groups[name] for name, scheme in parsed.items() if scheme is chosen)


def _twin_statistics(path, twin, dtype: torch.dtype) -> Statistics:
    """The same model as dense weights, dequantized here, with activations quantized here."""
    tensors = load_file(path / "model.safetensors")
    modules = linears({f"{name.rpartition('.')[0]}.weight": None for name in tensors if name.endswith("weight_scale")})
    dense = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    dense |= {f"{module}.weight": meant(tensors, module, _group(module, path)).float() for module in modules}
    source = SourceCheckpoint.open(rewrite(path, twin, dense, quantization_config=None))
    model = load_model(source, device="cpu", dtype=dtype)
    for module in modules:
        inputs = _group(module, path)["input_activations"]
        if inputs:
            static = tensors.get(f"{module}.input_global_scale", tensors.get(f"{module}.input_scale"))
            static = None if static is None else static.float()
            model.get_submodule(module).register_forward_pre_hook(
                lambda _, args, inputs=inputs, static=static: quantized_input(args[0], inputs, static)
            )
    return collect(CollectRun(model, source, probe_layout(model), CORPUS, plan_batches(CORPUS, 64, pad_token_id=0)))


def _same(one: Statistics, other: Statistics) -> bool:
    pairs = ((one.layers[index][kind], other.layers[index][kind]) for index in one.layers for kind in one.layers[index])
    return all(np.array_equal(first.counts, second.counts) for first, second in pairs)


@pytest.fixture(scope="module")
def original():
    """Statistics of the model before quantization."""

    def of(folder) -> Statistics:
        return collect(collect_run(tiny_checkpoint(folder, "llama", **SHAPE), CORPUS))

    return of


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_counted_is_the_quantized_models_own(name, tmp_path, original):
    path = compressed(tmp_path / "model", name)
    found = collect(collect_run(path, CORPUS))
    assert _same(found, _twin_statistics(path, tmp_path / "twin", torch.float32))
    assert not _same(found, original(tmp_path / "original"))


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp8-static", "w8a8", "w4a16"])
def test_weights_do_not_depend_on_the_type_that_is_computed_in(name, scales, tmp_path):
    """In bf16 a weight is the fp32 one rounded once, wherever its scale was kept."""
    path = compressed(tmp_path / "model", name, scales=scales)
    tensors, source = load_file(path / "model.safetensors"), SourceCheckpoint.open(path)
    wide, narrow = (load_model(source, device="cpu", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in narrow.parameters() if parameter.is_floating_point() and parameter.ndim > 1} == {torch.bfloat16}
    for module in linears({f"{name.rpartition('.')[0]}.weight": None for name in tensors if name.endswith("weight_scale")}):
        exact = meant(tensors, module, _group(module, path))
        stored = exact if _group(module, path)["input_activations"] else exact.to(torch.bfloat16)
        assert torch.equal(wide.get_submodule(module).weight, stored.float()), module
        assert torch.equal(narrow.get_submodule(module).weight, stored.to(torch.bfloat16)), module


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """name → (source, what was written of it), every scheme calibrated, and two conversions."""
    made = {}
    for name in (*SCHEMES, *CONVERTED):
        folder = tmp_path_factory.mktemp(name)
        if name in CONVERTED:
            CONVERTED[name](folder / "foreign")
            path = convert_checkpoint(SourceCheckpoint.open(folder / "foreign"), folder / "model").path
        else:
            path = compressed(folder / "model", name)
        scales = solve(collect(collect_run(path, CORPUS)), PolicyOptions(granularity="head" if name == "w8a8" else "tensor"))
        made[name] = (path, write_checkpoint(SourceCheckpoint.open(path), scales, folder / "calibrated"))
    return made


@pytest.mark.parametrize("name", [*SCHEMES, *CONVERTED])
def test_the_config_is_merged_and_the_weights_are_links(name, written):
    path, result = written[name]
    before, after = _config(path), _config(result.path)
    scheme = after.pop("kv_cache_scheme")
    assert scheme["strategy"] == ("attn_head" if name == "w8a8" else "tensor")
    before.pop("kv_cache_scheme", None)
    assert after == before
    assert (path / "model.safetensors").samefile(result.path / "model-00001-of-00001.safetensors")


@pytest.mark.vllm
def test_vllm_reads_the_scales_back_beside_quantized_weights(written):
    names = list(written)
    readbacks = dict(zip(names, load_scales([written[name][1].path for name in names]), strict=True))
    loaded = {name for name, one in readbacks.items() if one.ok}
    assert all(len(readbacks[name].rows) == 9 for name in loaded)
    assert loaded >= {*CONVERTED, "fp8-dynamic", "w8a8", "w4a16", "w4a16-asymmetric", "w4a16-channel", "mixed"}
    assert "activation ordering" in readbacks["w4a16-ordered"].error
    assert "not divisible" in readbacks["fp8-odd-block"].error
    lacks = {"w8a16": "find a kernel", "nvfp4": "find a kernel", "fp8-block": "find a kernel", "fp8-static": "static_scaled_fp8_quant"}
    for name, said in lacks.items():
        assert readbacks[name].ok or (not torch.cuda.is_available() and said in readbacks[name].error), name
