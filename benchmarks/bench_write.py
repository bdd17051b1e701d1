"""Writing scales into a 16 GB checkpoint: seconds, and new bytes on disk. The weights are holes in sparse files."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from common import arguments, median, present, row, timed

from calibrate.checkpoint import write_checkpoint
from calibrate.model import SourceCheckpoint
from calibrate.scales import LayerScales, PolicyOptions, Scales

# Written before the first measurement.
PREDICTED = {"seconds": "0.2 s", "new": "0.3 MB", "weights": "0"}
LAYERS, HIDDEN, KV, INTERMEDIATE, VOCABULARY, SHARDS = 32, 4096, 1024, 14336, 128256, 4  # the shape of an 8-billion-parameter Llama 3


def main() -> None:
    options = arguments(__doc__, repeats=7)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        source = SourceCheckpoint.open(_checkpoint(Path(folder) / "source"))
        scales = _scales(source)
        weights = [source.path / name for name in source.headers]
        total = sum(path.stat().st_size for path in weights)
        runs = []
        for _ in range(options.repeats):
            output = Path(folder) / "output"
            wall, processor = timed(lambda output=output: write_checkpoint(source, scales, output))
            new = {path.name: path.stat().st_blocks * 512 for path in output.rglob("*") if path.is_file() and path.stat().st_nlink == 1}
            runs.append(
                {"wall": wall, "cpu": processor, "new_bytes": sum(new.values()), "new_weight_bytes": sum(new.get(p.name, 0) for p in weights)}
            )
            linked = sum((output / path.name).samefile(path) for path in weights)
            shutil.rmtree(output)
        opening = median([timed(lambda: SourceCheckpoint.open(source.path))[0] for _ in range(3)])
    walls = [run["wall"] for run in runs]
    rows = [
        row("checkpoint", "", f"{total / 1e9:.1f} GB in {len(weights)} shards, {linked} hard-linked"),
        row(
            "write_checkpoint, median (least)",
            PREDICTED["seconds"],
            f"{median(walls):.3f} s ({min(walls):.3f} s)",
            "< 2 s",
            median(walls) < 2,
        ),
        row("opening and checking the source", "", f"{opening:.3f} s"),
        row("new bytes on disk", PREDICTED["new"], f"{max(run['new_bytes'] for run in runs) / 1e6:.2f} MB"),
        row(
            "of them weights",
            PREDICTED["weights"],
            str(max(run["new_weight_bytes"] for run in runs)),
            "0",
            not any(r["new_weight_bytes"] for r in runs),
        ),
    ]
    present("Writing to a 16 GB checkpoint", rows, {"runs": runs}, options.json)


def _checkpoint(path: Path) -> Path:
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}))
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "lm_head.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{name}_proj.weight": [rows, HIDDEN] for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN))}
        shapes |= {f"{stem}.mlp.{name}_proj.weight": [INTERMEDIATE, HIDDEN] for name in ("gate", "up")}
        shapes[f"{stem}.mlp.down_proj.weight"] = [HIDDEN, INTERMEDIATE]
        shapes |= {f"{stem}.{name}.weight": [HIDDEN] for name in ("input_layernorm", "post_attention_layernorm")}
    weight_map = {}
    names = list(shapes)
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        mine = names[number::SHARDS]
        _sparse_shard(path / file, {name: shapes[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _sparse_shard(path: Path, shapes: dict[str, list[int]]) -> None:
    header, start = {}, 0
    for name, shape in shapes.items():
        end = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)


def _scales(source: SourceCheckpoint) -> Scales:
    one = np.array([0.0625], dtype=np.float32)
    layers = tuple(LayerScales(index, f"model.layers.{index}.self_attn", one, one, one) for index in range(LAYERS))
    provenance = (
        {"tool": "benchmark", "model": {"fingerprint": source.fingerprint}, "corpus": {"digest": "0" * 64, "sources": []}, "batches": "0" * 64},
    )
    return Scales(layers, PolicyOptions(), {"model_type": "llama", "layers": []}, "0" * 64, {"tokens": 1, "documents": 1, "samples": 1}, provenance)


if __name__ == "__main__":
    main()
