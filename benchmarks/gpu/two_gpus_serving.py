"""vLLM on several ranks: what each rank holds of the scales, and what the number of ranks does to fidelity and needles. Parts of `two_gpus.py`."""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from prove import Load, answers_of, checkpoints, load_for

from calibrate.engines import verify_checkpoint
from calibrate.engines.host import read_config
from calibrate.engines.process import run_child
from calibrate.engines.session import EngineInfo, TokenScores, Variant
from calibrate.engines.verify import _job, engine_env
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.errors import CalibrateError
from calibrate.evaluate.baselines import checkpoint_scales, overlay, unit_scales
from calibrate.evaluate.fidelity import delta_difference, fidelity, nll_difference
from calibrate.evaluate.mcnemar import compare_cells
from calibrate.evaluate.niah import Cell
from calibrate.evaluate.prompts import Prompter
from calibrate.evaluate.results import CALIBRATED, SIXTEEN_BIT, UNIT
from calibrate.model import SourceCheckpoint, load_tokenizer

HEAD = f"{CALIBRATED}-head"
Save = Callable[[dict[str, Any]], None]
Answers = tuple[EngineInfo, list[TokenScores], list[Cell]]


def failure(error: Exception) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__, "exit_code": getattr(error, "exit_code", None)}


def verify_part(arguments: argparse.Namespace, save: Save) -> None:
    """`verify --tensor-parallel-size`, and vLLM's own words where the tool refuses beforehand."""
    found: dict[str, Any] = {}
    jobs = []
    for model in arguments.model:
        for granularity, path in checkpoints(arguments.models / model, "base", arguments.work, arguments.device).items():
            jobs.append((model, granularity, path))
    with ThreadPoolExecutor(min(4, arguments.workers)) as pool:
        results = {pool.submit(_verified, path, arguments): (model, granularity) for model, granularity, path in jobs}
        for done in as_completed(results):
            model, granularity = results[done]
            found.setdefault(model, {})[granularity] = done.result()
            print(f"  {model} per {granularity}: {found[model][granularity].get('ok')} {found[model][granularity].get('error') or ''}", flush=True)
            save(found)


