"""What the calibrated scales are compared with, as variants of the cache and as linked checkpoints."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from calibrate.artefact import write_json
from calibrate.checkpoint import scale_tensors, write_checkpoint
from calibrate.checkpoint.links import link, resolved
from calibrate.checkpoint.names import tensor_prefixes
from calibrate.checkpoint.place import check_target, folder_in_the_making
from calibrate.checkpoint.shards import build_index, shard_names
from calibrate.checkpoint.write import FOLDER
from calibrate.engines.session import Variant
from calibrate.engines.source import file_scales
from calibrate.errors import UsageError
from calibrate.evaluate.results import CALIBRATED, OLD_FORMULA, RANDOM, SIXTEEN_BIT, UNIT
from calibrate.model import SourceCheckpoint
from calibrate.model.source import INDEX_FILE, SCALES_FILE, without_kv_scheme
from calibrate.model.weights import EARLIER_SCALES
from calibrate.scales import LayerScales, PolicyOptions, Scales, solve
from calibrate.statistics import Statistics

OLD_DIVISORS = {"q": 200.0, "k": 200.0, "v": 100.0}  # vLLM's calculate_kv_scales, removed in July 2026
_RESERVED = (SIXTEEN_BIT, UNIT, RANDOM, OLD_FORMULA, CALIBRATED)
_LEFT_OUT = {"config.json", INDEX_FILE, SCALES_FILE, FOLDER, ".git", ".cache", ".gitattributes"}


def build_variants(
    source: SourceCheckpoint, calibrated: Scales, random: Statistics, *, extra: Mapping[str, Path] | None = None
) -> tuple[Variant, ...]:
    """The variants that every comparison has, 16-bit first, then the user's own.

    Args:
        source: the calibrated checkpoint.
        calibrated: its scales.
        random: statistics of random tokens, from this model.
        extra: name → a checkpoint folder, ours or another tool's, or a scales file.

    Raises:
        UsageError: a name that is taken, a path that holds no KV scales, or scales of other layers (the first that differs is named).
    """
    variants = [
        Variant(SIXTEEN_BIT, None),
        Variant(UNIT, unit_scales(calibrated)),
        Variant(RANDOM, solve(random, calibrated.options.model_copy(update={"policy": "amax", "margin": 1.0}))),
        Variant(OLD_FORMULA, old_formula(random, calibrated.options)),
        Variant(CALIBRATED, calibrated),
    ]
    for name, path in (extra or {}).items():
        if name in _RESERVED or not name or "/" in name:
            raise UsageError(f"a variant cannot be called {name!r}: {', '.join(_RESERVED)} are the built-in ones")
        variants.append(Variant(name, _same_layers(name, read_scales(source, path, calibrated), calibrated)))
    return tuple(variants)


def unit_scales(like: Scales) -> Scales:
    """1.0 everywhere, with the layers, granularity and format of `like`: what an engine does with a checkpoint that has no scales."""
    layers = tuple(LayerScales(layer.index, layer.module, *(np.ones_like(scale) for _, scale in layer.items())) for layer in like.layers)
    return _without_statistics(layers, like, "every scale is 1.0")


def old_formula(random: Statistics, options: PolicyOptions) -> Scales:
    """vLLM's old warm-up rule on one batch of random tokens: per tensor, |Q|max/200, |K|max/200, |V|max/100."""
    values = random.values()
    layers = []
    for layer in random.layout["layers"]:
        seen = {**random.layers[layer["target"]], "q": random.layers[layer["index"]]["q"]}
        amax = {kind: float(values[seen[kind].amax_codes.max()]) for kind in ("k", "v", "q")}
        if layer["latent"]:
            amax["k"] = amax["v"] = max(amax["k"], amax["v"])
        scales = {kind: np.array([peak / OLD_DIVISORS[kind] if peak else 1.0], dtype=np.float32) for kind, peak in amax.items()}
        if layer["latent"]:  # latent and rotary key lie in one cache line: one scale, K's
            scales["v"] = scales["k"]
        layers.append(LayerScales(layer["index"], layer["module"], scales["k"], scales["v"], scales["q"]))
    chosen = options.model_copy(update={"policy": "amax", "granularity": "tensor", "margin": 1.0})
    note = ("vLLM's old formula: |Q|max/200, |K|max/200, |V|max/100",)
    return Scales(tuple(layers), chosen, random.layout, random.digest(), random.counted, random.provenance, note)


def checkpoint_scales(source: SourceCheckpoint) -> Scales:
    """The scales of a checkpoint that kv-calibrate wrote, where the file that engines load and the record of its making agree.

    Raises:
        UsageError: it was not written by kv-calibrate, or one of the two was changed since.
    """
    path = source.path / FOLDER / "scales.safetensors"
    if not path.is_file():
        raise UsageError(f"{source.path} has no {FOLDER}/scales.safetensors: it was not calibrated by kv-calibrate (`kv-calibrate run` does)")
    scales = Scales.load(path)
    loaded, recorded = file_scales(source.path), scale_tensors(source, scales)
    for name in sorted(loaded.keys() | recorded.keys()):
        if name not in loaded or name not in recorded or not np.array_equal(loaded[name].reshape(-1), recorded[name]):
            raise UsageError(f"{source.path}: {name} in {SCALES_FILE} is not what was calibrated: one of the files was changed, write it again")
    return scales


