"""SGLang's `--quantization-param-path`: a JSON file with one scale for K and V of each layer, for each tensor-parallel rank."""

from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import write_json
from calibrate.checkpoint.exports.base import Exported, ExportOptions, Given, Loss, check_scalar_e4m3, latent_layers
from calibrate.errors import UsageError
from calibrate.model.source import layer_count_of
from calibrate.scales import FORMATS, LayerScales, Population, report
from calibrate.statistics import Statistics

_NAME = "sglang-json"


class SglangJson:
    """Writes the larger of each layer's K and V scale: neither saturates where it did not before, the other loses a little resolution."""

    folder = False

    def export(self, given: Given, output: Path, options: ExportOptions, *, force: bool) -> Exported:
        check_scalar_e4m3(given, _NAME)
        if latent := latent_layers(given):
            raise UsageError(f"layer {latent[0]} caches a compressed latent (MLA), for which no reader of {_NAME} takes scales")
        losses, notes = _losses(given), []
        if given.statistics is None:
            notes.append("no statistics were kept, so what sharing one scale costs was not computed")
        if options.sixteen_bit:
            notes.append(f"layers {options.sixteen_bit} were to keep 16 bits, which this form cannot say: SGLang puts them in FP8")
        write_json(output, content(given, options))
        return Exported(_NAME, output, len(given.scales.layers), losses=losses, notes=tuple(notes))


def content(given: Given, options: ExportOptions) -> dict[str, Any]:
    """The file. Raises UsageError where a layer has no scale: SGLang refuses such a file in its log and runs at 1.0."""
    text = given.source.text_config
    scales = {layer.index: float(_shared(layer)) for layer in given.scales.layers}
    count = layer_count_of(text)
    if count is None:
        raise UsageError(f"{given.source.path}/config.json does not say how many layers the model has, and {_NAME} must name every one")
    missing = sorted(set(range(count)) - scales.keys())
    if missing:
        raise UsageError(f"{_NAME} must name every layer, and layer {missing[0]} of {given.source.path} has no KV cache ({len(missing)} such layers)")
    layers = {str(index): scale for index, scale in sorted(scales.items())}
    ranks = {str(rank): layers for rank in range(options.tensor_parallel_size)}
    model_type = text.get("model_type") or given.source.model_type
    return {"model_type": model_type, "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks}}


def _shared(layer: LayerScales) -> np.float32:
    return max(layer.k[0], layer.v[0])


def _losses(given: Given) -> tuple[Loss, ...]:
    if given.statistics is None:
        return ()
    return tuple(_loss(layer, given.statistics) for layer in given.scales.layers if {"k", "v"} <= given.statistics.layers[layer.index].keys())


def _loss(layer: LayerScales, statistics: Statistics) -> Loss:
    shared = np.array([_shared(layer)], dtype=np.float32)
    own, common, saturated = {}, {}, {}
    for kind, scale in (("k", layer.k), ("v", layer.v)):
        counts = statistics.layers[layer.index][kind].counts.sum(axis=0, keepdims=True)
        population = Population.of(counts, statistics.values())
        at_own, at_shared = (report(population, one, FORMATS["e4m3"]) for one in (scale, shared))
        own[kind], common[kind], saturated[kind] = float(at_own.snr_db[0]), float(at_shared.snr_db[0]), float(at_shared.saturated[0])
    return Loss(layer.index, float(layer.k[0]), float(layer.v[0]), float(shared[0]), own, common, saturated)
