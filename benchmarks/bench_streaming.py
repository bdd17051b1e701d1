"""A checkpoint larger than a memory limit that the kernel enforces, against the same one without: the same bytes, peak memory, seconds.

The limit is RLIMIT_DATA (`ulimit -d`): a process may map so much private writable memory and no more, whether it is used or not: heap, stacks,
tensors, and weight files as safetensors maps them (privately). It does not count pages of libraries, which a kernel short of memory drops, nor
shared anonymous memory (the code counts). The peak resident set, which counts both, is therefore printed beside it and held to the same limit.
"""

import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import arguments, present, row
from safetensors.torch import save_file

# Written before the first measurement.
PREDICTED = {"peak": "1.2 GB", "seconds": "1.3 of the whole model's", "refused": "yes"}
HIDDEN, INTERMEDIATE, KV, VOCABULARY = 2048, 8192, 512, 32000  # 131 MB an embedding, 122 MB a layer
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    options = arguments(__doc__, gigabytes=1, limit="1.5G", samples=4, sequence_length=256)
    limit = round(float(options.limit.removesuffix("G")) * 1e9)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as name:
        folder = Path(name)
        size = _checkpoint(folder / "model", options.gigabytes * 10**9)
        text = " ".join(LETTERS[number % 26] for number in range(options.sequence_length))
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(options.samples)))
        words = ["collect", str(folder / "model"), "--data", str(folder / "text.jsonl"), "--samples", str(options.samples)]
        words += ["--sequence-length", str(options.sequence_length), "--device", "cpu", "-o"]
        # what fits is not streamed by itself: a small checkpoint is asked to be, a large one finds out
        streamed = _run([*words, str(folder / "streamed"), "--streaming", "auto" if size > limit else "always"], limit)
        whole = _run([*words, str(folder / "whole"), "--streaming", "never"])
        refused = _run([*words, str(folder / "refused"), "--streaming", "never"], limit)
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "streamed", folder / "whole") if path.exists()}
    equal = streamed["exit"] == whole["exit"] == 0 and digests["streamed"] == digests["whole"]
    under, bites = f"< {limit / 1e9:.1f} GB", refused["exit"] != 0
    rows = [
        row("checkpoint", "", f"{size / 1e9:.2f} GB, {options.samples} rows of {options.sequence_length} tokens"),
        row(f"limited to {limit / 1e9:.1f} GB: the same bytes as without", "yes", f"{'yes' if equal else 'no'} {_short(digests)}", "yes", equal),
        row("peak resident memory, limited", PREDICTED["peak"], f"{streamed['peak'] / 1e9:.2f} GB", under, streamed["peak"] < limit),
        row("peak resident memory, whole and unlimited", "", f"{whole['peak'] / 1e9:.2f} GB"),
        row("the whole model under the limit fails", PREDICTED["refused"], f"exit {refused['exit']} at {refused['peak'] / 1e9:.2f} GB", "", None),
        row("seconds, limited (whole)", PREDICTED["seconds"], f"{streamed['seconds']:.0f} s ({whole['seconds']:.0f} s)"),
        row("processor seconds, limited (whole)", "", f"{streamed['processor']:.0f} s ({whole['processor']:.0f} s)"),
    ]
    if size > limit:
        rows[4] |= {"target": "yes", "met": bites}
    runs = {"streamed": streamed, "whole": whole, "refused": refused}
    present("A model under a memory limit", rows, {"runs": runs, "size": size, "limit": limit, "digests": digests}, options.json)


def _short(digests: dict[str, str]) -> str:
    return "(" + ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items()) + ")"


def _run(words: list[str], limit: int | None = None) -> dict:
    """The real command in a process of its own, under a limit where one is given: exit status, peak resident bytes, wall and processor seconds."""
    start = time.perf_counter()
    child = os.fork()
    if not child:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        os.execv(sys.executable, [sys.executable, "-m", "calibrate", *words])
    _, status, usage = os.wait4(child, 0)
    spent = {"seconds": time.perf_counter() - start, "processor": usage.ru_utime + usage.ru_stime}
    return {"exit": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss * 1024, **spent}


def _checkpoint(path: Path, size: int) -> int:
    """Random weights, one shard a layer, made one at a time; the size that came out."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    path.mkdir()
    a_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INTERMEDIATE)
    layers = max(2, (size - 4 * VOCABULARY * HIDDEN) // a_layer)
    shapes = {"self_attn.q": (HIDDEN, HIDDEN), "self_attn.k": (KV, HIDDEN), "self_attn.v": (KV, HIDDEN), "self_attn.o": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate": (INTERMEDIATE, HIDDEN), "mlp.up": (INTERMEDIATE, HIDDEN), "mlp.down": (HIDDEN, INTERMEDIATE)}
    norm, table = torch.ones(HIDDEN, dtype=torch.bfloat16), (VOCABULARY, HIDDEN)
    shards = [{"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": None}]
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        norms = {f"{stem}.{name}.weight": None for name in ("input_layernorm", "post_attention_layernorm")}
        shards.append({f"{stem}.{name}_proj.weight": shape for name, shape in shapes.items()} | norms)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        made = {
            name: norm.clone() if shape is None else torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.04, 0.04, generator=generator)
            for name, shape in names.items()
        }
        save_file(made, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shape = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=VOCABULARY, dtype="bfloat16", tie_word_embeddings=False, **shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


if __name__ == "__main__":
    main()