def read_scales(source: SourceCheckpoint, path: Path, like: Scales) -> Scales:
    """Scales of a user's variant: a scales file, a checkpoint of ours, or a checkpoint of another tool with `…k_scale` tensors."""
    if not path.exists():
        raise UsageError(f"no such variant: {path}")
    if path.is_file():
        return Scales.load(path)
    checkpoint = SourceCheckpoint.open(path)
    if (path / FOLDER / "scales.safetensors").is_file():
        return checkpoint_scales(checkpoint)
    tensors = _foreign_tensors(checkpoint)
    weights = [name for name in source.weight_map if not EARLIER_SCALES.search(name)]
    prefixes = tensor_prefixes([layer.module for layer in like.layers], weights)
    layers = []
    for layer in like.layers:
        prefix = prefixes[layer.module]
        absent = [kind for kind in ("k", "v") if f"{prefix}.{kind}_scale" not in tensors]
        if absent:
            raise UsageError(f"{path} has no {prefix}.{absent[0]}_scale: its layers are not the model's, or it carries no KV scales")
        found = {kind: tensors.pop(f"{prefix}.{kind}_scale", np.ones(1, dtype=np.float32)) for kind in ("k", "v", "q")}  # engines take q as 1.0
        layers.append(LayerScales(layer.index, layer.module, found["k"], found["v"], found["q"]))
    if tensors:
        raise UsageError(f"{path} has {min(tensors)}, a scale of a layer that the model does not have")
    per_head = any(scale.size > 1 for layer in layers for _, scale in layer.items())
    options = like.options.model_copy(update={"granularity": "head" if per_head else "tensor"})
    return _without_statistics(tuple(layers), Scales(like.layers, options, like.layout, "", {}, ()), f"read from {path.name}")


def _foreign_tensors(checkpoint: SourceCheckpoint) -> dict[str, np.ndarray]:
    from safetensors import safe_open

    found: dict[str, np.ndarray] = {}
    if (checkpoint.path / SCALES_FILE).is_file():
        found |= file_scales(checkpoint.path)
    for name, file in checkpoint.weight_map.items():
        if name.endswith((".k_scale", ".v_scale", ".q_scale")):
            with safe_open(checkpoint.path / file, framework="pt") as tensors:
                found[name] = tensors.get_tensor(name).to(torch.float32).numpy()
    wrong = [name for name, scale in found.items() if not (np.isfinite(scale).all() and (scale > 0).all())]
    if wrong:
        raise UsageError(f"{checkpoint.path}: {wrong[0]} is not finite and positive")
    return {name: scale.reshape(-1) for name, scale in found.items()}


def _same_layers(name: str, scales: Scales, like: Scales) -> Scales:
    """Raise UsageError where a variant's layers are not the model's."""
    ours, theirs = ({layer.index: layer.module for layer in each.layers} for each in (like, scales))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            here, there = (layers.get(index, "no such layer") for layers in (ours, theirs))
            raise UsageError(f"variant {name} has other layers than the model: layer {index} is {here} in the model and {there} in the variant")
    shapes = {layer["index"]: layer for layer in like.layout["layers"]}
    for layer in scales.layers:
        for kind, scale in layer.items():
            heads = shapes[layer.index]["num_heads" if kind == "q" else "num_key_value_heads"]
            if scale.size not in (1, heads):
                there = f"{kind} of layer {layer.index} has {scale.size} scales for {heads} heads"
                raise UsageError(f"variant {name} has other layers than the model: {there}")
    return scales


def _without_statistics(layers: tuple[LayerScales, ...], like: Scales, note: str) -> Scales:
    return Scales(layers, like.options, like.layout, "none", {"tokens": 0, "documents": 0, "samples": 0}, (), (note,))


def overlay(source: SourceCheckpoint, variant: Variant, folder: Path) -> Path:
    """A checkpoint that an engine can load with this variant: weights linked, only scales, config and index are new.

    The 16-bit variant has neither scales nor a KV scheme.

    Raises:
        UsageError: the folder exists, or scales that no checkpoint can carry (E5M2, latent attention).
    """
    if variant.scales is not None:
        return write_checkpoint(source, variant.scales, folder).path
    check_target(source.path, folder, force=False)
    names = shard_names(source)
    with folder_in_the_making(folder) as making:
        for path in sorted(source.path.rglob("*")):
            relative = path.relative_to(source.path)
            if path.is_dir() or relative.parts[0] in _LEFT_OUT:
                continue
            target = making / names.get(str(relative), str(relative))
            target.parent.mkdir(parents=True, exist_ok=True)
            link(resolved(path, source.path), target)
        rest = without_kv_scheme(source.config.get("quantization_config") or {})
        config = source.config | {"quantization_config": rest}
        write_json(making / "config.json", config if rest else {name: value for name, value in config.items() if name != "quantization_config"})
        write_json(making / INDEX_FILE, build_index(source, names, set(), {}))
    return folder
