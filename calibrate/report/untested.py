"""What was not tested, in sentences: everything that a reader might take for granted and that no evidence speaks of."""

from typing import Any

from calibrate.evaluate.needle_tasks import TASKS
from calibrate.evaluate.results import OLD_FORMULA, RANDOM, SIXTEEN_BIT, UNIT
from calibrate.gate.material import Material
from calibrate.gate.verdict import Verdict
from calibrate.report.figures import name
from calibrate.report.results import Shown

_LANGUAGES = {"en": "English", "zh": "Chinese"}
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
_VARIANTS = (SIXTEEN_BIT, UNIT, RANDOM, OLD_FORMULA)


def untested(material: Material, results: Shown, verdict: Verdict) -> list[str]:
    """One sentence each."""
    found = [*results.left_out, *_readback(results.readback)]
    found += _fidelity(results.compare)
    found += _needles(results.niah, _context(material))
    if not results.reasoning:
        found.append("Multi-step reasoning: no problems were put to any cache (kv-calibrate reason).")
    found += _engines(results)
    found += [f"The gate's rule {check.name}: {check.reason}." for check in verdict.checks if check.status == "waived"]
    found.append("Speed, memory and concurrency: scales do not change them, an FP8 cache does (kv-calibrate plan and bench).")
    return found


def _readback(said: dict[str, Any] | None) -> list[str]:
    if said is None:
        return ["Loading: vLLM was not asked which scales it holds (kv-calibrate verify)."]
    found = []
    if not str(said["kv_cache_dtype"]).startswith("fp8"):
        found.append(f"Running in FP8: the read-back loaded the scales beside a {said['kv_cache_dtype']} cache, no FP8 kernel ran in it.")
    if said["tensor_parallel_size"] == 1:
        found.append("Tensor parallelism: scales were read back on one rank only.")
    return found


def _fidelity(compare: dict[str, Any]) -> list[str]:
    if not compare:
        return ["Fidelity and held-out saturation: nothing was compared with the 16-bit cache (kv-calibrate compare)."]
    found = []
    for engine, result in compare.items():
        absent = [name(variant) for variant in _VARIANTS if variant not in {one.variant for one in result.fidelity}]
        if absent:
            found.append(f"Other caches with {engine}: {', '.join(absent)} not measured.")
        if not result.held_out:
            found.append(f"Held-out saturation with {engine}: no layer was looked at.")
        elif all(row.attention_error is None for row in result.held_out):
            found.append(f"Attention output error with {engine}: not measured.")
    return found


def _needles(niah: dict[str, Any], context: int | None) -> list[str]:
    if not niah:
        return ["Long context: no needle was searched for (kv-calibrate niah)."]
    cells = [cell for result in niah.values() for each in result.variants for cell in each.cells]
    found = []
    longest = max((cell.length for cell in cells), default=0)
    if context and longest < context:
        found.append(f"Prompts beyond {longest:,} tokens: the model's context is {context:,}, so {1 - longest / context:.0%} of it holds no needle.")
    tasks = [task for task in TASKS if task not in {cell.task for cell in cells}]
    if tasks:
        found.append(f"Needle tasks: {', '.join(tasks)} not asked.")
    spoken = {cell.language for cell in cells}
    unspoken = [language for code, language in _LANGUAGES.items() if code not in spoken]
    found.append(f"Languages: needles in {', '.join(sorted(_LANGUAGES.get(code, code) for code in spoken))} only{_not(unspoken)}.")
    return found


def _not(languages: list[str]) -> str:
    return f", not in {' or '.join(languages)} or any other" if languages else ""


def _engines(results: Shown) -> list[str]:
    infos = [one.engine for result in results.compare.values() for one in result.fidelity]
    infos += [one.engine for kind in (results.niah, results.reasoning) for result in kind.values() for one in result.variants]
    if not infos:
        return []
    if not any(info.engine == "vllm" for info in infos):
        return ["Real FP8 kernels: all figures are the transformers engine's, which casts as they do; vLLM was not run for them."]
    ran = {info.attention_backend for info in infos if info.engine == "vllm"}
    other = [backend for backend in _BACKENDS if not any(backend in name for name in ran)]
    return [f"Attention backends: vLLM ran {', '.join(sorted(ran))}, not {', '.join(other)}."] if other else []


def _context(material: Material) -> int | None:
    return None if material.source.value is None else material.source.value.context_length
