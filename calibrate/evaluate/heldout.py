"""What each variant's scales do to text that no calibration saw: exact error per layer and head, and the error of the attention's output."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
from calibrate.engines.session import Variant
from calibrate.evaluate.results import HeldOut
from calibrate.model import CacheLayout
from calibrate.model.attention import wrapped_attention
from calibrate.scales import FORMATS, Population, report
from calibrate.statistics import Statistics

Errors = dict[str, dict[int, float]]  # variant → layer → ‖o − ô‖/‖o‖


def held_out(
    statistics: Statistics, variants: Sequence[Variant], *, calibration: Statistics | None = None, attention: Errors | None = None
) -> tuple[HeldOut, ...]:
    """One row for each variant with scales, layer and kind that was observed, exact from the code counts.

    Args:
        statistics: of the held-out text. calibration: of the text that the scales were solved from, to show how far the ranges grew.
        attention: from `attention_errors`.
    """
    values = statistics.values()
    rows = []
    for index, kinds in statistics.layers.items():
        for kind, seen in kinds.items():
            population = Population.of(seen.counts, values)
            before = _amax(calibration, index, kind)
            for variant in variants:
                if variant.scales is not None:
                    error = None if attention is None or kind != "k" else attention.get(variant.name, {}).get(index)
                    rows.append(_row(population, variant, index, kind, before, error))
    order = {variant.name: place for place, variant in enumerate(variants)}
    return tuple(sorted(rows, key=lambda row: order[row.variant]))


def _row(population: Population, variant: Variant, index: int, kind: str, before: float | None, error: float | None) -> HeldOut:
    scales = variant.scales
    scale = dict(next(layer for layer in scales.layers if layer.index == index).items())[kind]
    fmt = FORMATS[scales.options.number_format]
    result = report(population, np.broadcast_to(scale, len(population.counts)), fmt)
    elements, nonzero = population.counts.sum(axis=1), population.counts[:, population.values > 0].sum(axis=1)
    return HeldOut(
        variant=variant.name,
        layer=index,
        kind=kind,
        scale=tuple(scale.tolist()),
        amax=tuple(population.amax.tolist()),
        calibration_amax=before,
        snr_db=_decibels(population.energy.sum(), result.squared_error.sum()),
        head_snr_db=tuple(_decibels(*pair) for pair in zip(population.energy, result.squared_error, strict=True)),
        saturated=float((result.saturated * elements).sum() / max(elements.sum(), 1)),
        underflow=float((result.underflow * nonzero).sum() / max(nonzero.sum(), 1)),
        attention_error=error,
    )


def _decibels(energy: float, error: float) -> float | None:
    """None where there is no error; a signal of zeros has none."""
    return float(10 * np.log10(energy / error)) if error > 0 else None


def _amax(statistics: Statistics | None, index: int, kind: str) -> float | None:
    seen = None if statistics is None else statistics.layers.get(index, {}).get(kind)
    return None if seen is None else float(statistics.values()[seen.amax_codes.max()])


def attention_errors(
    model: PreTrainedModel, layout: CacheLayout, rows: Sequence[Sequence[int]], variants: Sequence[Variant], cache_dtype: torch.dtype
) -> Errors:
    """Relative error of each layer's attention output when q, k and v are quantized, all variants on the same inputs.

    The model runs once with a 16-bit cache; at every attention call the same q, k and v are quantized for each variant and the attention is
    computed again. Layers whose attention cannot be computed from quantized inputs this way are left out: latent attention (what is cached
    is not what attention is given), and classes without transformers' attention interface.
    """
    config = model.config.get_text_config(decoder=True)
    quantizers = {each.name: CacheQuantizer(layout, each, cache_dtype, model) for each in variants if each.scales is not None}
    plain = CacheQuantizer(layout, Variant("16-bit", None), cache_dtype, model)
    indices = {model.get_submodule(each.module): each.index for each in layout.layers if each.query_from == "interface" and not each.latent}
    wrong: dict[str, dict[int, float]] = {name: dict.fromkeys(indices.values(), 0.0) for name in quantizers}
    energy: dict[int, float] = dict.fromkeys(indices.values(), 0.0)

    def around(module: nn.Module, compute: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        result = compute(query, key, value)
        index = indices.get(module)
        if index is not None:
            exact = result[0].to(torch.float64)  # [batch, seq, heads, head_dim]
            energy[index] += float(exact.square().sum())
            for name, quantize in quantizers.items():
                again = compute(quantize(index, "q", query), quantize(index, "k", key), quantize(index, "v", value))[0]
                wrong[name][index] += float((exact - again).square().sum())
        return result

    with torch.inference_mode(), wrapped_attention(model, around):
        for row in rows:
            tokens = torch.tensor([list(map(int, row))], device=model.device)
            model.base_model(input_ids=tokens, past_key_values=QuantizedCache(config, plain), use_cache=True)
    return {
        name: {index: float(np.sqrt(total / energy[index])) for index, total in layers.items() if energy[index] > 0} for name, layers in wrong.items()
    }
