"""NVIDIA ModelOpt's FP8 KV calibration (`max`) on given token batches: the job and the answer of llmcompressor_child.py.

Run as a file by the Python of an environment with nvidia-modelopt 0.47: it imports nothing of ours. `observer` is not looked at.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_E4M3_MAX = 448.0
_KV_ONLY = [
    {"quantizer_name": "*", "enable": False},
    {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}, "enable": True},
]


def calibrate(job: dict[str, Any]) -> dict[str, Any]:
    versions = {name: version(name) for name in ("nvidia-modelopt", "torch", "transformers")}
    return {"runs": [_run(job["model"], run) for run in job["runs"]], "versions": versions}


def _run(path: str, run: dict[str, Any]) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, run["dtype"]), local_files_only=True).eval()

    def forward(network: Any) -> None:
        import numpy as np

        with np.load(run["batches"]) as file, torch.inference_mode():
            for number in range(len(file.files) // 2):
                network(input_ids=torch.from_numpy(file[f"ids_{number}"]), attention_mask=torch.from_numpy(file[f"mask_{number}"]))

    mtq.quantize(model, {"quant_cfg": _KV_ONLY, "algorithm": "max"}, forward_loop=forward)
    attention = {name: module for name, module in model.named_modules() if hasattr(module, "k_bmm_quantizer")}
    scales = {name: {kind: float(getattr(module, f"{kind}_bmm_quantizer").amax) / _E4M3_MAX for kind in "kv"} for name, module in attention.items()}
    return {"scales": scales}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(calibrate(given)), encoding="utf-8")
