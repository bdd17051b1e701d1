"""Low-bit formats tile by tile, on K and V of real models: error, norms, VarN's imbalance, and what its clamp floor does to small tensors.

    python benchmarks/lowbit_tiles.py MODEL... [--tokens 2048] [--every 1] [--cache FOLDER] [--no-codebooks] [--json FILE]

K and V of one row of English documentation, captured from a plain forward and rounded to the model's 16-bit type. Tables and codebooks come from
another row. Only tokens after the first 128 count, which KVarN leaves in 16 bits. Errors are relative to the energy about each channel's mean:
K's mean shifts all logits of a query alike, and a large one (QKV biases) would hide everything else.

Prediction, written first: V lies below VarN's floor in most tiles of SmolLM2 and Qwen; a static prescale to deviation 4 halves V's error at 2 bits
and changes nothing at 4 bits where rounding dominates; 1 is too small, 16 as good as 4; keys gain nothing.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from calibrate.corpus.builtin import topics
from calibrate.kvarn import KindTable, KVarNTables, LayerTable
from calibrate.kvarn.basis import plain_basis
from calibrate.kvarn.hadamard import rotate
from calibrate.kvarn.tile import quantize
from calibrate.kvarn.varn import FLOOR, imbalance, varn
from calibrate.lowbit import FORMATS, Codebooks, Offline, Samples, fit_codebooks, make_format, rope_frequencies
from calibrate.model import SourceCheckpoint, cache_dtype_of, load_model, load_tokenizer, probe_layout
from calibrate.model.cache import PassingCache
from calibrate.model.default import default_model
from calibrate.statistics import CACHE_DTYPES

SINK, GROUP = 128, 128
TARGETS = (1.0, 4.0, 16.0, 256.0, 16_384.0)
Layers = dict[int, dict[str, torch.Tensor]]  # layer → kind → [1, kv_heads, tokens, dim]


def captured(path: Path, rows: int, tokens: int, cache: Path | None) -> tuple[list[Layers], dict[int, np.ndarray]]:
    """K and V of `rows` rows of text, and the model's rotary frequencies."""
    files = [cache / f"{path.name}-{tokens}-{row}.safetensors" for row in range(rows)] if cache else []
    if files and all(file.exists() for file in files):
        held = [load_file(file) for file in files]
        frequencies = {int(name.split(".")[1]): value.numpy() for name, value in held[0].items() if name.startswith("f.")}
        return [_layers(each) for each in held], frequencies
    source = SourceCheckpoint.open(path)
    model = load_model(source, device="cpu", dtype=torch.float32)
    layout, config = probe_layout(model), model.config.get_text_config(decoder=True)
    frequencies = rope_frequencies(model, layout)
    text = "\n".join(document.text for document in itertools.islice(topics(), 60))
    tokenizer = load_tokenizer(source)
    first, ids = tokenizer("")["input_ids"], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    sixteen, results = CACHE_DTYPES[cache_dtype_of(source)].dtype, []
    for row in range(rows):
        found: Layers = {}

        def on_update(index: int, key: torch.Tensor, value: torch.Tensor, found: Layers = found) -> None:
            found[index] = {"k": key.to(sixteen).float().clone(), "v": value.to(sixteen).float().clone()}

        with torch.inference_mode():
            part = torch.tensor([[*first, *ids[row * tokens : (row + 1) * tokens - len(first)]]])
            model.model(input_ids=part, past_key_values=PassingCache(config, on_update), use_cache=True)
        results.append(found)
        if files:
            flat = {f"{kind}.{index}": tensor.contiguous() for index, kinds in found.items() for kind, tensor in kinds.items()}
            save_file(flat | {f"f.{index}": torch.from_numpy(each) for index, each in frequencies.items()}, files[row])
    return results, frequencies


def _layers(flat: dict[str, torch.Tensor]) -> Layers:
    found: Layers = {}
    for name, tensor in flat.items():
        kind, index = name.split(".")
        if kind in "kv":
            found.setdefault(int(index), {})[kind] = tensor
    return found


