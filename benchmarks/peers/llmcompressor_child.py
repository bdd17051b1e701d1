"""llm-compressor's KV calibration on given token batches. Run as a file by the Python of .venv-llmcompressor: it imports nothing of ours.

`python llmcompressor_child.py JOB.json`; the job holds `model`, `runs` (each with `dtype`, `observer`, null for llm-compressor's default, and
`batches`, an .npz of `ids_N` and `mask_N`, int64 [rows, length] each, in order) and `result`: the JSON file that gets, for each run in turn,
`scales` (attention module → k, v as floats), and `versions`. A run with `save`, the folder that the checkpoint is then saved to, is measured as
well (with `flops`: its arithmetic too), from the time its model is loaded: `benchmarks/bench_peer.py` measures ours by the same function.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any


@contextmanager
def measured(*, flops: bool = False) -> Iterator[dict[str, Any]]:
    """Fills a dict at the end of what is inside: `seconds` and `processor` seconds (all threads); `resident` and `peak`, this process's memory
    before and at most; `written`, bytes given to write calls; and with `flops` those of the operations that torch ran."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's counter does not know it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: loading is not what is compared
    found: dict[str, Any] = {"resident": 1024 * _number("status", "VmRSS")}
    written, processor, started = _number("io", "wchar"), time.process_time(), time.perf_counter()
    with FlopCounterMode(display=False, custom_mapping={flash: _attention_flops}) if flops else nullcontext() as counter:
        yield found
    found |= {"seconds": time.perf_counter() - started, "processor": time.process_time() - processor}
    found |= {"written": _number("io", "wchar") - written, "peak": peak()}
    if counter is not None:
        found["flops"] = counter.get_total_flops()


def peak() -> int:
    """The most memory that was resident since `measured` began, in bytes."""
    return 1024 * _number("status", "VmHWM")


def _number(file: str, name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self", file).read_text().splitlines())
    return int(lines[name].split()[0])


def _attention_flops(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    """Two products, over half of the square where it is causal: the kernel leaves out the other half."""
    batch, heads, length, width = query
    return batch * heads * length * (width + value[-1]) * ((length + 1) if causal else 2 * key[-2])


def calibrate(job: dict[str, Any]) -> dict[str, Any]:
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")}
    return {"runs": [_run(job["model"], run) for run in job["runs"]], "versions": versions}


def _run(path: str, run: dict[str, Any]) -> dict[str, Any]:
    import llmcompressor
    import torch
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, run["dtype"]), local_files_only=True)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    if run["observer"] is not None:
        scheme["observer"] = run["observer"]
    batches = _batches(run["batches"])
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # each item is a batch already: nothing is padded, cut or shuffled
    with measured(flops=run.get("flops", False)) if "save" in run else nullcontext({}) as found:
        llmcompressor.oneshot(
            model=model,
            recipe=QuantizationModifier(kv_cache_scheme=scheme),
            dataset=loader,
            num_calibration_samples=len(batches),
            max_seq_length=max(batch["input_ids"].shape[1] for batch in batches),
        )
        if "save" in run:
            started, found["peak_calibrating"] = time.perf_counter(), peak()
            model.save_pretrained(run["save"], save_compressed=True)
            found["saving"] = time.perf_counter() - started
    attention = {name: module for name, module in model.named_modules() if hasattr(module, "k_scale")}
    return found | {"scales": {name: {kind: float(getattr(module, f"{kind}_scale")) for kind in "kv"} for name, module in attention.items()}}


def _batches(path: str) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    with np.load(path) as file:
        count = len(file.files) // 2
        return [{"input_ids": torch.from_numpy(file[f"ids_{n}"]), "attention_mask": torch.from_numpy(file[f"mask_{n}"])} for n in range(count)]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(calibrate(given)), encoding="utf-8")
