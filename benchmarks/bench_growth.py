"""How time, memory and file size of a collection grow with tokens, layers and context, beside a bare forward over the same batches.

Random Llama and Mistral shapes in bfloat16, a process each. Memory is what the peak resident set rose by after the model was loaded and a short row
had run. Bare is `model.base_model(input_ids, use_cache=False)`, which also computes what follows the last cache write. Where a bare forward would
take memory for every pair of tokens (a sliding window's mask) it is left out.
"""

import json
import os
import re
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, present, row

from calibrate.collect import CollectRun, collect
from calibrate.corpus import Corpus, Sample, plan_batches
from calibrate.families.tiny import tiny_checkpoint, tiny_config
from calibrate.model import SourceCheckpoint, load_model, probe_layout

# Written before the first measurement: seconds a token do not grow with tokens, and with layers in proportion; memory neither with tokens nor layers
# but for the counts of each; a context's memory grows with its length, attention's time a token too.
PREDICTED = {
    "tokens": "the same µs/token",
    "layers": "µs/token in proportion",
    "context": "0.6 GB at 128k",
    "window": "0.6 GB at 128k",
}
VOCABULARY = 256
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
NARROW = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2}


def main() -> None:
    options = arguments(__doc__, longest=131072, tokens=65536)
    cases: list[tuple[str, str, dict[str, Any], int, int]] = []  # (table, family, config fields, tokens, row length)
    cases += [("tokens", "llama", WIDE | {"num_hidden_layers": 8}, tokens, 1024) for tokens in (4096, 16384, 65536) if tokens <= options.tokens]
    cases += [("layers", "llama", WIDE | {"num_hidden_layers": layers}, 8192, 1024) for layers in (2, 4, 8, 16)]
    lengths = [length for length in (2048, 8192, 32768, 131072) if length <= options.longest]
    cases += [("context", "llama", NARROW, length, length) for length in lengths]
    cases += [("window", "mistral", NARROW | {"sliding_window": 1024}, length, length) for length in lengths]
    rows, data = [], []
    for table, family, fields, tokens, length in cases:
        found = _in_a_process(lambda: _measure(family, fields, tokens, length))  # noqa: B023 (called at once)
        data.append({"table": table, "family": family, "tokens": tokens, "length": length, **fields, **found})
        name = f"{table}: {fields['num_hidden_layers']} layers, {tokens // length} x {length:,} tokens"
        rows.append(row(name, PREDICTED[table], _text(found, tokens)))
        print(name, rows[-1]["measured"], flush=True)
    present("Growth of a collection", rows, {"cases": data}, options.json)


def _text(found: dict[str, Any], tokens: int) -> str:
    if "error" in found:
        return found["error"]
    bare = f" ({found['bare'] / tokens * 1e6:.0f})" if found["bare"] else ""
    each = found["processor"] / tokens * 1e6
    return f"{each:.0f}{bare} µs/token, {found['seconds']:.1f} s, +{found['memory'] / 1e6:.0f} MB, file {found['file'] / 1e6:.2f} MB"


def _in_a_process(work: Any) -> dict[str, Any]:
    """What `work` returns, from a copy of this process, whose memory nothing has touched."""
    ear, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        os.write(mouth, json.dumps(found).encode())
        os._exit(0)
    os.close(mouth)
    with os.fdopen(ear) as told:
        text = told.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"error": "the process was killed"}')


def _measure(family: str, fields: dict[str, Any], tokens: int, length: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        shape = fields | {"vocab_size": VOCABULARY, "max_position_embeddings": length}
        path = tiny_checkpoint(Path(name) / "model", tiny_config(family, shape), dtype=torch.bfloat16)
        source = SourceCheckpoint.open(path)
        model = load_model(source, device="cpu", dtype=torch.bfloat16)
        run = CollectRun(model, source, probe_layout(model), *_rows(tokens, length))
        collect(replace(run, **dict(zip(("corpus", "batches"), _rows(64, 64), strict=True))))  # what is made once
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, wall, processor = _resident("VmRSS"), time.perf_counter(), time.process_time()
        statistics = collect(run)
        found = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor, "memory": _resident("VmHWM") - before}
        statistics.save(Path(name) / "statistics.safetensors")
        found |= {"file": (Path(name) / "statistics.safetensors").stat().st_size, "bare": None}
        if family == "llama":
            processor = time.process_time()
            with torch.inference_mode():
                for batch in run.batches:
                    model.base_model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)
            found["bare"] = time.process_time() - processor
        return found


def _rows(tokens: int, length: int) -> tuple[Corpus, tuple]:
    rng = np.random.default_rng(0)
    samples = tuple(Sample(rng.integers(3, VOCABULARY, length).astype(np.int32), row, f"rows:{row + 1}") for row in range(tokens // length))
    corpus = Corpus(samples, len(samples), f"rows-{tokens}-{length}", {"sources": [{"data": "rows"}], "seed": 0})
    return corpus, plan_batches(corpus, max(2048, length), pad_token_id=0)


def _resident(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


if __name__ == "__main__":
    main()
