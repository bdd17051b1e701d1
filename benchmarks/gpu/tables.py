"""Tables and heatmaps of docs/results.md from the files that prove.py wrote.

usage: python benchmarks/gpu/tables.py FOLDER_OF_JSON [--images docs/images]        (prints Markdown)
"""

import argparse
import json
from pathlib import Path

import numpy as np

from calibrate.evaluate.heatmap import draw
from calibrate.evaluate.mcnemar import compare_cells
from calibrate.evaluate.results import CALIBRATED, SIXTEEN_BIT, UNIT, DocumentScore, Fidelity, Interval, NeedleResult, NeedleVariant, Subject

NAMES = {"base": "untouched weights", "twin-k": "twin, K × 64", "twin-v": "twin, V × 2^-12"}
RESAMPLES = 10_000


def settings(results: dict[str, dict], model: str, twin: str):
    for one in results[f"{model}-{twin}"]["settings"]:
        fidelity = {row["variant"]: Fidelity.model_validate(row) for row in one["fidelity"]}
        needles = {row["variant"]: NeedleVariant.model_validate(row) for row in one["needles"]}
        yield one, fidelity, needles


def interval(value: Interval, digits: int) -> str:
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"


def less_than(ours: tuple[DocumentScore, ...], theirs: tuple[DocumentScore, ...]) -> str:
    """Relative difference of mean |Δ log p| to another variant, with its 95% interval by bootstrap over the paired documents."""
    a, b = (np.array([document.abs_delta_logprob for document in documents]) for documents in (ours, theirs))
    picks = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    low, high = np.percentile(a[picks].sum(axis=1) / b[picks].sum(axis=1) - 1, [2.5, 97.5])
    return f"{a.sum() / b.sum() - 1:+.1%} ({low:+.1%} to {high:+.1%})"


def table(results: dict[str, dict], model: str, twin: str) -> list[str]:
    lines = [
        "| backend, scales | variant | perplexity ratio | mean abs Δ log p | KL mean, p99 | top-1 agreement | needles (p) |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, fidelity, needles in settings(results, model, twin):
        for name, row in fidelity.items():
            hits = sum(cell.hit for cell in needles[name].cells)
            test = compare_cells(needles[SIXTEEN_BIT].cells, needles[name].cells)
            cells = f"{hits}/{len(needles[name].cells)}" + ("" if name == SIXTEEN_BIT else f" ({test.two_sided:.2g})")
            where = f"{row.engine.attention_backend}, per {one['granularity']}"
            if name == SIXTEEN_BIT:
                lines.append(f"| {where} | 16-bit | perplexity {row.perplexity:.3f} | | | | {cells} |")
                continue
            shown = f"**{name}**" if name == CALIBRATED else name
            kl = f"{row.kl_mean.value:.4f}, {row.kl_p99.value:.3f}"
            delta, top1 = interval(row.mean_abs_delta_logprob, 4), f"{row.top1_agreement.value:.2%}"
            lines.append(f"| | {shown} | {interval(row.perplexity_ratio, 4)} | {delta} | {kl} | {top1} | {cells} |")
    return lines


def paired(results: dict[str, dict], models: list[str]) -> list[str]:
    lines = ["| model | backend, scales | against scale 1.0 | against amax/448 |", "|---|---|---|---|"]
    for model in models:
        for one, fidelity, _ in settings(results, model, "base"):
            ours = fidelity[CALIBRATED].documents
            differences = [less_than(ours, fidelity[name].documents) for name in (UNIT, "amax")]
            lines.append(f"| {model} | {one['backend']}, per {one['granularity']} | {differences[0]} | {differences[1]} |")
    return lines


def images(results: dict[str, dict], model: str, folder: Path) -> list[str]:
    lines = []
    for twin in NAMES:
        one, _, needles = next(iter(settings(results, model, twin)))
        whole = results[f"{model}-{twin}"]
        result = NeedleResult(
            subject=Subject(**one["subject"]), model=f"{model}, {NAMES[twin]}", grid=whole["grid"], variants=tuple(needles.values())
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"needles-{model}-{twin}.png"
        path.write_bytes(draw(result))
        lines.append(f"![Needles found by length and depth, {model}, {NAMES[twin]}](images/{path.name})\n")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=Path)
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*-*.json"))}
    models = sorted({result["model"] for result in results.values()}, reverse=True)
    print("\n".join(paired(results, models)))
    for model in models:
        for twin, name in NAMES.items():
            print(f"\n### {model}, {name}\n")
            print("\n".join(table(results, model, twin)))
        if arguments.images:
            print("\n" + "\n".join(images(results, model, arguments.images)))


if __name__ == "__main__":
    main()
