"""Collection at the shape of Llama-3-8B with random weights, made on the device from a fixed seed: no checkpoint is read.

One process, or several: torchrun --standalone --nproc-per-node 2 benchmarks/gpu/collect_shape.py …
What is timed is `calibrate.collect.collect`, from batches to statistics on the host; the model and the batches are there before it, and two
batches have been run once. `--spread`: the layers of one model are spread over all GPUs.

usage: python benchmarks/gpu/collect_shape.py --tokenizer FOLDER --json FILE [--statistics FILE] [--samples 512] [--shape tiny] [--spread]
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from calibrate.artefact import sha256_file, write_json
from calibrate.collect import Team, collect, joined, prepare
from calibrate.corpus import CorpusOptions, load_corpus
from calibrate.model import SourceCheckpoint

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    },
}


def build(shape: str, device: str, spread: bool) -> PreTrainedModel:
    """The same weights on every rank and in every run: they are drawn on the device from one seed."""
    torch.manual_seed(0)
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **SHAPES[shape])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    if not spread:
        return model
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    blocks = list(model._no_split_modules)
    room = get_balanced_memory(model, no_split_module_classes=blocks, dtype=torch.bfloat16)
    return dispatch_model(model, infer_auto_device_map(model, max_memory=room, no_split_module_classes=blocks, dtype=torch.bfloat16))


def measure(arguments: argparse.Namespace, team: Team) -> dict[str, Any]:
    device = team.device(arguments.device)
    started = time.perf_counter()
    model = build(arguments.shape, device, arguments.spread)
    source = SourceCheckpoint(arguments.tokenizer, model.config.to_dict(), {}, {}, False)  # there are no weight files
    options = CorpusOptions(data="random", samples=arguments.samples, sequence_length=arguments.length)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    corpus = load_corpus(options, tokenizer, vocab_size=source.vocab_size, context_length=source.context_length)
    run = prepare(model, source, corpus, second_moments=arguments.kvarn)
    ready = time.perf_counter() - started
    collect(replace(run, batches=run.batches[:2]))  # each rank by itself
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    team.meet("ready")
    started = time.perf_counter()
    last = [started]
    statistics = collect(run, after_batch=lambda *_: last.append(time.perf_counter()), team=team)
    seconds = time.perf_counter() - started
    mine = {"seconds": seconds, "observing": last[-1] - started, "batches": len(last) - 1, "ready": ready}
    if device.startswith("cuda"):
        mine |= {"peak_bytes": torch.cuda.max_memory_allocated(), "name": torch.cuda.get_device_name()}
    ranks = team.exchange("measured", mine)
    found = {
        "processes": team.rank.size,
        "shape": arguments.shape,
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "tokens": run.tokens,
        "batches": len(run.batches),
        "seconds": max(rank["seconds"] for rank in ranks),
        "observing": max(rank["observing"] for rank in ranks),
        "ranks": ranks,
        "versions": {"torch": torch.__version__},
    }
    if team.rank.leads:
        found["digest"] = statistics.digest()
        if arguments.statistics:
            statistics.save(arguments.statistics)
            found["file_sha256"] = sha256_file(arguments.statistics)
        write_json(arguments.json, found)
    team.meet("written")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint folder, for its tokenizer's special ids")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kvarn", action="store_true")
    parser.add_argument("--spread", action="store_true")
    arguments = parser.parse_args()
    with joined() as team:
        found = measure(arguments, team)
        if team.rank.leads:
            where = ", ".join(found["devices"])
            print(f"{found['processes']} process(es), rank 0 on {where}: {found['seconds']:.2f} s for {found['tokens']:,} tokens", flush=True)


if __name__ == "__main__":
    main()
