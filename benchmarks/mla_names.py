"""Under which names, in which form, does vLLM load KV scales of multi-head latent attention? Every plausible one is tried on real vLLM.

    .venv/bin/python -m benchmarks.mla_names                 # the table of docs/architectures.md, about five minutes on two cores
    .venv/bin/python -m benchmarks.mla_names --families deepseek_v3 --impls auto

A tiny random model of each family gets scales that are all different from 1.0 and from each other, under one name in one form, and goes
through vLLM's own weight loader with an FP8 cache. "held": vLLM holds these values (rounded to bf16, as it keeps ModelOpt's); "dropped": it
holds 1.0 and said at most a line in its log; "refused": it raised.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calibrate.engines.process import run_child
from calibrate.families.tiny import tiny_checkpoint, tiny_config

_MLA = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_LONGCAT = {
    "num_layers": 2, "num_hidden_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2,
    "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    "deepseek_v3": _MLA | {"topk_method": "noaux_tc"},
    "glm4_moe_lite": _MLA,
    "longcat_flash": {name: value for name, value in _MLA.items() if name not in ("intermediate_size", "first_k_dense_replace")} | _LONGCAT,
    "youtu": _MLA,
}
# {m} is the attention module's path in the checkpoint; every k name has its v twin
NAMES = (
    "{m}.k_scale", "{m}.kv_scale", "{m}.attn.k_scale", "{m}.mla_attn.k_scale", "{m}.mla_attn.attn.k_scale", "{m}.mla_attn.mla_attn.k_scale",
    "{m}.k_proj.k_scale", "{m}.qkv_proj.k_scale", "{m}.kv_b_proj.k_scale", "{m}.kv_a_proj_with_mqa.k_scale", "{m}.k_cache.scale",
    "{m}.k_proj.output_scale", "{m}.kv_b_proj.output_scale", "{m}.kv_a_proj_with_mqa.output_scale",
)  # fmt: skip
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_CT = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "kv_cache_scheme": _SCHEME}
_GROUP = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}}}


def carriers(modules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name → quantization_config, the weights left as they are in each.

    Args:
        modules: every module of the checkpoint that has a weight.
    """
    return {
        "compressed-tensors": _CT | {"ignore": [], "config_groups": {}},
        "compressed-tensors, weights": _CT | {"format": "pack-quantized", "ignore": ["re:.*"], "config_groups": _GROUP},
        "modelopt": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["*"],
        },
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": list(modules), "kv_cache_scheme": _SCHEME},
    }


@dataclass(frozen=True)
class Trial:
    """One name in one form, and what became of it: "held", "dropped", "partly" or "refused: <vLLM's words>"."""

    family: str
    carrier: str
    impl: str
    name: str
    outcome: str


def try_names(
    families: Sequence[str], forms: Sequence[str], impls: Sequence[str], names: Sequence[str], folder: Path, timeout: float = 1800
) -> list[Trial]:
    """Try each combination in one child of vLLM's weight loader. `impls` are vLLM's `model_impl`: "auto", or "transformers" for that backend."""
    trials, jobs, scales = [], [], []
    for family in families:
        source = tiny_checkpoint(folder / family, tiny_config(family, FAMILIES[family]))
        for form in forms:
            for number, name in enumerate(names):
                checkpoint = folder / f"{family}-{len(jobs)}-{number}"
                scales.append(_write(source, checkpoint, form, name))
                for impl in impls:
                    jobs.append({"model": str(checkpoint), "dtype": "bfloat16", "kv_cache_dtype": "fp8", "model_impl": impl})
                    trials.append((family, form, impl, name, len(scales) - 1))
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result, failed = run_child("calibrate.engines.light_child", {"models": jobs, "device": "cpu"}, timeout, environment)
    if failed:
        raise failed
    answers = zip(trials, result["models"], strict=True)
    return [Trial(family, form, impl, name, _outcome(answer, scales[place])) for (family, form, impl, name, place), answer in answers]


def _write(source: Path, checkpoint: Path, form: str, name: str) -> dict[str, float]:
    """The source with scales under `name` in `form`; returns attention module → the k scale that belongs there."""
    checkpoint.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (checkpoint / file.name).symlink_to(file)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        weights = list(file.keys())
    modules = sorted({tensor.rsplit(".kv_b_proj.", 1)[0] for tensor in weights if ".kv_b_proj." in tensor})
    tensors, expected = {}, {}
    for number, module in enumerate(modules):
        expected[module] = 0.3125 + 0.015625 * number  # exact in bf16
        twins = {name, name.replace("k_scale", "v_scale").replace("k_cache", "v_cache").replace("k_proj.output", "v_proj.output")}
        tensors |= {one.format(m=module): torch.tensor([expected[module]]) for one in twins}
    save_file(tensors, checkpoint / "kv_scales.safetensors")
    weight_map = dict.fromkeys(weights, "model.safetensors") | dict.fromkeys(tensors, "kv_scales.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    owners = sorted({tensor.rpartition(".")[0] for tensor in weights if tensor.endswith(".weight")})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": carriers(owners)[form]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return expected


def _outcome(answer: dict[str, Any], expected: dict[str, float]) -> str:
    if answer["error"]:
        return f"refused: {answer['error'][:120]}"
    held = [tuple(record["scales"]["k"]) for record in answer["records"]]
    assert len(held) == len(expected), f"vLLM has {len(held)} attention layers, the checkpoint {len(expected)}"
    if held == [(value,) for value in expected.values()]:
        return "held"
    return "dropped" if all(value == (1.0,) for value in held) else f"partly: {held}"


def markdown(trials: Sequence[Trial]) -> Iterator[str]:
    """One row for each name, one column for each family, form and backend."""
    columns = list(dict.fromkeys((trial.family, trial.carrier, trial.impl) for trial in trials))
    yield "| name | " + " | ".join(f"{family}, {form}{', Transformers backend' if impl != 'auto' else ''}" for family, form, impl in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    found = {(trial.name, trial.family, trial.carrier, trial.impl): trial.outcome.partition(":")[0] for trial in trials}
    for name in dict.fromkeys(trial.name for trial in trials):
        yield f"| `{name.replace('{m}', '…')}` | " + " | ".join(found[name, *column] for column in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--forms", nargs="+", default=list(carriers([])), choices=list(carriers([])))
    parser.add_argument("--impls", nargs="+", default=["auto", "transformers"], choices=["auto", "transformers"])
    parser.add_argument("--json", type=Path, help="Write every trial, with vLLM's words, to this file.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mla-names-") as folder:
        trials = try_names(asked.families, asked.forms, asked.impls, NAMES, Path(folder))
    print("\n".join(markdown(trials)))
    if asked.json:
        asked.json.write_text(json.dumps([vars(trial) for trial in trials], indent=1))


if __name__ == "__main__":
    main()
