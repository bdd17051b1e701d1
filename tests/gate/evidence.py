"""A calibrated tiny checkpoint with hand-made evidence that passes the default policy, and the means to spoil one thing at a time."""

import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np

from calibrate.artefact import sha256_file, write_json, write_tensors
from calibrate.checkpoint import write_checkpoint
from calibrate.collect import collect
from calibrate.engines.readback import LayerReadback, Readback
from calibrate.engines.session import EngineInfo
from calibrate.engines.source import file_scales
from calibrate.evaluate.evidence import READBACK_FILE, ReadbackResult, subject_of
from calibrate.evaluate.results import (
    FOLDER,
    Cell,
    CompareResult,
    DocumentScore,
    Fidelity,
    HeldOut,
    Interval,
    NeedleResult,
    NeedleVariant,
    Problem,
    ReasoningResult,
    ReasoningVariant,
    load,
    save,
)
from calibrate.model import SourceCheckpoint
from calibrate.scales import PolicyOptions, solve
from tests.conftest import collect_run, rows_corpus

ENGINE = EngineInfo(
    engine="transformers",
    version=f"transformers {version('transformers')}, torch {version('torch')}",
    attention_backend="sdpa",
    kv_cache_dtype="e4m3",
    compute_dtype="bfloat16",
    device="cpu",
)
KL = {"16-bit": 0.0, "unit": 0.006, "random": 0.0045, "calibrated": 0.004}
DOCUMENTS = 24
PROVENANCE = "kv_calibration/provenance.json"


def calibrated(source: Path, target: Path, **options) -> Path:
    """A checkpoint that kv-calibrate wrote, with its statistics and no evidence."""
    statistics = collect(collect_run(source, rows_corpus([40, 30, 50, 20])))
    opened = SourceCheckpoint.open(source)
    write_checkpoint(opened, solve(statistics, PolicyOptions(**options)), target, statistics=statistics)
    return target


def add_evidence(checkpoint: Path, engine: EngineInfo = ENGINE) -> Path:
    """Evidence of all kinds that passes."""
    folder = checkpoint / FOLDER
    save(readback_of(checkpoint), folder / READBACK_FILE)
    save(compare_of(checkpoint, engine), folder / f"compare-{engine.engine}.json")
    save(needles_of(checkpoint, engine), folder / f"niah-{engine.engine}.json")
    save(reasoning_of(checkpoint, engine), folder / f"reasoning-{engine.engine}.json")
    return checkpoint


def readback_of(checkpoint: Path, ranks: int = 1, engine: str | None = None) -> ReadbackResult:
    rows = [
        LayerReadback(name.rsplit(".", 1)[0], rank, name.rsplit(".", 1)[1][0], values := tuple(map(float, array)), values, True, "")
        for rank in range(ranks)
        for name, array in file_scales(checkpoint).items()
    ]
    engine = engine or installed_vllm()
    said = Readback(str(checkpoint), engine, "fp8", "CPU_ATTN", ranks, tuple(rows), ("vLLM generated 4 tokens",), 60.0)
    return ReadbackResult(subject=subject_of(checkpoint), readback=json.loads(json.dumps(said.as_dict())))


def installed_vllm() -> str:
    from calibrate.gate.freshness import installed

    return next((name for name in installed() if name.startswith("vllm")), "vllm 0.33.0")


def around(value: float, share: float = 0.1) -> Interval:
    return Interval(value=value, low=value * (1 - share), high=value * (1 + share))


def fidelity_of(variant: str, kl: float, engine: EngineInfo = ENGINE) -> Fidelity:
    noise = np.random.default_rng(5).normal(0, 1, DOCUMENTS)
    tokens = [120 + 3 * number for number in range(DOCUMENTS)]
    documents = tuple(
        DocumentScore(tokens=n, nll=n * (2.5 + kl / 2), abs_delta_logprob=n * kl, kl=n * kl * (1 + 0.05 * e), top1_agree=int(n * 0.98))
        for n, e in zip(tokens, noise, strict=True)
    )
    return Fidelity(
        variant=variant,
        engine=engine,
        documents=documents,
        perplexity=math.exp(2.5 + kl / 2),
        perplexity_ratio=around(math.exp(kl / 2), 0.001),
        mean_abs_delta_logprob=around(kl * 8),
        kl_mean=around(kl),
        kl_p99=around(kl * 6),
        top1_agreement=Interval(value=0.98, low=0.97, high=0.985),
    )


