"""AutoAWQ, GPTQ and FP8 checkpoints → compressed-tensors, whose KV scales vLLM loads. Each weight must be equal before and after."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open
from safetensors.torch import save_file

from calibrate.artefact import write_json
from calibrate.checkpoint.place import check_target, folder_in_the_making
from calibrate.errors import CheckFailed, UsageError
from calibrate.model import SourceCheckpoint
from calibrate.model.dequantize import dequantize_blocks
from calibrate.model.source import INDEX_FILE
from calibrate.model.weights import EARLIER_SCALES
from calibrate.progress import Meter, meter, note
from calibrate.weights.awq import AwqGemm
from calibrate.weights.fp8 import Fp8
from calibrate.weights.gptq import Gptq
from calibrate.weights.packing import Facts, WeightFormat
from calibrate.weights.quantize import bring_others, open_to_all
from calibrate.weights.record import write_record

_NO_LINEAR = {"lm_head", "embed_out", "embed_tokens", "wte", "word_embeddings"}
FORMATS: dict[str, type[WeightFormat]] = {"awq": AwqGemm, "gptq": Gptq, "fp8": Fp8}


@dataclass(frozen=True)
class Converted:
    """A converted checkpoint on disk: `modules` weights were compared, all equal. `reordered`: its columns are in activation order."""

    path: Path
    method: str
    modules: int
    symmetric: bool
    reordered: bool
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class _Plan:
    """What is known before anything is written. `modules`: module → its tensors' full names by part."""

    form: WeightFormat
    scheme: QuantizationScheme
    modules: dict[str, dict[str, str]]
    ignored: list[str]


class _Weights:
    """Tensors of a checkpoint, each read when it is asked for."""

    def __init__(self, source: SourceCheckpoint) -> None:
        self._files = {name: safe_open(source.path / name, framework="pt") for name in source.headers}
        self._map = source.weight_map

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[self._map[name]].get_tensor(name)

    def module(self, parts: dict[str, str]) -> dict[str, torch.Tensor]:
        return {part: self[name] for part, name in parts.items()}


def convertible(source: SourceCheckpoint) -> bool:
    """Whether the weights are in a format that is converted."""
    return str(source.quantization.get("quant_method") or "").lower() in FORMATS


def made_from(source: SourceCheckpoint) -> dict[str, Any]:
    """What decides the result."""
    return {"source": source.fingerprint, "converted": source.quantization}


def check_convertible(source: SourceCheckpoint, *, for_vllm: bool = False) -> None:
    """Raise UsageError for what cannot be converted exactly and, `for_vllm`, for what vLLM would not load then. Reads scales and zero points."""
    weights = _plan(source, _Weights(source)).scheme.weights
    if for_vllm and weights.actorder is not None:
        raise UsageError(
            f"{source.path} has its columns in activation order (desc_act with g_idx), and vLLM 0.32 and newer loads no such compressed-tensors "
            "checkpoint: quantize the original with desc_act off or static groups, or convert it for other engines (kv-calibrate convert)"
        )


def convert_checkpoint(source: SourceCheckpoint, output: Path, *, force: bool = False) -> Converted:
    """Write `source` with compressed-tensors weights. The output is absent or complete at every moment; scales keep their type.

    Raises:
        UsageError: a format or a case that cannot be converted exactly, or an output that may not be written.
        CheckFailed: a weight came out different; nothing is written.
    """
    check_target(source.path, output, force=force)
    weights = _Weights(source)
    plan = _plan(source, weights)
    method = plan.form.name
    note(f"converting {source.path} from {method} to compressed-tensors; every weight is compared")
    quantization = _quantization_config(plan)
    with folder_in_the_making(output) as making, meter("converting", len(plan.modules), "modules") as progress:
        placed: dict[str, str] = {}
        sizes = 0
        for file, tensors in _shards(source, weights, plan, progress):
            save_file(tensors, making / file, metadata={"format": "pt"})
            placed |= dict.fromkeys(tensors, file)
            sizes += sum(tensor.nbytes for tensor in tensors.values())
        if source.indexed:
            write_json(making / INDEX_FILE, {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(placed.items()))})
        write_json(making / "config.json", _without_old(source.config) | {"quantization_config": quantization})
        open_to_all(making)
        bring_others(source, making)
        write_record(making, made_from(source), {"method": method, "modules_compared": len(plan.modules)})
    before, after = (sum((where / name).stat().st_size for name in source.headers) for where in (source.path, output))
    symmetric, reordered = bool(plan.scheme.weights.symmetric), plan.scheme.weights.actorder is not None
    return Converted(output, method, len(plan.modules), symmetric, reordered, before, after)


