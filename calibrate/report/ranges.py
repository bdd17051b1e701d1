"""Range plots: what each layer's K, V and Q span, against what FP8 can hold at the layer's scale and at 1.0. SVG that follows the page's colours."""

from dataclasses import dataclass
from math import ceil, floor, log2

import numpy as np
import torch

from calibrate.scales import FORMATS, NumberFormat, Scales
from calibrate.statistics import Statistics

_NAMES = {"k": "K", "v": "V", "q": "Q"}
_LOW_SHARE = 0.01
_WIDTH, _HEIGHT = 780, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 106, 12, 34


@dataclass(frozen=True)
class Span:
    """One layer: 1% of its non-zero magnitudes lie below `low`, half below `middle`, none above `amax`; `scale` is the largest of its heads."""

    layer: int
    low: float
    middle: float
    amax: float
    scale: float


@dataclass(frozen=True)
class RangePlot:
    """One kind. `summary` says in words what the picture shows."""

    kind: str
    svg: str
    summary: str


def range_plots(statistics: Statistics, scales: Scales) -> list[RangePlot]:
    """A plot for each of K, V and Q."""
    fmt = FORMATS[scales.options.number_format]
    plots = []
    for kind, name in _NAMES.items():
        spans = _spans(statistics, scales, kind)
        if spans:
            plots.append(RangePlot(name, _draw(name, spans, fmt), _summary(name, spans, fmt)))
    return plots


def _spans(statistics: Statistics, scales: Scales, kind: str) -> list[Span]:
    values = statistics.values()
    solved = {layer.index: dict(layer.items()) for layer in scales.layers}
    spans = []
    for index, kinds in statistics.layers.items():
        if kind not in kinds:
            continue
        counts = kinds[kind].counts.sum(axis=0)  # [32768]
        counts[0] = 0
        running = np.cumsum(counts)
        if running[-1]:
            low, middle = (float(values[np.searchsorted(running, share * running[-1])]) for share in (_LOW_SHARE, 0.5))
            spans.append(Span(index, low, middle, float(values[np.flatnonzero(counts)[-1]]), float(solved[index][kind].max())))
    return spans


def _summary(name: str, spans: list[Span], fmt: NumberFormat) -> str:
    largest = max(spans, key=lambda span: span.amax)
    over = sum(span.amax > fmt.max for span in spans)
    headroom = min(span.scale * fmt.max / span.amax for span in spans)
    low, high = min(span.scale for span in spans), max(span.scale for span in spans)
    return (
        f"{name}: amax up to {largest.amax:.4g} (layer {largest.layer}), {over} of {len(spans)} layers beyond {fmt.max:g}, which scale 1.0 cuts; "
        f"scales {low:.3g} to {high:.3g}, least headroom {headroom:.2f}×"
    )


class _Axes:
    """Layer number and magnitude → pixels; magnitudes on a log2 axis."""

    def __init__(self, spans: list[Span], fmt: NumberFormat) -> None:
        bottom = min(min(min(span.low, span.scale * fmt.tiny) for span in spans), fmt.tiny)
        top = max(max(max(span.amax, span.scale * fmt.max) for span in spans), fmt.max)
        self.low, self.high = floor(log2(bottom)), ceil(log2(top))
        self.step = (_WIDTH - _LEFT - _RIGHT) / len(spans)

    def x(self, place: float) -> float:
        return round(_LEFT + place * self.step, 1)

    def y(self, value: float) -> float:
        share = (log2(value) - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)


def _draw(name: str, spans: list[Span], fmt: NumberFormat) -> str:
    axes = _Axes(spans, fmt)
    parts = [
        f'<svg class="range" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Ranges of {name} by layer">',
        *_grid(axes),
        *(part for place, span in enumerate(spans) for part in _layer(axes, place, span, fmt)),
        *_limits(axes, fmt),
        *_layer_numbers(axes, spans),
        "</svg>",
    ]
    return "\n".join(parts)


def _grid(axes: _Axes) -> list[str]:
    every = max(1, ceil((axes.high - axes.low) / 8))
    parts = []
    for power in range(axes.low, axes.high + 1, every):
        y = axes.y(2.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">2<tspan dy="-4" font-size="8">{power}</tspan></text>')
    return parts


def _layer(axes: _Axes, place: int, span: Span, fmt: NumberFormat) -> list[str]:
    left, width, middle = axes.x(place + 0.08), round(axes.step * 0.84, 1), axes.x(place + 0.5)
    top, normal, bottom = (axes.y(span.scale * limit) for limit in (fmt.max, _smallest_normal(fmt), fmt.tiny))
    bar = round(min(9.0, axes.step * 0.4), 1)
    high, low, half = axes.y(span.amax), axes.y(span.low), axes.y(span.middle)
    start, end = round(middle - bar / 2, 1), round(middle + bar / 2, 1)
    tip = f"layer {span.layer}: amax {span.amax:.4g}, median {span.middle:.3g}, scale {span.scale:.4g}, holds up to {span.scale * fmt.max:.4g}"
    return [
        f"<g><title>{tip}</title>",
        f'<rect class="normal" x="{left}" y="{top}" width="{width}" height="{round(normal - top, 1)}"/>',
        f'<rect class="subnormal" x="{left}" y="{normal}" width="{width}" height="{round(bottom - normal, 1)}"/>',
        f'<line class="top" x1="{left}" x2="{round(left + width, 1)}" y1="{top}" y2="{top}"/>',
        f'<rect class="seen" x="{start}" y="{high}" width="{bar}" height="{round(max(low - high, 1), 1)}"/>',
        f'<line class="median" x1="{start}" x2="{end}" y1="{half}" y2="{half}"/>',
        "</g>",
    ]


def _limits(axes: _Axes, fmt: NumberFormat) -> list[str]:
    parts = []
    for value, text in ((fmt.max, f"{fmt.max:g}"), (_smallest_normal(fmt), "subnormal"), (fmt.tiny, f"2^{log2(fmt.tiny):.0f}")):
        y = axes.y(value)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="limit-name" x="{_WIDTH - _RIGHT + 6}" y="{y + 4}">{text} at 1.0</text>')
    return parts


def _layer_numbers(axes: _Axes, spans: list[Span]) -> list[str]:
    every = max(1, ceil(len(spans) / 16))
    y = _HEIGHT - _BOTTOM + 15
    numbers = [
        f'<text class="tick" x="{axes.x(place + 0.5)}" y="{y}" text-anchor="middle">{span.layer}</text>'
        for place, span in enumerate(spans)
        if place % every == 0
    ]
    return [*numbers, f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">layer</text>']


def _smallest_normal(fmt: NumberFormat) -> float:
    return float(torch.finfo(fmt.dtype).smallest_normal)
