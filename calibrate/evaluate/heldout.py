"""What each variant's scales do to text that no calibration saw: exact error per layer and head, and the error of the attention's output."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.collect import CollectRun, collect
from calibrate.collect.observer import Observer
from calibrate.corpus import Batch, Corpus, plan_batches
from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
from calibrate.engines.session import Variant
from calibrate.evaluate.bootstrap import bootstrap, bootstrap_each
from calibrate.evaluate.results import HeldOut, Interval
from calibrate.model import CacheLayout
from calibrate.model.attention import wrapped_attention
from calibrate.scales import FORMATS, Population, Scales, report
from calibrate.scales.error import quantized
from calibrate.statistics import Observed, Statistics

Errors = dict[str, dict[int, Interval]]  # variant → layer → ‖o − ô‖/‖o‖
Sums = dict[tuple[str, int, str], np.ndarray]  # variant, layer, kind → [documents, 6]: Σx², Σ(x − x̂)², elements, non-zero, cut, become zero
_LEAST = 1e-300  # a draw of documents without any error still has a logarithm


def held_out(
    statistics: Statistics,
    variants: Sequence[Variant],
    *,
    calibration: Statistics | None = None,
    attention: Errors | None = None,
    documents: Sums | None = None,
    seed: int = 0,
) -> tuple[HeldOut, ...]:
    """One row for each variant with scales, layer and kind that was observed, exact from the code counts.

    Args:
        statistics: of the held-out text. calibration: of the text that the scales were solved from, to show how far the ranges grew.
        attention: from `attention_errors`. documents: from `observe_documents`, for the intervals.
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
    rows.sort(key=lambda row: order[row.variant])
    return tuple(rows if documents is None else _with_intervals(rows, documents, seed))


def _row(population: Population, variant: Variant, index: int, kind: str, before: float | None, error: Interval | None) -> HeldOut:
    scales = variant.scales
    scale = _scale(scales, index, kind)
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
        head_saturated=tuple(result.saturated.tolist()),
        head_underflow=tuple(result.underflow.tolist()),
        attention_error=error,
    )


def _scale(scales: Scales, index: int, kind: str) -> np.ndarray:
    return dict(next(layer for layer in scales.layers if layer.index == index).items())[kind]


def _with_intervals(rows: Sequence[HeldOut], documents: Sums, seed: int) -> list[HeldOut]:
    """All rows over the same draws of documents, one variant at a time."""
    found = []
    for name in dict.fromkeys(row.variant for row in rows):
        ours = [row for row in rows if row.variant == name]
        sums = np.stack([documents[name, row.layer, row.kind] for row in ours], axis=1)  # [documents, rows, 6]

        def measures(drawn: np.ndarray, count: int = len(ours)) -> np.ndarray:  # [draws, rows * 6] → [draws, rows * 3]
            energy, error, elements, nonzero, cut, lost = np.moveaxis(drawn.reshape(len(drawn), count, 6), 2, 0)
            decibels = 10 * np.log10(np.maximum(energy, _LEAST) / np.maximum(error, _LEAST))
            return np.concatenate([decibels, cut / np.maximum(elements, 1), lost / np.maximum(nonzero, 1)], axis=1)

        each = bootstrap_each(sums.reshape(len(sums), -1), measures, seed=seed)
        for row, snr, saturated, underflow in zip(ours, *(each[part * len(ours) : (part + 1) * len(ours)] for part in range(3)), strict=True):
            update = {"snr_interval": None if row.snr_db is None else snr, "saturated_interval": saturated, "underflow_interval": underflow}
            found.append(row.model_copy(update=update))
    return found


def observe_documents(run: CollectRun, variants: Sequence[Variant]) -> tuple[Statistics, Sums]:
    """Statistics of the held-out text, and what each variant does to each of its documents: those are what the bootstrap draws.

    Documents go through the model one after the other. Counts are kept of all together; a document's sums are their growth.
    """
    batches, ends = _document_batches(run)
    scaled = [variant for variant in variants if variant.scales is not None]
    totals: dict[tuple[str, int, str], list[np.ndarray]] = {}
    values: list[np.ndarray] = []
    seen = 0

    def note_document(batch: Batch, observer: Observer) -> None:
        nonlocal seen
        seen += 1
        if seen not in ends:
            return
        values[:] = values or [observer.cache_dtype.decode()]
        for index, kinds in observer.layers().items():
            for kind, observed in kinds.items():
                for name, sums in _sums_of(observed, values[0], scaled, index, kind):
                    totals.setdefault((name, index, kind), []).append(sums)

    statistics = collect(replace(run, batches=batches), after_batch=note_document)
    return statistics, {key: np.diff(np.stack(sums), axis=0, prepend=0.0) for key, sums in totals.items()}


