"""What several GPUs change: nothing but the time. One JSON file a part, rewritten after every step, so that a stopped run keeps what it has.

    nccl     collection at the shape of Llama-3-8B by one process and by one a GPU over NCCL: the same bytes, and how much faster
    cli      the same of a real model through `kv-calibrate collect` and torchrun
    death    a rank is killed: one line, and a single process goes on to the same bytes
    sharded  one model over all GPUs (`--device auto`) against one GPU: how far statistics and scales move
    verify   read-back by vLLM on several ranks, per tensor and per head
    needles  fidelity and needles with one rank and with several, 16-bit, scale 1.0 and calibrated

usage: python benchmarks/gpu/two_gpus.py --out DIR [--part nccl --part …] [--quick]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from two_gpus_serving import needles_part, verify_part

from calibrate.artefact import sha256_file, write_json
from calibrate.model import SourceCheckpoint, load_model
from calibrate.scales import PolicyOptions, solve
from calibrate.statistics import Statistics

# Written before the first run.
PREDICTED = {
    "nccl": {"same_bytes": True, "speed_up": 1.95},
    "cli": {"same_bytes": True},
    "death": {"same_bytes": True},
    "sharded": {"codes_moved": 0.0, "why": "the same kernels on the same shapes: only the place changes"},
    "verify": {"SmolLM2-135M-Instruct": "refused: 9 query heads over 2 ranks", "others": "every scale equal on every rank"},
    "needles": {"calibrated_tp_shift": "its 95% interval holds zero: ranks hold whole heads, only sums over ranks round anew"},
}
SHAPE = Path(__file__).with_name("collect_shape.py")
Save = Callable[[dict[str, Any]], None]


def command_of(script: list[str], processes: int) -> list[str]:
    """One plain process, or so many by torchrun."""
    if processes == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *script]


def ran(script: list[str], processes: int = 1) -> dict[str, Any]:
    """Run it; its seconds, imports included, and its last error lines where it failed."""
    started = time.perf_counter()
    done = subprocess.run(command_of(script, processes), capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"processes": processes, "wall": round(time.perf_counter() - started, 2), "exit_code": done.returncode}
    if done.returncode:
        found["stderr"] = done.stderr[-3000:]
        print(done.stderr[-3000:], flush=True)
    return found


def shape_run(arguments: argparse.Namespace, name: str, processes: int, samples: int, *more: str) -> dict[str, Any]:
    """`collect_shape.py`, and what it wrote."""
    place = arguments.work / f"shape-{name}"
    words = ["--tokenizer", str(arguments.models / arguments.tokenizer), "--device", arguments.device, "--samples", str(samples)]
    words += ["--shape", arguments.shape, "--length", str(arguments.length), "--json", f"{place}.json", "--statistics", f"{place}.safetensors"]
    found = ran([str(SHAPE), *words, *more], processes)
    return found | (json.loads(Path(f"{place}.json").read_text(encoding="utf-8")) if found["exit_code"] == 0 else {})


def nccl(arguments: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {}
    for processes in (1, arguments.ranks):
        found[f"{processes}"] = shape_run(arguments, f"of-{processes}", processes, arguments.samples)
        save(found)
    one, many = found["1"], found[str(arguments.ranks)]
    if one["exit_code"] == many["exit_code"] == 0:
        found["same_bytes"] = one["file_sha256"] == many["file_sha256"]
        found["speed_up"] = {name: one[name] / many[name] for name in ("seconds", "observing")}
    save(found)


def collect_words(model: Path, output: Path, device: str, *more: str) -> list[str]:
    options = ["--device", device, "--tokens-per-batch", "4096", "--kvarn", "--force", *more]
    return ["-m", "calibrate", "collect", str(model), "-o", str(output), *options]


def cli(arguments: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {}
    for processes in (1, arguments.ranks):
        output = arguments.work / f"cli-{processes}.safetensors"
        found[f"{processes}"] = ran(collect_words(arguments.models / arguments.tokenizer, output, arguments.device), processes)
        if output.exists():
            found[f"{processes}"]["file_sha256"] = sha256_file(output)
        save(found)
    found["same_bytes"] = len({found[key].get("file_sha256", key) for key in ("1", str(arguments.ranks))}) == 1
    save(found)


def death(arguments: argparse.Namespace, save: Save) -> None:
    """Rank 1 is killed once it has kept something; what is said, and whether one process goes on to the bytes of a whole run."""
    model, tokens = (
        arguments.models / arguments.tokenizer,
        ["--data", "random", "--samples", str(arguments.death_samples), "--sequence-length", str(arguments.length)],
    )
    whole, killed = arguments.work / "whole.safetensors", arguments.work / "killed.safetensors"
    found: dict[str, Any] = {"whole": ran(collect_words(model, whole, arguments.device, *tokens))}
    save(found)
    words = collect_words(model, killed, arguments.device, *tokens, "--save-every", "0")
    job = subprocess.Popen(command_of(words, arguments.ranks), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    state = arguments.work / ".killed.safetensors.collect-state.rank1.safetensors"
    until = time.monotonic() + 120
    while not state.exists() and job.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    started = time.perf_counter()
    if job.poll() is None and (victim := _rank_of(job.pid, 1)):
        os.kill(victim, signal.SIGKILL)
    stderr = job.communicate(timeout=120)[1]
    found["killed"] = {
        "exit_code": job.returncode,
        "seconds_to_end": round(time.perf_counter() - started, 2),
        "said": [line for line in stderr.splitlines() if line.startswith("error: ")],
    }
    save(found)
    found["resumed"] = ran(collect_words(model, killed, arguments.device, *tokens))
    if whole.exists() and killed.exists():
        found["same_bytes"] = sha256_file(whole) == sha256_file(killed)
    save(found)


def _rank_of(launcher: int, rank: int) -> int | None:
    """The process of that rank among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next((int(child) for child in children if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes()), None)


