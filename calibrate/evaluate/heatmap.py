"""Heatmaps of needle recall, length × depth: each variant beside the others, with what differs from the 16-bit cache marked on it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from calibrate.artefact import atomic_path
from calibrate.errors import UsageError
from calibrate.evaluate.results import SIXTEEN_BIT, Cell, NeedleResult

_COLUMNS = 3
_MAP = "cividis"  # legible to the colour blind and in grey print


@dataclass(frozen=True)
class _Theme:
    background: str
    ink: str
    faint: str
    worse: str
    better: str


_THEMES = {
    "light": _Theme("#ffffff", "#1a1a1a", "#5f6368", "#c0392b", "#1e6fd0"),
    "dark": _Theme("#15181c", "#eceff1", "#a7b0b8", "#ff6f61", "#6cb6ff"),
}


@dataclass(frozen=True)
class Recall:
    """Hits and questions of one variant, int [depths, lengths]."""

    variant: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    hits: np.ndarray
    asked: np.ndarray


def recall_of(variant: str, cells: Sequence[Cell]) -> Recall:
    """Count cells by length and depth. Raises UsageError without cells."""
    if not cells:
        raise UsageError(f"variant {variant} has no needle cells to draw")
    lengths, depths = tuple(sorted({cell.length for cell in cells})), tuple(sorted({cell.depth for cell in cells}))
    hits, asked = np.zeros((len(depths), len(lengths)), dtype=int), np.zeros((len(depths), len(lengths)), dtype=int)
    for cell in cells:
        place = depths.index(cell.depth), lengths.index(cell.length)
        asked[place] += 1
        hits[place] += cell.hit
    return Recall(variant, lengths, depths, hits, asked)


def draw(
    result: NeedleResult,
    *,
    task: str | None = None,
    language: str | None = None,
    theme: Literal["light", "dark"] = "light",
    kind: Literal["png", "svg"] = "png",
) -> bytes:
    """One panel a variant, the 16-bit cache first, as PNG or SVG bytes; equal results give equal bytes.

    A cell shows hits/questions. Where it differs from the 16-bit cache's it is framed, with ▼ and the hits lost (or ▲ and those won).

    Args:
        task, language: only these cells; None takes all together.

    Raises:
        UsageError: no such cells.
    """
    recalls = [recall_of(each.variant, [cell for cell in each.cells if _wanted(cell, task, language)]) for each in result.variants]
    recalls.sort(key=lambda recall: recall.variant != SIXTEEN_BIT)
    reference = recalls[0] if recalls[0].variant == SIXTEEN_BIT else None
    title = " · ".join(part for part in (task or "all tasks", language, _engines(result)) if part)
    return _figure(recalls, reference, title, _THEMES[theme], kind)


def write_heatmaps(result: NeedleResult, folder: Path) -> list[Path]:
    """PNG and SVG files, light and dark, of every task and language of a result. Raises UsageError where they cannot be written."""
    written = []
    pairs = sorted({(cell.task, cell.language) for each in result.variants for cell in each.cells})
    for (task, language), theme, kind in product(pairs, _THEMES, ("png", "svg")):
        path = folder / f"niah-{_engines(result)}-{task}-{language}-{theme}.{kind}"
        with atomic_path(path) as temporary:
            temporary.write_bytes(draw(result, task=task, language=language, theme=theme, kind=kind))
        written.append(path)
    return written


def _wanted(cell: Cell, task: str | None, language: str | None) -> bool:
    return task in (None, cell.task) and language in (None, cell.language)


def _engines(result: NeedleResult) -> str:
    return ", ".join(sorted({each.engine.engine for each in result.variants}))


def _figure(recalls: list[Recall], reference: Recall | None, title: str, theme: _Theme, kind: str) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(recalls), _COLUMNS)
    rows = -(-len(recalls) // columns)
    wide = max(2.6, 0.8 * len(recalls[0].lengths) + 1.0)
    high = max(2.0, 0.46 * len(recalls[0].depths) + 1.1)
    settings = {"svg.hashsalt": "kv-calibrate", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(columns * wide + 0.9, rows * high + 0.75), layout="constrained", facecolor=theme.background)
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=False, sharey=False).ravel()
        for axis, recall in zip(axes, recalls, strict=False):
            image = _panel(axis, recall, reference, theme)
        for axis in axes[len(recalls) :]:
            axis.set_visible(False)
        bar = figure.colorbar(image, ax=list(axes[: len(recalls)]), shrink=0.8, ticks=[0, 0.5, 1])
        _plain(bar.ax, theme)
        bar.outline.set_edgecolor(theme.faint)
        bar.set_label("recall", color=theme.ink)
        figure.suptitle(title, color=theme.ink, fontsize=10)
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=144, facecolor=theme.background, metadata={"Software": None} if kind == "png" else {"Date": None})
    return file.getvalue()


def _panel(axis: Any, recall: Recall, reference: Recall | None, theme: _Theme) -> Any:
    share = np.divide(recall.hits, recall.asked, out=np.full(recall.hits.shape, np.nan), where=recall.asked > 0)
    image = axis.imshow(share, cmap=_MAP, vmin=0, vmax=1, aspect="auto")
    axis.set_title(f"{recall.variant}  {recall.hits.sum()}/{recall.asked.sum()}", color=theme.ink, fontsize=10)
    axis.set_xticks(range(len(recall.lengths)), [f"{length:,}" for length in recall.lengths])
    axis.set_yticks(range(len(recall.depths)), [f"{depth:.0%}" for depth in recall.depths])
    axis.set_xlabel("prompt, tokens", color=theme.ink)
    axis.set_ylabel("depth", color=theme.ink)
    _plain(axis, theme)
    comparable = reference is not None and reference is not recall and np.array_equal(reference.asked, recall.asked)
    for (row, column), asked in np.ndenumerate(recall.asked):
        if not asked:
            continue
        change = int(recall.hits[row, column] - reference.hits[row, column]) if comparable else 0
        mark = "" if not change else f"  {'▼' if change < 0 else '▲'}{abs(change)}"
        ink = "#000000" if share[row, column] > 0.5 else "#ffffff"
        axis.text(column, row, f"{recall.hits[row, column]}/{asked}{mark}", ha="center", va="center", color=ink, fontsize=8)
        if change:
            _frame(axis, row, column, theme.worse if change < 0 else theme.better)
    return image


def _frame(axis: Any, row: int, column: int, colour: str) -> None:
    from matplotlib.patches import Rectangle

    for width, edge in ((4.5, "#ffffff"), (2.2, colour)):  # a white rim keeps the frame visible on every cell
        axis.add_patch(Rectangle((column - 0.45, row - 0.42), 0.9, 0.84, fill=False, edgecolor=edge, linewidth=width))


def _plain(axis: Any, theme: _Theme) -> None:
    axis.set_facecolor(theme.background)
    axis.tick_params(colors=theme.ink, labelcolor=theme.ink, length=2)
    for spine in axis.spines.values():
        spine.set_edgecolor(theme.faint)