def _verified(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        readback = verify_checkpoint(path, tensor_parallel_size=arguments.ranks, timeout=240)
    except CalibrateError as error:
        return failure(error) | {"vllm": _vllm_says(path, arguments)}
    first = next(iter(readback.rows)).layer if readback.rows else None
    return {
        "ok": readback.ok,
        "rows": len(readback.rows),
        "equal": sum(row.ok for row in readback.rows),
        "failures": [str(row) for row in readback.failures[:6]],
        "error": readback.error,
        "backend": readback.attention_backend,
        "kv_cache_dtype": readback.kv_cache_dtype,
        "notes": readback.notes,
        "seconds": readback.seconds,
        "first_layer": [
            {"rank": row.rank, "kind": row.kind, "expected": row.expected, "loaded": row.loaded} for row in readback.rows if row.layer == first
        ],
    }


def _vllm_says(path: Path, arguments: argparse.Namespace) -> str:
    """What vLLM itself answers to that many ranks."""
    cuda = arguments.device == "cuda"
    job = _job(path, read_config(path), arguments.ranks, "fp8" if cuda else "auto") | {"not_run": ""}
    try:
        return str(run_child("calibrate.engines.vllm_child", job, 240, engine_env(arguments.ranks, cuda))[1] or "no error")
    except CalibrateError as error:
        return str(error)


def needles_part(arguments: argparse.Namespace, save: Save) -> None:
    """Each model with one rank and with several: 16-bit, scale 1.0, calibrated per tensor and per head; FLASH_ATTN on a GPU."""
    found: dict[str, Any] = {}
    for model in arguments.model:
        found[model] = {"sessions": {}}
        try:
            calibrated = checkpoints(arguments.models / model, "base", arguments.work, arguments.device)
            asked = argparse.Namespace(rows=arguments.rows, length=arguments.row_length, lengths=arguments.lengths, needles=arguments.needles)
            load = load_for(calibrated["tensor"], asked)
            found[model] |= load.description
            answers: dict[tuple[int, str], Answers] = {}
            prompter = Prompter(load_tokenizer(SourceCheckpoint.open(calibrated["tensor"])))
            with ThreadPoolExecutor(arguments.workers) as pool:
                jobs = {
                    pool.submit(answers_of, engine, variant, load, prompter): key for key, engine, variant in _sessions(calibrated, load, arguments)
                }
                for done in as_completed(jobs):
                    ranks, name = jobs[done]
                    try:
                        answers[ranks, name] = done.result()
                        told: dict[str, Any] = {"needles": sum(cell.hit for cell in answers[ranks, name][2]), "asked": len(load.asked)}
                    except CalibrateError as error:
                        told = failure(error)
                    found[model]["sessions"][f"{ranks} {name}"] = told
                    print(f"  {model} ranks {ranks} {name}: {told}", flush=True)
                    found[model] |= summary(answers, load, arguments.ranks)
                    save(found)
        except Exception as error:  # the next model goes on
            found[model] |= failure(error)
        save(found)


def _sessions(calibrated: dict[str, Path], load: Load, arguments: argparse.Namespace) -> list[tuple[tuple[int, str], VllmEngine, Variant]]:
    sessions = []
    for granularity, names in (("tensor", (SIXTEEN_BIT, UNIT, CALIBRATED)), ("head", (HEAD,))):
        source = SourceCheckpoint.open(calibrated[granularity])
        scales = checkpoint_scales(source)
        given = {SIXTEEN_BIT: None, UNIT: unit_scales(scales), CALIBRATED: scales, HEAD: scales}
        for ranks in (1, arguments.ranks):
            engine = VllmEngine(
                source=source,
                folder=arguments.work / "variants",
                overlay=lambda variant, base, source=source: overlay(source, variant, base / variant.name),
                attention_backend=None if arguments.device == "cpu" else "FLASH_ATTN",
                tensor_parallel_size=ranks,
                max_model_len=load.longest,
                gpu_memory_utilization=0.1,
                kv_cache_memory_bytes=None if arguments.device == "cpu" else 2 << 30,
                timeout=300,
            )
            sessions += [((ranks, name), engine, Variant(name, given[name])) for name in names]
    return sessions


def summary(answers: dict[tuple[int, str], Answers], load: Load, many: int) -> dict[str, Any]:
    """Fidelity of every session to the 16-bit cache of as many ranks, and what the number of ranks did: paired over documents and questions."""
    measured = {}
    for (ranks, name), (info, scores, _) in answers.items():
        if (ranks, SIXTEEN_BIT) in answers:
            measured[ranks, name] = fidelity(name, info, scores, answers[ranks, SIXTEEN_BIT][1], load.documents)
    result: dict[str, Any] = {
        "fidelity": {f"{ranks} {name}": each.model_dump() for (ranks, name), each in measured.items()},
        "needles": {f"{ranks} {name}": [cell.model_dump() for cell in answers[ranks, name][2]] for ranks, name in answers},
        "ranks": {},
    }
    for name in (SIXTEEN_BIT, UNIT, CALIBRATED, HEAD):
        one, more = (1, name), (many, name)
        if one not in answers or more not in answers:
            continue
        lost = compare_cells(answers[one][2], answers[more][2])
        moved = fidelity(name, answers[more][0], answers[more][1], answers[one][1], load.documents)  # the very cache, on more ranks
        both: dict[str, Any] = {
            "needles_lost": lost.first_only,
            "needles_won": lost.second_only,
            "p": lost.two_sided,
            "against_one_rank": _short(moved),
        }
        if one in measured and more in measured:
            both["nll_difference"] = nll_difference(measured[more], measured[one]).model_dump()
            both["abs_delta_difference"] = delta_difference(measured[more], measured[one]).model_dump()
        result["ranks"][name] = both
    result["calibrated_against_unit"] = {
        f"{ranks} {name}": delta_difference(measured[ranks, name], measured[ranks, UNIT]).model_dump()
        for ranks, name in measured
        if name in (CALIBRATED, HEAD) and (ranks, UNIT) in measured
    }
    return result


def _short(measured: Any) -> dict[str, Any]:
    fields: Sequence[str] = ("perplexity_ratio", "mean_abs_delta_logprob", "kl_mean", "top1_agreement")
    return {field: getattr(measured, field).model_dump() for field in fields}
