"""How far scales can go: a coordinate search on the real kernels, on calibration text, one scale after the other.

    python -m benchmarks.quality.search --model DIR --granularity tensor --seconds 300 --out FOLDER

Each scale in turn is tried at 16 places of its octave, and the one of least mean KL (or mean |Δ log p|) from the 16-bit cache is kept. What is
found bounds from above what a rule that looks at one tensor at a time can reach; whether it holds on other text is for run.py to say, with
`--scales searched=FOLDER/best.safetensors`. The best scales and the course of the search are written as it goes.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.kernel import Kernel
from benchmarks.quality.rows import ROWS
from benchmarks.quality.run import Text, material_of, parser, references_of, setting_of, text_of
from benchmarks.quality.scoring import Reference
from calibrate.artefact import write_json
from calibrate.evaluate.baselines import read_scales
from calibrate.model import SourceCheckpoint
from calibrate.scales import LayerScales, Scales

PLACES = 16
SAVE_SECONDS = 20.0


class Search:
    """The state of one search: the best scales so far and their objective on the calibration rows."""

    def __init__(self, kernel: Kernel, text: Text, reference: Reference, scales: Scales, floor: Scales, objective: str, out: Path) -> None:
        self.kernel, self.text, self.reference, self.objective, self.out = kernel, text, reference, objective, out
        self.layers = list(scales.layers)
        self.scales, self.floor = scales, floor
        kernel.set_scales(scales)
        self.best = self.start = self.value()
        self.tried, self.kept, self.begun, self.saved = 1, [], time.monotonic(), 0.0
        self.save()

    def value(self) -> float:
        scores = self.kernel.score(self.text.rows, self.reference)
        if self.objective == "kl":
            return float(scores.kl.mean(dtype=np.float64))
        return float(np.abs(scores.logprob - self.reference.logprob).mean(dtype=np.float64))

    def improve(self, position: int, kind: str, part: slice) -> bool:
        """Try the places of one scale; whether one was better."""
        layer = self.layers[position]
        old, floor = getattr(layer, kind), getattr(self.floor.layers[position], kind)[part].max()
        found = None
        for factor in np.exp2((np.arange(1, PLACES) - PLACES // 2) / PLACES):
            values = old.copy()
            moved = old[part] * np.float32(factor if factor != 1 else 2**-0.5)  # its own place is known: the octave's other end stands in
            values[part] = moved if (moved >= floor).all() else moved * np.float32(2)
            self.kernel.set_layer(replace(layer, **{kind: values}))
            value = self.value()
            self.tried += 1
            if value < self.best:
                self.best, found = value, values
        self.layers[position] = layer if found is None else replace(layer, **{kind: found})
        self.kernel.set_layer(self.layers[position])
        if found is not None:
            ratio = float(found[part][0] / old[part][0])
            entry = {"layer": layer.index, "kind": kind, "at": part.start, "factor": ratio, "value": self.best, "seconds": self.seconds()}
            self.kept.append(entry)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()
        return found is not None

    def seconds(self) -> float:
        return round(time.monotonic() - self.begun, 2)

    def save(self) -> None:
        self.saved = time.monotonic()
        found = replace(self.scales, layers=tuple(self.layers), warnings=(*self.scales.warnings, f"searched on kernels by {self.objective}"))
        found.save(self.out / "best.safetensors")
        course = {
            "objective": self.objective,
            "start": self.start,
            "best": self.best,
            "tried": self.tried,
            "seconds": self.seconds(),
            "kept": self.kept,
        }
        write_json(self.out / "search.json", course)
        print(f"{self.seconds():7.1f} s  {self.tried} tried, {len(self.kept)} kept, {self.objective} {self.start:.6f} → {self.best:.6f}", flush=True)


def parts_of(layer: LayerScales, kind: str) -> Iterator[slice]:
    """What moves together: a KV head's scale, or those of the query heads that read it."""
    groups = len(layer.k) if kind == "q" else len(getattr(layer, kind))
    width = len(getattr(layer, kind)) // groups
    yield from (slice(group * width, (group + 1) * width) for group in range(groups))


def search(arguments: argparse.Namespace) -> dict[str, Any]:
    checkpoint, material = material_of(arguments.model, arguments.granularity, arguments.work, arguments.device, arguments.statistics)
    text = text_of(arguments.model, arguments.corpus[0], arguments.rows, arguments.length)
    setting = setting_of(arguments, checkpoint, [text])
    process, paths, _ = references_of(setting, {"": text}, {}, arguments.work)
    kernel = setting.kernel(fp8=True)
    if process is not None:
        process.join()
    if arguments.start in ROWS:
        begun = ROWS[arguments.start].make(material)
    else:
        begun = read_scales(SourceCheckpoint.open(checkpoint), Path(arguments.start), material.solved())
    arguments.out.mkdir(parents=True, exist_ok=True)
    state = Search(kernel, text, Reference.load(paths[""]), begun, material.solved("amax", 1.0), arguments.objective, arguments.out)
    limit = time.monotonic() + arguments.seconds
    for _ in range(arguments.sweeps):
        better = False
        for kind in arguments.order:
            for position, layer in enumerate(state.layers):
                for part in parts_of(layer, kind):
                    if time.monotonic() < limit:
                        better |= state.improve(position, kind, part)
        state.save()
        if not better or time.monotonic() >= limit:
            break
    return {"start": state.start, "best": state.best, "tried": state.tried}


def main() -> None:
    wanted = parser()
    wanted.description = __doc__
    wanted.set_defaults(corpus=["builtin"], rows=8)
    wanted.add_argument("--start", default="mse", help="a row's name, or a scales file")
    wanted.add_argument("--objective", choices=["kl", "delta"], default="kl")
    wanted.add_argument("--order", default="kqv", help="kinds, all layers of one after the other")
    wanted.add_argument("--sweeps", type=int, default=2)
    wanted.add_argument("--seconds", type=float, default=300.0, help="of searching; the engines' start comes on top")
    search(wanted.parse_args())


if __name__ == "__main__":
    main()
