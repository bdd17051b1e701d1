"""llm-compressor's KV calibration on given token batches. Run as a file by the Python of .venv-llmcompressor: it imports nothing of ours.

`python llmcompressor_child.py JOB.json`; the job holds `model`, `runs` (each with `dtype`, `observer`, null for llm-compressor's default, and
`batches`, an .npz of `ids_N` and `mask_N`, int64 [rows, length] each, in order) and `result`: the JSON file that gets, for each run in turn,
`scales` (attention module → k, v as floats), and `versions`.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


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
    llmcompressor.oneshot(
        model=model,
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
        dataset=loader,
        num_calibration_samples=len(batches),
        max_seq_length=max(batch["input_ids"].shape[1] for batch in batches),
    )
    attention = {name: module for name, module in model.named_modules() if hasattr(module, "k_scale")}
    return {"scales": {name: {kind: float(getattr(module, f"{kind}_scale")) for kind in "kv"} for name, module in attention.items()}}


def _batches(path: str) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    with np.load(path) as file:
        count = len(file.files) // 2
        return [{"input_ids": torch.from_numpy(file[f"ids_{n}"]), "attention_mask": torch.from_numpy(file[f"mask_{n}"])} for n in range(count)]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(calibrate(given)), encoding="utf-8")
