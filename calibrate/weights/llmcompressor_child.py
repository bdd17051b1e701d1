"""Quantizes a checkpoint's weights with llmcompressor. Run as a file by another environment's Python: it imports nothing of calibrate.

`python llmcompressor_child.py JOB.json`; the job holds `model`, `auto_class`, `output`, `scheme`, `tokens` (an .npz, or null), `seed`, `device`,
`trust_remote_code`, `alive_fd`, and `result`: the JSON file that tells what was done.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# Heads and routers stay as they are: engines build them unquantized.
_IGNORE = ["lm_head", r"re:.*\.(gate|router|shared_expert_gate)$", r"re:.*router\..*"]
_GROUP_SIZES = (128, 64, 32)  # the largest that divides every layer's input


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    threading.Thread(target=_follow_parent, args=(job["alive_fd"],), daemon=True).start()
    result = quantize(job)
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def quantize(job: dict[str, Any]) -> dict[str, Any]:
    """Quantize and save. Returns `group_size` (None where the scheme has no choice of one) and `versions`."""
    import compressed_tensors
    import llmcompressor
    import torch
    import transformers

    torch.manual_seed(job["seed"])
    options = {"trust_remote_code": job["trust_remote_code"], "local_files_only": True}
    model = getattr(transformers, job["auto_class"]).from_pretrained(
        job["model"], dtype="auto", device_map="auto" if job["device"] == "auto" else {"": job["device"]}, use_safetensors=True, **options
    )
    recipe, group_size = _recipe(job["scheme"], model)
    data = {} if job["tokens"] is None else _data(job["tokens"])
    if not torch.accelerator.is_available():
        _leave_unpinned()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], **options)  # else it would want an image processor where there are images
    llmcompressor.oneshot(model=model, processor=tokenizer, recipe=recipe, **data)
    model.save_pretrained(job["output"], save_compressed=True)
    versions = {module.__name__: module.__version__ for module in (compressed_tensors, llmcompressor, torch, transformers)}
    return {"group_size": group_size, "versions": versions}


def _leave_unpinned() -> None:
    """llmcompressor 0.14.0.1 pins AWQ's cache for copies to a GPU also where there is none, which torch refuses."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda *_, **__: None


def _recipe(scheme: str, model: Any) -> tuple[list[Any], int | None]:
    """llmcompressor's modifiers for one of our schemes (docs/weights.md)."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    ignore = _IGNORE + outside_the_language_model(model)
    common = {"targets": ["Linear"], "ignore": ignore}
    if scheme == "fp8":
        return [QuantizationModifier(scheme="FP8_DYNAMIC", **common)], None
    if scheme == "nvfp4":
        return [QuantizationModifier(scheme="NVFP4", **common)], None
    if scheme == "w8a8":
        return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", **common)], None
    size = _group_size(model, ignore)
    rest = {"ignore": ignore, "config_groups": {"group_0": _int4(size, symmetric=scheme != "awq")}}
    if scheme == "gptq":
        return [GPTQModifier(**rest)], size
    if scheme == "awq":
        return [AWQModifier(), QuantizationModifier(**rest)], size
    assert scheme == "w4a16", scheme
    return [QuantizationModifier(**rest)], size


def _int4(group_size: int | None, *, symmetric: bool) -> Any:
    """llmcompressor's W4A16 or W4A16_ASYM with this group size; None: one scale an output channel."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    preset = preset_name_to_scheme("W4A16" if symmetric else "W4A16_ASYM", ["Linear"])
    grouping = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel", "group_size": None}
    return QuantizationScheme(targets=["Linear"], weights={**preset.weights.model_dump(), **grouping})


def outside_the_language_model(model: Any) -> list[str]:
    """Linear layers of a vision-language model's towers and projectors: they stay as they are, as they do in calibration."""
    import torch

    if model.config.get_text_config(decoder=True) is model.config:
        return []
    inside = set(model.get_decoder().modules())
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module not in inside]


def _group_size(model: Any, ignore: list[str]) -> int | None:
    import torch
    from compressed_tensors.utils import match_named_modules

    inputs = {module.in_features for _, module in match_named_modules(model, ["Linear"], ignore) if isinstance(module, torch.nn.Linear)}
    return next((size for size in _GROUP_SIZES if all(columns % size == 0 for columns in inputs)), None)


def _data(path: str) -> dict[str, Any]:
    """Token rows as batches of one, in their order: nothing is padded, cut or shuffled."""
    import numpy as np
    import torch

    with np.load(path) as file:
        rows = np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
    batches = [
        {"input_ids": torch.from_numpy(row.astype(np.int64))[None], "attention_mask": torch.ones(1, len(row), dtype=torch.int64)} for row in rows
    ]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # each item is a batch already
    return {"dataset": loader, "num_calibration_samples": len(rows), "max_seq_length": max(map(len, rows))}


def _follow_parent(alive_fd: int) -> None:
    """The parent holds the other end of this pipe and writes nothing: a read returns only when it is gone, however it died."""
    os.read(alive_fd, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
