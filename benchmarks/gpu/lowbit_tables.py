"""Tables of docs/lowbit-results.md and docs/lowbit-serving.md from the files that lowbit_compare.py and lowbit_serving.py wrote.

usage: python benchmarks/gpu/lowbit_tables.py formats-MODEL.json … [--against FORMAT] [--plot FILE.png]     one table of all the files' formats
       python benchmarks/gpu/lowbit_tables.py lowbit-MODEL.json …                                          vLLM's kernels beside ours, file by file
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evaluate.bootstrap import bootstrap
from calibrate.evaluate.pareto import SpectrumBounds, front, judge, recommend
from calibrate.evaluate.pareto_plot import draw
from calibrate.evaluate.results import SIXTEEN_BIT, Fidelity, Interval
from calibrate.evaluate.spectrum_result import FormatRow, Hits, SpectrumResult


def shown(value: Interval, digits: int) -> str:
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def quotient(one: Fidelity, other: Fidelity, field: str) -> Interval:
    """A figure of one variant by that of another, with its interval over the same documents."""
    ours, theirs = (np.array([getattr(document, field) for document in each.documents]) for each in (one, other))
    return bootstrap(np.stack([ours, theirs], axis=1), lambda drawn: drawn[:, 0] / drawn[:, 1])


def together(model: str, results: list[SpectrumResult]) -> SpectrumResult:
    """One result of all formats, the largest first and judged anew. A format that several hold, as the 16-bit cache, is the first's.

    Raises:
        ValueError: they were scored on other text or at another length, so that their documents are no pairs.
    """
    if len({(each.corpus["digest"], each.context, each.measured_length) for each in results}) > 1:
        raise ValueError("results of other text or another length than the first's")
    found = {row.variant: row for result in reversed(results) for row in result.rows}
    rows = [found.pop(SIXTEEN_BIT)]
    for row in sorted(found.values(), key=lambda row: -row.bytes_per_token):
        verdict, reasons = judge(row.fidelity, row.served_as, row.needles, row.reasoning, SpectrumBounds())
        rows.append(row.model_copy(update={"verdict": verdict, "reasons": tuple(reasons)}))
    left_out, offline = ({name: value for each in results for name, value in getattr(each, field).items()} for field in ("left_out", "offline"))
    told = {"model": model, "recommendation": recommend(rows), "left_out": left_out, "offline": offline}
    return results[0].model_copy(update={"rows": tuple(rows), "front": front(rows), **told})


def hits(found: Hits | None, reference: bool) -> str:
    return "" if found is None else f"{found.hits}" if reference else f"{found.hits} (−{found.lost}, +{found.won})"


def formats(result: SpectrumResult, against: str | None) -> list[str]:
    rows = {row.variant: row for row in result.rows}
    sixteen = rows[SIXTEEN_BIT]
    asked = [f"{name} of {found.asked}" for name, found in (("needles", sixteen.needles), ("problems", sixteen.reasoning)) if found]
    heads = ["format", "bytes a token (bits)", f"bits at {result.measured_length:,}", "KL", "perplexity ratio", "\\|Δ log p\\|", *asked, "verdict"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        bits = 16 * row.bytes_per_token / sixteen.bytes_per_token
        short = 16 * row.bytes_at_measured / sixteen.bytes_at_measured
        figures = [f"{row.bytes_per_token:,.0f} ({bits:.2f})", f"{short:.2f}"]
        reference = name == SIXTEEN_BIT
        kl, ratio, delta = row.fidelity.kl_mean, row.fidelity.perplexity_ratio, row.fidelity.mean_abs_delta_logprob
        figures += ["", "", ""] if reference else [shown(kl, 4), shown(ratio, 3), f"{delta.value:.3f}"]
        figures += [hits(found, reference) for found in (row.needles, row.reasoning) if found]
        lines.append(f"| {name if reference else f'`{name}`'} | {' | '.join(figures)} | {'' if reference else row.verdict} |")
    lines += ["", f"Not beaten: {', '.join(result.front)}", result.recommendation]
    return [*lines, "", *(compared(row, rows[against]) for row in result.rows if against and row.variant not in (SIXTEEN_BIT, against))]


def compared(row: FormatRow, other: FormatRow) -> str:
    both = list(zip(row.fidelity.documents, other.fidelity.documents, strict=True))
    lower = sum(one.kl < two.kl for one, two in both)
    return f"KL of {row.variant} by {other.variant}'s: {shown(quotient(row.fidelity, other.fidelity, 'kl'), 3)}, lower in {lower} of {len(both)}"


def serving(result: dict[str, Any]) -> list[str]:
    rows = {name: row for name, row in result["rows"].items() if row.get("reference") and "fidelity" in row}
    pairs = {pair["vllm"]: pair["ours"] for pair in result["pairs"]}
    lines = ["| session | \\|Δ log p\\| | KL | top-1 | needles | vLLM / ours: \\|Δ log p\\| | vLLM / ours: KL |", "|---" * 7 + "|"]
    for name, row in sorted(rows.items(), key=lambda item: (item[0].startswith("ours"), item[0])):
        found = Fidelity.model_validate(row["fidelity"] | {"engine": row["engine"]})
        figures = [shown(found.mean_abs_delta_logprob, 4), shown(found.kl_mean, 4), f"{found.top1_agreement.value:.1%}"]
        figures.append(f"{sum(cell['hit'] for cell in row['cells'])} (−{row['lost']}, +{row['won']})")
        mine = rows.get(pairs.get(name, ""))
        if mine:
            other = Fidelity.model_validate(mine["fidelity"] | {"engine": mine["engine"]})
            figures += [shown(quotient(found, other, field), 2) for field in ("abs_delta_logprob", "kl")]
        lines.append(f"| {name} | {' | '.join(figures)} |{'' if mine else ' | |'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--against", help="a format: KL of every other beside its, by document")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.files]
    if "result" not in files[0]:
        for each in files:
            print("\n".join([each["model"], "", *serving(each), ""]))
        return
    result = together(files[0]["model"], [SpectrumResult.model_validate(each["result"]) for each in files])
    print("\n".join(formats(result, arguments.against)))
    if arguments.plot:
        draw(result, arguments.plot)


if __name__ == "__main__":
    main()
