"""Low-bit KV formats side by side: vLLM's own kernels, and this project's implementation of the same formats in the transformers engine.

The same held-out rows and the same needles through every format that vLLM lists, each in a session of its own, and through the format of the same
name in `calibrate.lowbit`. Each is compared with the 16-bit cache of its own engine (vLLM: of its own attention backend). FP8 runs at scale 1.0.
What does not start is kept as its error text. One file a model, rewritten after every session.

`--patch` exchanges one part of vLLM where it does not run as it is (patched_session_child.py), in the sessions of the formats concerned: `fa3` or
`sdpa` for TurboQuant, which vLLM binds to FlashAttention 2, `triton-hadamard` for INT4. The sessions' names end in the patch.

usage: python benchmarks/gpu/lowbit_serving.py --out DIR [--model NAME …] [--only NAME …] [--patch fa3 triton-hadamard] [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from patched_session_child import PATCHES
from prove import Load, load_for

from calibrate.artefact import write_json
from calibrate.engines.conversation import conversation
from calibrate.engines.host import sixteen_bit, uses_cuda, vllm_distribution
from calibrate.engines.session import EngineInfo, Session, TokenScores, Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.engines.verify import backends, engine_env
from calibrate.engines.vllm_engine import VllmSession
from calibrate.engines.vllm_session_child import TOP
from calibrate.errors import CalibrateError
from calibrate.evaluate.fidelity import fidelity
from calibrate.evaluate.mcnemar import compare_cells
from calibrate.evaluate.prompts import Prompter
from calibrate.evaluate.results import Cell
from calibrate.lowbit import make_format
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.scales import LayerScales, PolicyOptions, Scales

# (kv_cache_dtype of vLLM, attention backend; None: vLLM chooses, 16-bit run that it is compared with)
SERVED = [
    ("auto", "FLASH_ATTN", None),
    ("auto", "TRITON_ATTN", None),
    ("fp8", "FLASH_ATTN", "auto FLASH_ATTN"),
    ("fp8", "TRITON_ATTN", "auto TRITON_ATTN"),
    ("fp8_e5m2", "TRITON_ATTN", "auto TRITON_ATTN"),
    ("fp8_per_token_head", "TRITON_ATTN", "auto TRITON_ATTN"),
    ("int8_per_token_head", "TRITON_ATTN", "auto TRITON_ATTN"),
    ("int4_per_token_head", "TRITON_ATTN", "auto TRITON_ATTN"),
    ("turboquant_k8v4", None, "auto FLASH_ATTN"),
    ("turboquant_4bit_nc", None, "auto FLASH_ATTN"),
    ("turboquant_k3v4_nc", None, "auto FLASH_ATTN"),
    ("turboquant_3bit_nc", None, "auto FLASH_ATTN"),
    ("nvfp4", None, "auto FLASH_ATTN"),
]
OURS = [
    "16-bit",
    "fp8_e4m3",
    "fp8_e4m3+q",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
]
FLASH = ("fa3", "sdpa")
# vLLM's name → ours, where they differ. "+q": the queries too, as vLLM's FP8 kernels do on CUDA.
SAME = {"fp8": "fp8_e4m3+q"}
# Written before the first run: whether |Δ log p| of vLLM's kernel and of ours agree within a quarter.
PREDICTED = dict.fromkeys(OURS[1:], True)
Answers = tuple[EngineInfo, list[TokenScores], list[Cell]]


def asked(session: Session, load: Load, prompter: Prompter, info: EngineInfo) -> Answers:
    scores = session.score(load.rows)
    most = max(each.request.max_new_tokens for each in load.asked)
    found = session.generate([each.request.tokens for each in load.asked], most, load.stop)
    told = (prompter.decode(tokens[: each.request.max_new_tokens]) for each, tokens in zip(load.asked, found, strict=True))
    return info, scores, [each.cell(text, plain=prompter.form == "plain") for each, text in zip(load.asked, told, strict=True)]


def through_vllm(model: Path, dtype: str, backend: str | None, patch: str | None, gpu: int, load: Load, arguments: argparse.Namespace) -> Answers:
    """One session of real vLLM with this cache; no scales are in the checkpoint, so that FP8 runs at 1.0."""
    source, distribution = SourceCheckpoint.open(model), vllm_distribution()
    cuda = uses_cuda(distribution)
    job: dict[str, Any] = {
        "model": str(model.resolve()),
        "dtype": sixteen_bit(source.config),
        "kv_cache_dtype": dtype,
        "max_model_len": load.longest + 1,
        "max_num_batched_tokens": arguments.block,
        "max_num_seqs": 1 if patch in FLASH or dtype.startswith("turboquant_") else 64,  # one at a time: a row's blocks are whole, as ours are
        "seed": 0,
        "kv_cache_memory_bytes": 2 << 30,
    }
    if cuda:
        job["gpu_memory_utilization"] = 0.1
        if backend is not None:
            job["attention_backend"] = backend
    env = engine_env(1, cuda) | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"} | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if cuda else {})
    module = "calibrate.engines.vllm_session_child" if patch is None else "benchmarks.gpu.patched_session_child"
    with conversation(module, {"arguments": job, "patch": patch}, 300, env) as child:
        hello = child.hello
        layers = [record for records in hello["ranks"] for record in records if record["caches"]]
        version = "".join(f" (FA{number})" for number in sorted({record["flash"] for record in layers} - {None}))
        flash = version if patch is None else f", {patch}"
        held = sorted({f"{record['kv_cache_dtype']} ({record['cache_dtype']})" for record in layers})
        info = EngineInfo(
            engine="vllm",
            version=distribution,
            attention_backend=backends(hello["ranks"]) + flash,
            kv_cache_dtype=" + ".join(held),
            compute_dtype=hello["dtype"],
            device=hello["device"],
        )
        return asked(VllmSession(child, info, load.longest), load, Prompter(load_tokenizer(source)), info)


def through_ours(arguments: argparse.Namespace) -> None:
    """The child of a format of ours: writes what it answered as numbers beside `--answers`."""
    model = arguments.models / arguments.model[0]
    load = load_for(model, arguments)
    engine = TransformersEngine(SourceCheckpoint.open(model), device=arguments.device, block=arguments.block)
    name = arguments.format
    store = None if name in ("16-bit", "fp8_e4m3+q") else make_format(name)
    variant = Variant(name, ones(engine) if name == "fp8_e4m3+q" else None, store)
    with engine.session(variant) as session:
        info, scores, cells = asked(session, load, Prompter(load_tokenizer(engine.source)), session.info())
    arrays = {f"{number}.{field}": getattr(row, field) for number, row in enumerate(scores) for field in ("logprob", "top_ids", "top_logprobs")}
    np.savez(arguments.answers.with_suffix(".npz"), **arrays)
    write_json(arguments.answers, {"info": info.model_dump(), "cells": [cell.model_dump() for cell in cells], "rows": len(scores)})


def ones(engine: TransformersEngine) -> Scales:
    """Scale 1.0 for q, k and v of every layer."""
    one = np.ones(1, dtype=np.float32)
    layers = tuple(LayerScales(layer.index, layer.module, one, one, one) for layer in engine.layout.layers)
    return Scales(layers, PolicyOptions(), engine.layout.as_dict(), "", {}, ())


def patches(dtype: str, backend: str | None, wanted: list[str]) -> list[str | None]:
    """The patches with which a format is run, None for vLLM as it is. A patched attention gets a 16-bit session of its own to be compared with."""
    if (dtype, backend) == ("auto", "FLASH_ATTN"):
        return [None, *(name for name in wanted if name in FLASH)]
    found: list[str | None] = [name for name in wanted if dtype.startswith(PATCHES[name][1])]
    return found or [None]


def named(*words: str | None) -> str:
    return " ".join(word for word in words if word)


def ours(model: str, name: str, gpu: int, arguments: argparse.Namespace) -> Answers:
    """A format of ours in a process of its own."""
    path = arguments.work / f"{model}-{name}.json"
    words = [sys.executable, __file__, "--out", str(arguments.out), "--models", str(arguments.models), "--model", model, "--format", name]
    words += ["--answers", str(path), "--device", arguments.device, "--rows", str(arguments.rows), "--length", str(arguments.length)]
    words += ["--lengths", *map(str, arguments.lengths), "--needles", str(arguments.needles), "--block", str(arguments.block)]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if arguments.device == "cuda" else {})
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise CalibrateError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    told = json.loads(path.read_text(encoding="utf-8"))
    with np.load(path.with_suffix(".npz")) as file:
        rows = ([file[f"{row}.{field}"] for field in ("logprob", "top_ids", "top_logprobs")] for row in range(told["rows"]))
        scores = [TokenScores(own, ids[:, :TOP], likely[:, :TOP]) for own, ids, likely in rows]  # KL is a bound that grows with tokens listed
    return EngineInfo(**told["info"]), scores, [Cell(**cell) for cell in told["cells"]]


def measure(model: str, arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    path = arguments.models / model
    load = load_for(path, arguments)
    found: dict[str, Any] = {"schema": "kv-calibrate/lowbit-serving/1", "model": model, "predicted": PREDICTED, **load.description, "sessions": {}}
    found |= {"rows": {}, "pairs": []}
    writing = Lock()
    answers: dict[str, Answers] = {}
    references: dict[str, str | None] = {}
    jobs: list[tuple[str, str | None, Callable[[int], Answers]]] = []
    for dtype, backend, reference in SERVED if "vllm" in arguments.engine else ():
        for patch in patches(dtype, backend, arguments.patch):
            compared_with = reference and named(reference, patch if patch in FLASH else None)
            work = partial(through_vllm, path, dtype, backend, patch, load=load, arguments=arguments)
            jobs.append((named(dtype, backend, patch), compared_with, work))
    for name in OURS if "transformers" in arguments.engine else ():
        reference = None if name == "16-bit" else "ours 16-bit"
        jobs.append((f"ours {name}", reference, partial(ours, model, name, arguments=arguments)))
    if arguments.only:
        chosen = {label: reference for label, reference, _ in jobs if any(word in label for word in arguments.only)}
        jobs = [job for job in jobs if job[0] in chosen or job[0] in chosen.values()]

    def run(numbered: tuple[int, tuple[str, str | None, Callable[[int], Answers]]]) -> None:
        number, (label, reference, work) = numbered
        references[label] = reference
        begun = time.perf_counter()
        try:
            answers[label] = work(number % arguments.gpus)
            told: dict[str, Any] = {"needles": sum(cell.hit for cell in answers[label][2]), "asked": len(load.asked)}
        except Exception as error:  # the other formats go on
            told = {"error": str(error), "kind": type(error).__name__}
        with writing:
            found["sessions"][label] = told | {"seconds": round(time.perf_counter() - begun, 1)}
            print(f"  {model} {label}: {found['sessions'][label]}", flush=True)
            for each in answers.keys() - found["rows"].keys():
                if references[each] is None or references[each] in answers:
                    found["rows"][each] = row(each, answers, references[each], load)
            found["pairs"] = pairs(found["rows"])
            write_json(arguments.out / f"lowbit-{model}.json", found | {"seconds": round(time.perf_counter() - started, 1)})

    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(run, enumerate(jobs)))
    for each in answers.keys() - found["rows"].keys():  # their 16-bit session failed
        found["rows"][each] = row(each, answers, references[each], load)
    write_json(arguments.out / f"lowbit-{model}.json", found | {"seconds": round(time.perf_counter() - started, 1)})
    for pair in found["pairs"]:
        delta = pair["mean_abs_delta_logprob"]
        print(f"  {pair['vllm']}: |Δ log p| {delta['vllm']['value']:.4f}, ours {delta['ours']['value']:.4f}", flush=True)
    print(f"{model}: {time.perf_counter() - started:.0f} s", flush=True)


def row(label: str, answers: dict[str, Answers], reference: str | None, load: Load) -> dict[str, Any]:
    """Fidelity to the 16-bit cache of the same engine, and needles beside its."""
    info, scores, cells = answers[label]
    result: dict[str, Any] = {"engine": info.model_dump(), "cells": [cell.model_dump() for cell in cells], "reference": reference}
    base = answers.get(reference or label)
    if base is None:
        return result
    measured = fidelity(label, info, scores, base[1], load.documents).model_dump(exclude={"engine"})
    lost = compare_cells(base[2], cells)
    return result | {"fidelity": measured, "lost": lost.first_only, "won": lost.second_only, "p": lost.two_sided}


def pairs(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM's figures and ours of the same format beside each other."""
    result = []
    for label, each in rows.items():
        dtype = label.partition(" ")[0]
        mine = rows.get(f"ours {SAME.get(dtype, dtype)}")
        if label.startswith("ours") or dtype == "auto" or mine is None or "fidelity" not in each or "fidelity" not in mine:
            continue
        figures = {}
        for field in ("kl_mean", "mean_abs_delta_logprob", "perplexity_ratio"):
            figures[field] = {"vllm": each["fidelity"][field], "ours": mine["fidelity"][field]}
        agree = figures["mean_abs_delta_logprob"]
        figures["delta_ratio"] = agree["vllm"]["value"] / agree["ours"]["value"] if agree["ours"]["value"] else None
        result.append({"vllm": label, "ours": f"ours {SAME.get(dtype, dtype)}", **figures})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--model", nargs="+", default=["SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"], help="folders in --models")
    parser.add_argument("--engine", nargs="+", default=["vllm", "transformers"], choices=["vllm", "transformers"])
    parser.add_argument("--only", nargs="+", help="sessions whose name holds one of these, and what they are compared with")
    parser.add_argument("--patch", nargs="+", default=[], choices=list(PATCHES), help="parts of vLLM to exchange")
    parser.add_argument("--work", type=Path, default=Path("/tmp/lowbit-serving"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs among which sessions are shared out")
    parser.add_argument("--workers", type=int, default=6, help="sessions at once")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--block", type=int, default=512, help="tokens of a prefill step, in both engines")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--needles", type=int, default=2, help="questions at each length and depth")
    parser.add_argument("--format", help=argparse.SUPPRESS)  # of the child
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rows, a few needles, the first model")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.rows, arguments.length, arguments.lengths, arguments.needles = arguments.model[:1], 2, 256, [256], 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.format:
        through_ours(arguments)
        return
    for model in arguments.model:
        measure(model, arguments)


if __name__ == "__main__":
    main()