def tables_of(layers: Layers, target: float) -> KVarNTables:
    """Tables of one row whose prescale brings each head's rotated deviation to at least `target`, below twice that."""

    def table(x: torch.Tensor) -> KindTable:
        counted = x[0, :, SINK:].double()  # [kv_heads, tokens, dim]
        rotated = rotate(counted).var(dim=1)
        spread = rotated.mean(dim=-1).sqrt().clamp_min(1e-30)
        prescale = torch.exp2(torch.ceil(torch.log2(target / spread))).float()
        return KindTable(*(each.numpy() for each in (counted.mean(dim=1), counted.var(dim=1), rotated, prescale)))

    def layer(index: int, k: KindTable, v: KindTable) -> LayerTable:
        return LayerTable(index, f"layer {index}", k, v, plain_basis(*k.mean.shape))

    made = tuple(layer(index, table(kinds["k"]), table(kinds["v"])) for index, kinds in layers.items())
    return KVarNTables(made, SINK, next(iter(layers.values()))["k"].shape[2] - SINK)


def _judged_here(name: str) -> bool:
    """Bases need queries, which are not captured, and no layer is proposed for 16 bits; additive books come later."""
    return name != "additive" and not name.endswith(("+smooth", "+balanced", "+layers"))


def books_of(layers: Layers, frequencies: dict[int, np.ndarray], bits: int) -> Codebooks:
    def sample(index: int, kinds: dict[str, torch.Tensor]) -> Samples:
        key, value = (kinds[kind][0].movedim(0, 1) for kind in ("k", "v"))
        return Samples(key, value, torch.arange(len(key)), frequencies[index])

    return fit_codebooks({index: sample(index, kinds) for index, kinds in layers.items()}, bits)


def judged(name: str, offline: Offline, layers: Layers) -> dict[str, float]:
    """A format's errors, means over the layers."""
    fmt = make_format(name, offline)
    figures = []
    for index, kinds in layers.items():
        row = []
        for kind, read in (("k", fmt.key), ("v", fmt.value)):
            x = kinds[kind][:, :, SINK:]
            got = read(x, index, SINK)
            error, energy = (got - x).square().sum(), (x - x.mean(dim=2, keepdim=True)).square().sum()
            norms = x.norm(dim=-1).clamp_min(1e-20)
            row += [float(error / energy), float(((got.norm(dim=-1) - norms).abs() / norms).mean())]
        figures.append(row)
    heads, dim = next(iter(layers.values()))["k"].shape[1::2]
    means = np.mean(figures, axis=0)
    size = fmt.token_bytes(heads, dim, dim) / heads
    return {"bits": size * 4 / dim, **dict(zip(("k", "k_norm", "v", "v_norm"), map(float, means), strict=True))}


def floor_figures(layers: Layers) -> dict[str, float]:
    """How many V and K tiles VarN can do nothing for, and imbalances."""
    result = {}
    for kind in "kv":
        small, columns, before, after = [], [], [], []
        for kinds in layers.values():
            tiles = rotate(kinds[kind][:, :, SINK:]).unflatten(2, (-1, GROUP))
            tiles = (tiles.mT if kind == "k" else tiles).flatten(0, 2)  # [tiles, rows, columns]
            std = tiles.std(dim=-2)
            small.append((std < FLOOR).all(dim=-1).float().mean())
            columns.append((std < FLOOR).float().mean())
            before.append(imbalance(tiles).median())
            after.append(varn(tiles.contiguous()).imbalance.median())
        names = ("tiles_below", "columns_below", "imbalance", "imbalance_after")
        result |= {f"{kind}_{name}": float(torch.stack(each).mean()) for name, each in zip(names, (small, columns, before, after), strict=True)}
    return result