def _plan(source: SourceCheckpoint, weights: _Weights) -> _Plan:
    method = str(source.quantization.get("quant_method") or "").lower()
    if method not in FORMATS:
        raise UsageError(f"{source.path} has quant_method {method or 'none'}: {', '.join(FORMATS)} are converted to compressed-tensors")
    form = FORMATS[method](source.quantization, f"{source.path}/config.json")
    entries = {name: entry for header in source.headers.values() for name, entry in json.loads(header).items() if name != "__metadata__"}
    keys = [name for name, entry in entries.items() if name.endswith(f".{form.key}") and entry["dtype"] in form.types[form.key]]
    if not keys:
        raise UsageError(f"{source.path} says {method}, but holds no {form.key} of that format")
    modules, facts = {}, Facts()
    for key in keys:
        module = key.removesuffix(f".{form.key}")
        parts = {part: f"{module}.{part}" for part in form.types if f"{module}.{part}" in entries}
        _check_module(module, form, entries)
        modules[module] = parts
        small = weights.module({part: name for part, name in parts.items() if name != key})
        facts |= form.examine(module, entries[key]["shape"], small)
    taken = {name for parts in modules.values() for name in parts.values()}
    for name in entries:
        if name not in taken and name.rpartition(".")[2] in ("qweight", "qzeros", "scales", "weight_scale_inv"):
            raise UsageError(
                f"{source.path}: {name} belongs to no {form.name} layer, and compressed-tensors has no place for it: calibrate the original"
            )
    flat = (name.removesuffix(".weight") for name, entry in entries.items() if name.endswith(".weight") and len(entry["shape"]) == 2)
    return _Plan(form, form.scheme(facts), modules, sorted({"lm_head", *(module for module in flat if module not in modules)}))


def _check_module(module: str, form: WeightFormat, entries: dict[str, dict[str, Any]]) -> None:
    """Raise UsageError for a module that compressed-tensors has no place for, or whose tensors are not of the format's types."""
    if module.rpartition(".")[2] in _NO_LINEAR:
        raise UsageError(f"{module} is quantized, and vLLM loads no quantized embeddings or heads from compressed-tensors: calibrate the original")
    if form.key != "weight" and f"{module}.weight" in entries:
        raise UsageError(f"{module} has both a weight and a {form.key}: which of them is meant cannot be known")
    for part, types in form.types.items():
        found = entries.get(f"{module}.{part}", {}).get("dtype")
        if found is not None and found not in types:
            raise UsageError(f"{module}.{part} is of type {found}, {form.name} keeps {' or '.join(types)} there: this is not converted")
    shape = entries[f"{module}.{form.key}"]["shape"]
    if len(shape) != 2 or 0 in shape:
        raise UsageError(f"{module}.{form.key} has the shape {shape}: only matrices are converted")


def _quantization_config(plan: _Plan) -> dict[str, Any]:
    whole = QuantizationConfig(
        config_groups={"group_0": plan.scheme}, ignore=plan.ignored, format=plan.scheme.format, quantization_status="compressed"
    )
    return json.loads(whole.model_dump_json())


def _shards(source: SourceCheckpoint, weights: _Weights, plan: _Plan, progress: Meter) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Every file of the source with what it becomes: a module goes where its `key` was, other tensors stay, KV scales of the old format go."""
    taken = {name for parts in plan.modules.values() for name in parts.values()}
    homes = {parts[plan.form.key]: module for module, parts in plan.modules.items()}
    for file in source.headers:
        made: dict[str, torch.Tensor] = {}
        for name in (name for name, home in source.weight_map.items() if home == file):
            if name in homes:
                made |= {f"{homes[name]}.{part}": tensor for part, tensor in _convert(homes[name], weights, plan).items()}
                progress.advance(1)
            elif name not in taken and not EARLIER_SCALES.search(name):
                made[name] = weights[name]
        yield file, made


def _convert(module: str, weights: _Weights, plan: _Plan) -> dict[str, torch.Tensor]:
    """One module, and the proof: its weight by the old format's formula and by compressed-tensors, bit for bit."""
    tensors = weights.module(plan.modules[module])
    made = plan.form.convert(tensors, plan.scheme)
    before = plan.form.dequantize(tensors)
    if plan.scheme.weights.strategy == "block":
        after = dequantize_blocks(made["weight"], made["weight_scale"], plan.scheme)
    else:
        after = BaseCompressor.get_value_from_registry(plan.scheme.format).decompress(made, plan.scheme)["weight"]
    if before.dtype != after.dtype or before.shape != after.shape or not torch.equal(_bits(before), _bits(after)):
        raise CheckFailed(f"{module} would not have the same weights as compressed-tensors: nothing was written; please report this checkpoint")
    return made


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """Compared as numbers, with -0.0 and 0.0 apart and NaN equal to itself."""
    return weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])


def _without_old(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without its quantization_config, which may lie in its text part."""
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = {name: value for name, value in kept["text_config"].items() if name != "quantization_config"}
    return kept
