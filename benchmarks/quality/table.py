"""Markdown tables from the files of run.py: every policy beside amax/448, scale 1.0 and the default, over the same tokens.

    python -m benchmarks.quality.table JSON... [--text builtin:code] [--against amax unit mse] [--predictions]

Several files of one model, backend and granularity are joined where their texts are the same. Differences of mean |Δ log p| are relative, with 95%
intervals by bootstrap over paired documents.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evaluate.bootstrap import bootstrap
from calibrate.evaluate.results import Interval

COLUMNS = ("tokens", "nll", "abs_delta_logprob", "kl", "top1_agree")


def sums_of(row: dict[str, Any], text: str) -> dict[str, np.ndarray]:
    """Per document, float64 [documents] each."""
    return {name: np.array(row["texts"][text][name], dtype=np.float64) for name in COLUMNS}


def relative(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """Σ ours / Σ theirs − 1 over the same documents."""
    return bootstrap(np.stack([ours, theirs], axis=1), lambda drawn: drawn[:, 0] / drawn[:, 1] - 1)


def mean(values: np.ndarray, tokens: np.ndarray) -> Interval:
    return bootstrap(np.stack([values, tokens], axis=1), lambda drawn: drawn[:, 0] / drawn[:, 1])


def percent(value: Interval) -> str:
    clear = value.low > 0 or value.high < 0
    shown = f"{value.value:+.1%} ({value.low:+.1%} to {value.high:+.1%})"
    return f"**{shown}**" if clear else shown


def table(result: dict[str, Any], text: str, against: list[str], *, predictions: bool = False) -> list[str]:
    """One table, rows ordered by mean |Δ log p|; rows that failed come last with their error."""
    described = result["texts"][text]
    tokens, reference = np.array(described["tokens"], dtype=np.float64), np.array(described["reference_nll"])
    rows = {name: sums_of(row, text) for name, row in result["rows"].items() if text in row.get("texts", {})}
    peers = [name for name in against if name in rows]
    head = ["policy", "perplexity", "mean abs Δ log p", *(f"against {name}" for name in peers), "top-1", "ΔNLL", "KL"]
    lines = [f"16-bit perplexity {math.exp(reference.sum() / tokens.sum()):.4f}, {int(tokens.sum()):,} tokens of {len(tokens)} documents", ""]
    lines += ["| " + " | ".join(head + ["expected"] * predictions) + " |", "|" + "---|" * (len(head) + predictions)]
    for name in sorted(rows, key=lambda name: rows[name]["abs_delta_logprob"].sum()):
        row = rows[name]
        if not np.array_equal(row["tokens"], tokens):
            raise SystemExit(f"{name} was scored on other tokens than the reference")
        delta, more = row["abs_delta_logprob"], mean(row["nll"] - reference, tokens)
        cells = [name, f"{math.exp(min(row['nll'].sum() / tokens.sum(), 700)):.4f}", f"{delta.sum() / tokens.sum():.4f}"]
        cells += ["" if peer == name else percent(relative(delta, rows[peer]["abs_delta_logprob"])) for peer in peers]
        cells += [f"{row['top1_agree'].sum() / tokens.sum():.2%}", f"{more.value:+.4f} ({more.low:+.4f} to {more.high:+.4f})"]
        cells += [f"{row['kl'].sum() / tokens.sum():.5f}"] + [result["rows"][name]["prediction"]] * predictions
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {name} | {row['error']} |" + " |" * (len(head) - 2) for name, row in result["rows"].items() if "error" in row]
    return lines


def joined(paths: list[Path]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(model, backend, granularity) → result; a later file's rows replace an earlier one's of the same name."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        key = (result["model"], _backend(result["engine"]), result["granularity"])
        if key not in found:
            found[key] = result
            continue
        for name, text in result["texts"].items():
            mine = found[key]["texts"].get(name, text)
            if mine["description"]["digest"] != text["description"]["digest"] or mine["reference_nll"] != text["reference_nll"]:
                raise SystemExit(f"{path}: {name} has other rows, or another reference, than an earlier file of {' '.join(key)}")
            found[key]["texts"][name] = text
        for name, row in result["rows"].items():
            texts = found[key]["rows"].get(name, {}).get("texts", {}) | row.get("texts", {})
            found[key]["rows"][name] = row | ({"texts": texts} if texts else {})
    return found


def _backend(engine: dict[str, Any]) -> str:
    return engine["backend"] + (f" (FA{engine['flash']})" if engine["flash"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text", nargs="+", help="all by default")
    parser.add_argument("--against", nargs="+", default=["amax", "unit", "mse"])
    parser.add_argument("--predictions", action="store_true")
    arguments = parser.parse_args()
    for (model, backend, granularity), result in joined(arguments.files).items():
        for text in arguments.text or result["texts"]:
            print(f"\n### {model}, {backend}, per {granularity}, {text}\n")
            print("\n".join(table(result, text, arguments.against, predictions=arguments.predictions)))


if __name__ == "__main__":
    main()