def prescaled(layers: Layers, calibration: Layers) -> dict[str, float]:
    """Mean relative error of K and V tiles at 2 and 4 bits: VarN as published, prescaled, without the mean; and no VarN."""
    tables = {target: tables_of(calibration, target) for target in TARGETS}
    settings = {"as published": (None, False), "mean": (None, True), "mean, to 4": (4.0, True), "no VarN": (None, False)}
    settings |= {f"to {target:g}": (target, False) for target in TARGETS}
    results = {}
    for kind, bits, (name, (target, centred)) in itertools.product("kv", (2, 4), settings.items()):
        errors = []
        for index, kinds in layers.items():
            x = kinds[kind][:, :, SINK:]
            mean = torch.from_numpy(getattr(tables[4.0][index], kind).mean).float()[:, None] if centred else 0.0
            scale = 1.0 if target is None else torch.from_numpy(getattr(tables[target][index], kind).prescale)[:, None, None, None]
            tiles = rotate(x - mean).unflatten(2, (-1, GROUP))
            tiles = (tiles.mT if kind == "k" else tiles) * scale
            got = _plain(tiles, bits) if name == "no VarN" else quantize(tiles, bits).dequantize()
            energy = (x - x.mean(dim=2, keepdim=True)).square().sum()
            errors.append(float(((got - tiles) / scale).square().sum() / energy))
        results[f"{kind}{bits} {name}"] = float(np.mean(errors))
    return results


def _plain(tiles: torch.Tensor, bits: int) -> torch.Tensor:
    low, high = tiles.amin(dim=-1, keepdim=True), tiles.amax(dim=-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-10)
    return ((tiles - low) / step).round() * step + low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="checkpoint folders; none: the embedded default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--every", type=int, default=1, help="of the layers")
    parser.add_argument("--cache", type=Path, help="keep the captured K and V here")
    parser.add_argument("--no-codebooks", action="store_true", help="without the additive formats, whose fit takes minutes")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    console, everything = Console(width=150), {}
    for path in asked.models or [default_model()]:
        (calibration, layers), frequencies = captured(path, 2, asked.tokens, asked.cache)
        layers = {index: kinds for index, kinds in layers.items() if index % asked.every == 0}
        calibration = {index: calibration[index] for index in layers}
        tables = tables_of(calibration, 4.0)
        figures = {name: judged(name, Offline(tables=tables), layers) for name in FORMATS if _judged_here(name) and _fits(name, layers)}
        if not asked.no_codebooks:
            for bits in (1, 2):
                figures[f"additive {bits} bit"] = judged("additive", Offline(codebooks=books_of(calibration, frequencies, bits)), layers)
        found = {"floor": floor_figures(layers), "prescale": prescaled(layers, calibration), "formats": figures}
        everything[path.name] = found
        _show(console, path.name, found)
        if asked.json:
            asked.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")


def _fits(name: str, layers: Layers) -> bool:
    dim = next(iter(layers.values()))["k"].shape[-1]
    return not (name.startswith("turboquant") and "paper" not in name and dim & (dim - 1))


def _show(console: Console, name: str, found: dict[str, dict]) -> None:
    console.print(name, {key: round(value, 3) for key, value in found["floor"].items()})
    table = Table("tiles", *(f"{kind}{bits}" for kind in "kv" for bits in (2, 4)), title="relative error of KVarN tiles, prescaled to a deviation")
    for setting in dict.fromkeys(key.split(" ", 1)[1] for key in found["prescale"]):
        table.add_row(setting, *(f"{found['prescale'][f'{kind}{bits} {setting}']:.5f}" for kind in "kv" for bits in (2, 4)))
    console.print(table)
    table = Table("format", "bits", "K error", "K norm", "V error", "V norm", title=f"{name}: means over layers")
    for fmt, each in found["formats"].items():
        table.add_row(fmt, f"{each['bits']:.2f}", *(f"{each[key]:.5f}" for key in ("k", "k_norm", "v", "v_norm")))
    console.print(table)


if __name__ == "__main__":
    main()
