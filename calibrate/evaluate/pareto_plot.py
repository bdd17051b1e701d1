"""Fidelity against size: one point a format, the front drawn through those that no other beats."""

import io
from pathlib import Path

from calibrate.artefact import atomic_path
from calibrate.evaluate.results import SIXTEEN_BIT
from calibrate.evaluate.spectrum_result import FormatRow, SpectrumResult

# Distinguishable in grey and by colour-blind readers: each family has its own marker as well.
_FAMILIES = {
    "fp8": ("#0b62c4", "o"),
    "int": ("#c44b0b", "s"),
    "turboquant": ("#2e8b57", "^"),
    "kivi": ("#b8860b", "D"),
    "gear": ("#5f5f5f", "v"),
    "kvarn": ("#8a2be2", "P"),
    "additive": ("#c2185b", "*"),
}
_LEAST_KL = 1e-5  # a logarithmic axis has no zero


def draw(result: SpectrumResult, path: Path) -> Path:
    """Write the PNG and return its path. Raises UsageError where it cannot be written."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(picture(result))
    return path


def picture(result: SpectrumResult) -> bytes:
    """The PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = result.rows[0].bytes_per_token
    rows = sorted((row for row in result.rows if row.variant != SIXTEEN_BIT), key=lambda row: row.bytes_per_token)
    figure, axes = pyplot.subplots(figsize=(10.5, 6.4), layout="constrained")
    best = [row for row in rows if row.variant in result.front]
    axes.plot([_share(row, whole) for row in best], [_kl(row) for row in best], color="#bbbbbb", linewidth=1.2, zorder=1)
    drawn: set[str] = set()
    for row in rows:
        family = next((name for name in _FAMILIES if row.variant.startswith(name)), "int")
        colour, marker = _FAMILIES[family]
        interval = row.fidelity.kl_mean
        bars = [[max(_kl(row) - max(interval.low, _LEAST_KL), 0)], [max(interval.high - _kl(row), 0)]]
        axes.errorbar(
            _share(row, whole),
            _kl(row),
            yerr=bars,
            fmt=marker,
            color=colour,
            markersize=8,
            markerfacecolor=colour if row.served_as else "white",
            elinewidth=0.9,
            label=family if family not in drawn else None,
        )
        drawn.add(family)
    axes.margins(x=0.05)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.15 * (right - left))  # room for the last labels
    axes.set(yscale="log", xlabel="cache bytes, % of 16 bits", ylabel="KL to the 16-bit cache, nats a token")
    _label(axes, rows, whole)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="filled: served by vLLM", fontsize=8, title_fontsize=8, frameon=False)
    axes.set_title(f"{result.model}: cache formats at {result.context:,} tokens, grey line: no other is both smaller and closer", fontsize=11)
    drawn_bytes = io.BytesIO()
    figure.savefig(drawn_bytes, format="png", dpi=130)
    pyplot.close(figure)
    return drawn_bytes.getvalue()


def _label(axes: object, rows: list[FormatRow], whole: float) -> None:
    """Names beside the points, pushed apart in the figure's own units so that none lies on another."""
    figure = axes.figure  # type: ignore[attr-defined]
    figure.canvas.draw()
    taken: list[tuple[float, float, float]] = []  # left, right, height in pixels
    for row in sorted(rows, key=_kl):
        x, y = axes.transData.transform((_share(row, whole), _kl(row)))  # type: ignore[attr-defined]
        left, right, offset = x + 9, x + 9 + 7.2 * len(row.variant), 0
        while any(abs(y + offset - other) < 13 and left < end and start < right for start, end, other in taken):
            offset += 13
        taken.append((left, right, y + offset))
        scale = 72 / figure.dpi
        arrow = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3} if offset else None
        axes.annotate(  # type: ignore[attr-defined]
            row.variant,
            (_share(row, whole), _kl(row)),
            xytext=(9 * scale, (offset - 4) * scale),
            textcoords="offset points",
            fontsize=7.5,
            arrowprops=arrow,
        )


def _share(row: FormatRow, whole: float) -> float:
    return 100 * row.bytes_per_token / whole


def _kl(row: FormatRow) -> float:
    return max(row.fidelity.kl_mean.value, _LEAST_KL)
