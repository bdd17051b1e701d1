"""`compare --formats default` on a GPU, the formats shared out among processes: one alone keeps a GPU busy for a tenth of its time.

Each process runs the real command on its own links to a checkpoint that `run --kvarn` calibrated, with the 16-bit cache and a share of the formats.
The rows are put together into one result, judged and drawn as the command does, and written whenever a process has ended.

usage: python benchmarks/gpu/lowbit_compare.py --out DIR [--model NAME …] [--processes 11] [--quick]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lowbit_tables import together

from calibrate.artefact import write_json
from calibrate.evaluate.pareto_plot import draw
from calibrate.evaluate.spectrum import DEFAULT_FORMATS, evidence_path
from calibrate.evaluate.spectrum_result import SpectrumResult

# How long a format takes beside the plain ones, for sharing out; from the number of kernels a block.
COSTS = {"kvarn": 4.0, "gear": 4.0, "additive": 3.0, "turboquant": 1.5}


def shares(formats: list[str], processes: int) -> list[list[str]]:
    """The dearest first, each to whoever has least."""
    cost = {name: next((value for start, value in COSTS.items() if name.startswith(start)), 1.0) for name in formats}
    found: list[list[str]] = [[] for _ in range(min(processes, len(formats)))]
    for name in sorted(formats, key=lambda name: -cost[name]):
        min(found, key=lambda share: sum(cost[each] for each in share)).append(name)
    return found


def linked(checkpoint: Path, place: Path) -> Path:
    """The checkpoint's files linked, so that evidence of several processes does not meet."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(checkpoint, place, copy_function=os.link, ignore=shutil.ignore_patterns("evidence"))
    return place


def command(words: list[str], gpu: int, arguments: argparse.Namespace) -> None:
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if arguments.device == "cuda" else {})
    words = [sys.executable, "-m", "calibrate", *words, "--device", arguments.device, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[3]}: exit code {done.returncode}: {done.stderr[-1500:]}")


def calibrated(model: str, arguments: argparse.Namespace) -> Path:
    """Made once; `run` writes a whole checkpoint or none."""
    place = arguments.work / model
    if not place.exists():
        command(["run", str(arguments.models / model), "--kvarn", "--no-verify", "--output", str(place)], 0, arguments)
    return place


def compared(checkpoint: Path, formats: list[str], gpu: int, arguments: argparse.Namespace) -> SpectrumResult:
    command(["compare", str(checkpoint), "--formats", ",".join(formats), *arguments.more], gpu, arguments)
    return SpectrumResult.model_validate_json(evidence_path(checkpoint).read_text(encoding="utf-8"))


def measure(model: str, arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    checkpoint = calibrated(model, arguments)
    parts = shares(arguments.formats or list(DEFAULT_FORMATS), arguments.processes)
    results, errors = [], {}
    head: dict[str, Any] = {"schema": "kv-calibrate/lowbit-compare/1", "model": model, "processes": len(parts)}
    with ThreadPoolExecutor(len(parts)) as pool:
        jobs = {}
        for number, share in enumerate(parts):
            place = linked(checkpoint, arguments.work / f"{model}-formats-{number}")
            jobs[pool.submit(compared, place, share, number % arguments.gpus, arguments)] = share
        for done in as_completed(jobs):
            try:
                results.append(done.result())
            except Exception as error:  # the other shares go on
                errors[",".join(jobs[done])] = str(error)
            seconds = round(time.perf_counter() - started, 1)
            print(f"  {model} {','.join(jobs[done])}: {seconds} s {errors.get(','.join(jobs[done]), '')}", flush=True)
            if results:
                whole = together(model, results)
                write_json(
                    arguments.out / f"formats-{model}.json",
                    head | {"seconds": seconds, "errors": errors, "result": json.loads(whole.model_dump_json())},
                )
    if results:
        draw(whole, arguments.out / f"formats-{model}.png")
    print(f"{model}: {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--model", nargs="+", default=["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"], help="folders in --models")
    parser.add_argument("--formats", nargs="+", help="names; the default twenty-one without")
    parser.add_argument("--work", type=Path, default=Path("/tmp/lowbit-compare"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs among which processes are shared out")
    parser.add_argument("--processes", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="the command's own --quick, two formats, the first model")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="further options of the command, last")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.formats, arguments.more = arguments.model[:1], ["kivi_2bit", "kvarn_k2v2_g128"], ["--quick", *arguments.more]
    arguments.work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(arguments.model)) as pool:  # the models side by side
        list(pool.map(lambda model: measure(model, arguments), arguments.model))


if __name__ == "__main__":
    main()
