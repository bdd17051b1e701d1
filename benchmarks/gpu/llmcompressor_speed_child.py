"""How long llm-compressor's KV calibration takes on a model of a shape. Run as a file, with its packages on PYTHONPATH: it imports nothing of ours.

`python llmcompressor_speed_child.py JOB.json`; the job holds `config` (fields of a transformers config), `device`, `rows` (an .npy, int64
[rows, length]), `rows_at_once` (of a batch), `counts` (how many of the rows each run takes) and `result`: the JSON file that is written after
each run. What is timed is `oneshot`, on a model that is there already.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")}
    found: dict[str, Any] = {"versions": versions, "runs": []}
    for count in job["counts"]:
        found["runs"].append(_run(job, count))
        Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")


def _run(job: dict[str, Any], count: int) -> dict[str, Any]:
    import llmcompressor
    import numpy as np
    import torch
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**job["config"])
    with torch.device(job["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    folder = Path(job["result"]).parent / "config"  # it reads the config again, from where the model came
    config.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)
    cuda = job["device"].startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    rows = torch.from_numpy(np.load(job["rows"])[:count])
    batches = [{"input_ids": some, "attention_mask": torch.ones_like(some)} for some in rows.split(job["rows_at_once"])]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "static_minmax"}
    started = time.perf_counter()
    llmcompressor.oneshot(
        model=model,
        tokenizer=_tokenizer(),
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        num_calibration_samples=len(batches),
        max_seq_length=rows.shape[1],
    )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    scales = [float(module.k_scale) for module in model.modules() if hasattr(module, "k_scale")]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    print(f"llm-compressor: {rows.numel():,} tokens in {seconds:.1f} s, {len(scales)} layers", flush=True)
    return {"rows": count, "tokens": rows.numel(), "seconds": seconds, "layers": len(scales), "first_k_scale": scales[0], "peak_bytes": peak}


def _tokenizer() -> Any:
    """It asks for one where there is a dataset, though the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), pad_token="a")


if __name__ == "__main__":
    main()