def _document_batches(run: CollectRun) -> tuple[tuple[Batch, ...], set[int]]:
    """Batches that hold rows of one document each, in the documents' order; and how many lie before the end of each document."""
    budget = max(batch.input_ids.size for batch in run.batches)
    batches: list[Batch] = []
    ends = set()
    for document in sorted({sample.document for sample in run.corpus.samples}):
        numbers = np.array([number for number, sample in enumerate(run.corpus.samples) if sample.document == document])
        rows = tuple(replace(run.corpus.samples[number], document=0) for number in numbers)
        own = plan_batches(Corpus(rows, 1, run.corpus.digest, {}), budget, pad_token_id=0)
        batches += [replace(batch, samples=numbers[batch.samples], part=4 * document // run.corpus.documents) for batch in own]
        ends.add(len(batches))
    return tuple(batches), ends


def _sums_of(observed: Observed, values: np.ndarray, variants: Sequence[Variant], index: int, kind: str) -> list[tuple[str, np.ndarray]]:
    """Each variant's six sums over all heads."""
    population = Population.of(observed.counts, values)
    counts, x = population.counts, population.values
    energy, elements, nonzero = population.energy.sum(), counts.sum(), counts[:, x > 0].sum()
    found = []
    for variant in variants:
        scale, fmt = _scale(variant.scales, index, kind), FORMATS[variant.scales.options.number_format]
        approximate = quantized(x, scale, fmt)  # [1 or heads, codes]
        cut = x[None, :].astype(np.float32) / scale[:, None] > fmt.max
        weights = counts if len(scale) > 1 else counts.sum(axis=0, keepdims=True)
        error, clipped, lost = ((weights * one).sum() for one in (np.square(approximate - x), cut, (approximate == 0) & (x > 0)))
        found.append((variant.name, np.array([energy, error, elements, nonzero, clipped, lost], dtype=np.float64)))
    return found


def _decibels(energy: float, error: float) -> float | None:
    """None where there is no error; a signal of zeros has none."""
    return float(10 * np.log10(energy / error)) if error > 0 else None


def _amax(statistics: Statistics | None, index: int, kind: str) -> float | None:
    seen = None if statistics is None else statistics.layers.get(index, {}).get(kind)
    return None if seen is None else float(statistics.values()[seen.amax_codes.max()])


def attention_errors(
    model: PreTrainedModel,
    layout: CacheLayout,
    rows: Sequence[Sequence[int]],
    variants: Sequence[Variant],
    cache_dtype: torch.dtype,
    *,
    seed: int = 0,
) -> Errors:
    """Relative error of each layer's attention output when q, k and v are quantized, all variants on the same inputs.

    The model runs once with a 16-bit cache; at every attention call the same q, k and v are quantized for each variant and the attention is
    computed again. Intervals are over rows. Layers whose attention cannot be computed from quantized inputs this way are left out: latent
    attention (what is cached is not what attention is given), and classes without transformers' attention interface.
    """
    config = model.config.get_text_config(decoder=True)
    quantizers = {each.name: CacheQuantizer(layout, each, cache_dtype, model) for each in variants if each.scales is not None}
    plain = CacheQuantizer(layout, Variant("16-bit", None), cache_dtype, model)
    indices = {model.get_submodule(each.module): each.index for each in layout.layers if each.query_from == "interface" and not each.latent}
    sums = {name: {index: np.zeros((len(rows), 2)) for index in indices.values()} for name in quantizers}  # [rows, 2]: error, energy
    number = 0

    def around(module: nn.Module, compute: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        result = compute(query, key, value)
        index = indices.get(module)
        if index is not None:
            exact = result[0].to(torch.float64)  # [batch, seq, heads, head_dim]
            energy = float(exact.square().sum())
            for name, quantize in quantizers.items():
                again = compute(quantize(index, "q", query), quantize(index, "k", key), quantize(index, "v", value))[0]
                sums[name][index][number] += (float((exact - again).square().sum()), energy)
        return result

    with torch.inference_mode(), wrapped_attention(model, around):
        for number, row in enumerate(rows):  # noqa: B007 — read by `around`
            tokens = torch.tensor([list(map(int, row))], device=model.device)
            model.base_model(input_ids=tokens, past_key_values=QuantizedCache(config, plain), use_cache=True)
    return {name: {index: _relative(each, seed) for index, each in layers.items() if each[:, 1].sum() > 0} for name, layers in sums.items()}


def _relative(sums: np.ndarray, seed: int) -> Interval:
    return bootstrap(sums, lambda drawn: np.sqrt(drawn[:, 0] / np.maximum(drawn[:, 1], _LEAST)), seed=seed)