def distance(one: Statistics, other: Statistics) -> dict[str, Any]:
    """How far two runs over the same batches are apart, over all heads: codes (the least that must have moved), amax, channel sums, scales."""
    moved, amax, heads, values = [0.0], [0.0], 0, one.values()
    sums_equal = True
    for index, kinds in one.layers.items():
        for kind, mine in kinds.items():
            theirs = other.layers[index][kind]
            heads += len(mine.counts)
            moved.append(float(np.abs(mine.counts - theirs.counts).sum() / 2 / mine.counts.sum()))
            amax.append(float(np.abs(values[mine.amax_codes] / values[theirs.amax_codes] - 1).max()))
            sums_equal &= mine.sums is None or np.array_equal(mine.sums, theirs.sums)
    result = {"heads": heads, "codes_moved": max(moved), "amax_moved": max(amax), "channel_sums_equal": bool(sums_equal)}
    for policy in ("mse", "amax"):
        pairs = zip(*(solve(each, PolicyOptions(policy=policy)).layers for each in (one, other)), strict=True)
        kinds = [(a, b) for mine, theirs in pairs for (_, a), (_, b) in zip(mine.items(), theirs.items(), strict=True)]
        result[f"{policy}_scales_moved"] = max(float(np.abs(a / b - 1).max()) for a, b in kinds)
    return result | {"same_digest": one.digest() == other.digest()}


def sharded(arguments: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {}
    few = arguments.spread_samples
    for name, more in (("one", ("--kvarn",)), ("spread", ("--kvarn", "--spread"))):
        found.setdefault("shape", {})[name] = shape_run(arguments, name, 1, few, *more)
        save(found)
    if all(found["shape"][name]["exit_code"] == 0 for name in ("one", "spread")):
        found["shape"]["distance"] = distance(*(Statistics.load(arguments.work / f"shape-{name}.safetensors") for name in ("one", "spread")))
        save(found)
    one_gpu = f"{arguments.device}:0" if arguments.device == "cuda" else arguments.device
    auto = "auto" if arguments.device == "cuda" else arguments.device
    jobs = [
        (model, device, arguments.work / f"placed-{model}-{number}.safetensors")
        for model in arguments.model
        for number, device in enumerate((one_gpu, auto))
    ]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda job: ran(collect_words(arguments.models / job[0], job[2], job[1])), jobs))
    for (model, device, output), result in zip(jobs, results, strict=True):
        found.setdefault(model, {})[device] = result | ({"file_sha256": sha256_file(output)} if output.exists() else {})
    save(found)
    for model in arguments.model:
        found[model]["devices"] = _devices(arguments.models / model, auto)
        files = [output for name, _, output in jobs if name == model]
        if all(file.exists() for file in files):
            found[model]["distance"] = distance(*map(Statistics.load, files))
    save(found)


def _devices(model: Path, device: str) -> list[str]:
    """Where the layers of a model lie that `--device auto` places."""
    source = SourceCheckpoint.open(model)
    placed = load_model(source, device=device, dtype=torch.bfloat16)
    return sorted({str(parameter.device) for parameter in placed.parameters()})


PARTS = {"nccl": nccl, "cli": cli, "sharded": sharded, "verify": verify_part, "needles": needles_part, "death": death}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--model", nargs="+", default=["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "gemma-3-270m"])
    parser.add_argument(
        "--tokenizer", default="SmolLM2-135M-Instruct", help="a folder in --models: the tokenizer of the shape, and the model of cli and death"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/two-gpus"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--samples", type=int, default=512, help="rows of the shape's collection")
    parser.add_argument("--spread-samples", type=int, default=64)
    parser.add_argument("--death-samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=8, help="vLLM sessions at once")
    parser.add_argument("--rows", type=int, default=24, help="held-out rows that are scored")
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--needles", type=int, default=4, help="questions at each length and depth")
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny shape, few rows and needles, one model")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shape, arguments.samples, arguments.spread_samples, arguments.death_samples = "tiny", 32, 16, 64
        arguments.rows, arguments.row_length, arguments.lengths, arguments.needles = 2, 256, [256], 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    for part in arguments.part or PARTS:
        started = time.perf_counter()
        kept: dict[str, Any] = {}

        def save(found: dict[str, Any], part: str = part, started: float = started, kept: dict[str, Any] = kept) -> None:
            kept.update(found)
            head = {
                "schema": "kv-calibrate/two-gpus/1",
                "part": part,
                "predicted": PREDICTED.get(part),
                "seconds": round(time.perf_counter() - started, 1),
            }
            write_json(arguments.out / f"{part}.json", head | kept)

        try:
            PARTS[part](arguments, save)
        except Exception as error:  # the other parts go on
            save({"error": f"{type(error).__name__}: {error}"})
        shown = {name: kept[name] for name in ("same_bytes", "speed_up", "error") if name in kept}
        print(f"{part}: {time.perf_counter() - started:.0f} s {shown}", flush=True)


if __name__ == "__main__":
    main()