def held_out_of(variant: str, layer: int, kind: str, saturated: float = 0.0) -> HeldOut:
    unit = variant == "unit"
    return HeldOut(
        variant=variant,
        layer=layer,
        kind=kind,
        scale=(1.0,) if unit else (0.02,),
        amax=(3.0, 2.5),
        calibration_amax=3.1,
        snr_db=29.0 if unit else 31.5 + layer / 10,
        head_snr_db=(31.0, 32.0),
        saturated=saturated,
        head_saturated=(saturated, saturated),
        underflow=0.001 * layer,
        head_underflow=(0.001 * layer, 0.001 * layer),
        snr_interval=around(29.0 if unit else 31.5 + layer / 10, 0.01),
        saturated_interval=around(saturated),
        underflow_interval=around(0.001 * layer),
        attention_error=around(0.02) if kind == "k" else None,
    )


def compare_of(checkpoint: Path, engine: EngineInfo = ENGINE) -> CompareResult:
    return CompareResult(
        subject=subject_of(checkpoint),
        model="tiny-llama",
        corpus={"sources": [{"data": "builtin:code"}], "digest": "abc", "seed": 0},
        number_format="e4m3",
        fidelity=tuple(fidelity_of(name, kl, engine) for name, kl in KL.items()),
        held_out=tuple(held_out_of(name, layer, kind) for name in ("unit", "calibrated") for layer in range(3) for kind in "kvq"),
    )


def cells_of(hit=lambda length, depth, seed: True, seeds: int = 2) -> tuple[Cell, ...]:
    def cell(length: int, depth: float, seed: int) -> Cell:
        found = hit(length, depth, seed)
        fixed = {"task": "single", "language": "en", "expected": ("7",), "output": "7" if found else "6"}
        return Cell(length=length, depth=depth, needle=f"n{seed}", seed=seed, hit=found, **fixed)

    return tuple(cell(length, depth, seed) for length in (128, 256, 512) for depth in (0.0, 0.25, 0.5, 0.75, 1.0) for seed in range(seeds))


def needles_of(checkpoint: Path, engine: EngineInfo = ENGINE, **changed: tuple[Cell, ...]) -> NeedleResult:
    cells = {"16-bit": cells_of(), "unit": cells_of(lambda length, depth, seed: length < 512 or depth > 0.5), "calibrated": cells_of()} | changed
    return NeedleResult(
        subject=subject_of(checkpoint),
        model="tiny-llama",
        grid={"lengths": [128, 256, 512], "depths": [0.0, 0.25, 0.5, 0.75, 1.0], "languages": ["en"], "tasks": ["single"], "seed": 0},
        variants=tuple(NeedleVariant(variant=name, engine=engine, cells=some) for name, some in cells.items()),
    )


def reasoning_of(checkpoint: Path, engine: EngineInfo = ENGINE, right: int = 24) -> ReasoningResult:
    def problems(good: int) -> tuple[Problem, ...]:
        return tuple(Problem(task="arithmetic", number=number, expected="7", output="7", correct=number < good) for number in range(24))

    variants = tuple(ReasoningVariant(variant=name, engine=engine, problems=problems(good)) for name, good in (("16-bit", 24), ("calibrated", right)))
    return ReasoningResult(subject=subject_of(checkpoint), model="tiny-llama", tasks={"arithmetic": {"seed": 0}}, variants=variants)


def change(checkpoint: Path, kind: type, name: str, **fields) -> None:
    """Replace fields of a result file."""
    path = checkpoint / FOLDER / name
    save(load(kind, path).model_copy(update=fields), path)


def with_fidelity(checkpoint: Path, variant: str, **fields) -> None:
    """Replace fields of one variant's fidelity."""
    path = checkpoint / FOLDER / "compare-transformers.json"
    result = load(CompareResult, path)
    fidelity = tuple(one.model_copy(update=fields) if one.variant == variant else one for one in result.fidelity)
    save(result.model_copy(update={"fidelity": fidelity}), path)


def edit_scales(checkpoint: Path, edit, *, touch_digest: bool) -> None:
    """Edit the tensors of kv_scales.safetensors in place; `touch_digest` also writes the new file's digest into the provenance."""
    path = checkpoint / "kv_scales.safetensors"
    tensors = {name: array.copy() for name, array in file_scales(checkpoint).items()}
    edit(tensors)
    path.unlink()
    write_tensors(path, tensors, {"schema": "kv-calibrate/engine-scales/1"})
    if touch_digest:
        redigest(checkpoint, "kv_scales.safetensors")


def redigest(checkpoint: Path, *names: str) -> None:
    provenance = json.loads((checkpoint / PROVENANCE).read_text())
    provenance["files"] |= {name: sha256_file(checkpoint / name) for name in names}
    write_json(checkpoint / PROVENANCE, provenance)


def weight_file(checkpoint: Path) -> Path:
    """The first file of weights."""
    return next(path for path in sorted(checkpoint.glob("*.safetensors")) if path.name != "kv_scales.safetensors")
