"""Results as people read them on a terminal, and as programs read them with --json."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from calibrate.checkpoint import Written
from calibrate.checkpoint.card import vllm_flags
from calibrate.engines import Readback
from calibrate.families.check import Row
from calibrate.inspection import Inspection, summary
from calibrate.kvarn import KVarNTables
from calibrate.kvarn.basis import NAMES
from calibrate.pipeline import JobResult
from calibrate.recipes import Recipe
from calibrate.scales import Scales
from calibrate.statistics import Statistics

_NAMES = {"k": "K", "v": "V", "q": "Q"}
_MOST_WARNINGS = 8
_MOST_FAILURES = 20


def job(result: JobResult) -> RenderableType:
    """The summary that ends `run`."""
    table = _summary_table(result.inspection)
    table.title = Text(str(result.written.path))
    parts: list[RenderableType] = [table, *_warning_lines(result.inspection.warnings)]
    parts += _serve_lines(result.written)
    parts.append(readback(result.readback) if result.readback else Text("not verified: vLLM was not asked (--no-verify)", style="yellow"))
    return Group(*parts)


def job_as_dict(result: JobResult) -> dict[str, Any]:
    return {
        "output": str(result.written.path),
        "files": result.written.how,
        "serve": result.written.serve,
        "options": result.scales.options.model_dump(),
        "counted": result.scales.counted,
        "scales_digest": result.scales.digest(),
        "summary": summary(result.inspection),
        "warnings": list(result.inspection.warnings),
        "readback": None if result.readback is None else result.readback.as_dict(),
    }


def inspection(result: Inspection) -> RenderableType:
    """One line a layer and kind, the summary, and what deserves a look."""
    title = Text(f"{result.path}: {_describe(result.options)}, {result.counted['tokens']:,} tokens")  # Text: a path may look like markup
    table = Table(title=title, title_justify="left")
    for name in ("layer", "", "amax", "at ¼", "at ½", "scale", "saturated", "underflow", "SNR dB", "at 1.0", "sat. at 1.0"):
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(
            str(row.layer),
            _NAMES[row.kind],
            f"{row.amax:.4g}",
            f"{row.amax_growth[0]:.4g}",
            f"{row.amax_growth[1]:.4g}",
            f"{row.scale:.4g}",
            _fraction(row.saturated),
            _fraction(row.underflow),
            f"{row.snr_db:.2f}",
            f"{row.unit_snr_db:.2f}",
            _fraction(row.unit_saturated),
        )
    return Group(table, _summary_table(result), *_warning_lines(result.warnings, most=None))


def statistics(result: Statistics, path: Path) -> RenderableType:
    counted = result.counted
    return Text(
        f"{path}: {len(result.layers)} layers, {counted['tokens']:,} tokens, {counted['documents']:,} documents, {path.stat().st_size:,} bytes"
    )


def statistics_as_dict(result: Statistics, path: Path) -> dict[str, Any]:
    return {"output": str(path), "digest": result.digest(), "counted": result.counted, "layers": len(result.layers)}


def scales(result: Scales, path: Path) -> RenderableType:
    lines = [Text(f"{path}: q, k and v scales of {len(result.layers)} layers, {_describe(result.options.model_dump())}")]
    return Group(*lines, *_warning_lines(result.warnings))


def scales_as_dict(result: Scales, path: Path) -> dict[str, Any]:
    layers = [{"layer": one.index, "module": one.module, **{kind: scale.tolist() for kind, scale in one.items()}} for one in result.layers]
    return {
        "output": str(path),
        "digest": result.digest(),
        "options": result.options.model_dump(),
        "warnings": list(result.warnings),
        "layers": layers,
    }


def written(result: Written) -> RenderableType:
    files = ", ".join(f"{number} {how}" for how, number in sorted(result.how.items()))
    line = f"{result.path}: {len(result.tensors)} scales; files of the source: {files}. Next: kv-calibrate verify {result.path}"
    return Group(Text(line), *_serve_lines(result))


def _serve_lines(result: Written) -> list[Text]:
    """What vLLM must be told, where it must be told anything."""
    return [Text(f"serve it with: vllm serve {result.path} {vllm_flags(result.serve)}", style="yellow")] if result.serve else []


def written_as_dict(result: Written) -> dict[str, Any]:
    return {
        "output": str(result.path),
        "files": result.how,
        "serve": result.serve,
        "scales": {name: value.tolist() for name, value in result.tensors.items()},
    }


def readback(result: Readback) -> RenderableType:
    """The verdict of `verify`, and each failure."""
    scales_read = len({(row.layer, row.kind) for row in result.rows})
    verdict = f"{scales_read} of {scales_read} scales equal" if result.ok else f"{len(result.failures)} of {len(result.rows)} scales differ"
    where = f"{result.engine}, kv_cache_dtype {result.kv_cache_dtype}, tensor parallel {result.tensor_parallel_size}, {result.seconds:.0f} s"
    lines = [Text(f"vLLM read-back: {verdict} ({where})", style="green" if result.ok else "bold red")]
    if result.error:
        lines.append(Text(f"  {result.error}", style="red"))
    lines += [Text(f"  {row.layer}.{row.kind}_scale, rank {row.rank}: {row.reason}", style="red") for row in result.failures[:_MOST_FAILURES]]
    if len(result.failures) > _MOST_FAILURES:
        lines.append(Text(f"  … and {len(result.failures) - _MOST_FAILURES} more (--json lists all)", style="red"))
    return Group(*lines, *(Text(f"  note: {text}") for text in result.notes))


def kvarn(result: KVarNTables) -> RenderableType:
    """KVarN tables, a line a layer. Noise in logits: of the worst head."""
    table = Table("layer", f"noise: {NAMES[0]}", *NAMES[1:], "K std", "V std", "16 bits")
    for layer in result.layers:
        cells = [f"{value:.3g}" for value in layer.basis.noise.max(axis=0)]
        cells += [_range_of(np.sqrt(kind.variance.mean(axis=1))) for kind in (layer.k, layer.v)]
        table.add_row(str(layer.index), *cells, "proposed" if layer.index in result.sixteen_bit_layers else "")
    noise = Text("noise: standard deviation of a logit of the worst head where each stored channel of K errs by its own; rotated: the sensitivity")
    return Group(table, noise, Text(f"{result.tokens:,} tokens, the first {result.skipped_tokens} of each document left out"))


def _range_of(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if low == high else f"{low:.3g} – {high:.3g}"


def recipe_list(found: dict[str, Recipe]) -> RenderableType:
    table = Table("recipe", "model types", "support", "scales", "corpus", "description")
    for name, recipe in found.items():
        corpus = f"{recipe.corpus.samples} × {recipe.corpus.sequence_length}"
        types = ", ".join(recipe.model_types) or "any other"
        table.add_row(name, types, recipe.support, _describe(recipe.scales.model_dump()), corpus, recipe.description)
    return table


def family_rows(rows: Sequence[Row]) -> RenderableType:
    """The outcome of `recipes check`."""
    table = Table("family", "model type", "granularity", "outcome", "scales", "s", "why not")
    for row in rows:
        style = "" if row.ok else "bold red"
        table.add_row(row.family, row.model_type, row.granularity, row.outcome, str(row.scales), f"{row.seconds:.1f}", Text(row.reason), style=style)
    failed = sum(not row.ok for row in rows)
    verdict = Text(f"{failed} of {len(rows)} are not as their recipes say" if failed else f"all {len(rows)} are as their recipes say")
    return Group(table, verdict)


def _describe(options: dict[str, Any]) -> str:
    each = "KV head" if options["granularity"] == "head" else "tensor"
    return f"{options['number_format'].upper()} per {each}, {options['policy']}, margin {options['margin']:g}"


def _summary_table(result: Inspection) -> Table:
    columns = ("", "layers", "amax", "scale", "SNR dB least, mean", "at scale 1.0", "saturated", "at 1.0")
    table = Table(*columns, caption=_describe(result.options))
    for kind, row in summary(result).items():
        table.add_row(
            _NAMES[kind],
            str(row["layers"]),
            _range(row["amax"]),
            _range(row["scale"]),
            f"{row['snr_db'][0]:.2f}, {row['snr_db'][1]:.2f}",
            f"{row['unit_snr_db'][0]:.2f}, {row['unit_snr_db'][1]:.2f}",
            _fraction(row["saturated"]),
            _fraction(row["unit_saturated"]),
        )
    return table


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.4g} – {pair[1]:.4g}"


def _fraction(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if not math.isclose(value, 1) else "1"


def _warning_lines(warnings: tuple[str, ...], most: int | None = _MOST_WARNINGS) -> list[Text]:
    lines = [Text(f"! {text}", style="yellow") for text in warnings[:most]]
    if most is not None and len(warnings) > most:
        lines.append(Text(f"! … and {len(warnings) - most} more: kv-calibrate inspect shows them", style="yellow"))
    return lines
