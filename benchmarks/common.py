"""What the benchmarks share: predictions beside results, interleaved timing, a table, and data with --json."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(description: str, **options: int | str) -> argparse.Namespace:
    """The command line of a benchmark: --json FILE and its own options with their defaults, whole numbers and words."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results here too")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds (all threads). On a machine that others use too, the second is the steadier."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def interleaved(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Each work in turn, `repeats` times, so that a busy moment falls on all of them."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(timed(work))
    return times


def row(name: str, predicted: str, measured: str, target: str = "", met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "predicted": predicted, "measured": measured, "target": target, "met": met}


def median(values: list[float]) -> float:
    return statistics.median(values)


def present(title: str, rows: list[dict[str, Any]], data: dict[str, Any], file: Path | None) -> None:
    """Print the table; write rows and raw data where asked."""
    load = os.getloadavg()[0]
    table = Table("", "predicted", "measured", "target", "", title=title, caption=f"{os.cpu_count()} cores, load average {load:.1f} at the end")
    for one in rows:
        table.add_row(one["name"], one["predicted"], one["measured"], one["target"], {None: "", True: "met", False: "MISSED"}[one["met"]])
    Console(width=150).print(table)
    if file:
        file.write_text(json.dumps({"title": title, "rows": rows, "load_average": load, **data}, indent=2) + "\n", encoding="utf-8")
