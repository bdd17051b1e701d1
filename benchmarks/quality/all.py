"""run.py for several models and settings side by side on one GPU, each in a process of its own.

    python -m benchmarks.quality.all --models FOLDER --model NAME... --out FOLDER [--setting FLASH_ATTN:tensor ...] [-- options of run.py]

Results and logs lie in `--place` and, in one archive that is renewed as they grow, in `--out`. A setting that fails leaves its log; the others go on.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

SETTINGS = ["FLASH_ATTN:tensor", "FLASH_ATTN:head", "TRITON_ATTN:tensor"]
RENEW_SECONDS = 10.0


def archive(place: Path, out: Path) -> None:
    """All of `place` in one file, complete or as it was before."""
    part = out / "quality.tar.gz.part"
    with tarfile.open(part, "w:gz") as tar:
        for path in sorted(place.glob("*")):
            tar.add(path, path.name)
    part.replace(out / "quality.tar.gz")


def start(model: Path, setting: str, place: Path, options: list[str]) -> subprocess.Popen:
    backend, granularity = setting.split(":")
    name = f"{model.name}-{backend}-{granularity}"
    command = [sys.executable, "-m", "benchmarks.quality.run", "--model", str(model), "--backend", backend, "--granularity", granularity]
    with (place / f"{name}.log").open("w") as log:
        return subprocess.Popen([*command, "--out", str(place / f"{name}.json"), *options], stdout=log, stderr=subprocess.STDOUT)


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:180] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="the folder they lie in")
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--setting", nargs="+", default=SETTINGS, help="BACKEND:GRANULARITY")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--place", type=Path, default=Path("/tmp/quality-results"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() // 2 or 1)
    parser.add_argument("options", nargs="*", help="of run.py, after --")
    arguments = parser.parse_args()
    for folder in (arguments.out, arguments.place):
        folder.mkdir(parents=True, exist_ok=True)
    waiting = [(arguments.models / model, setting) for setting in arguments.setting for model in arguments.model]
    running: dict[str, subprocess.Popen] = {}
    started, renewed = time.monotonic(), 0.0
    while waiting or running:
        while waiting and len(running) < arguments.workers:
            model, setting = waiting.pop(0)
            running[f"{model.name}-{setting.replace(':', '-')}"] = start(model, setting, arguments.place, arguments.options)
        time.sleep(0.5)
        ended = {name: process.returncode for name, process in running.items() if process.poll() is not None}
        for name, code in ended.items():
            del running[name]
            print(f"{time.monotonic() - started:6.0f} s  {name} ended with {code}: {last_line(arguments.place / f'{name}.log')}", flush=True)
        if ended or time.monotonic() - renewed > RENEW_SECONDS:
            renewed = time.monotonic()
            archive(arguments.place, arguments.out)


if __name__ == "__main__":
    main()
