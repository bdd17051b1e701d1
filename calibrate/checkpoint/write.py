"""Scales into a checkpoint: everything of the source, linked, plus the scales, the config that makes engines load them, and provenance."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import FOLD_FILE, SERVE_FILE, sha256_file, write_json, write_tensors, write_text
from calibrate.checkpoint.card import VLLM_USE, Use, with_section
from calibrate.checkpoint.kvarn_reference import TABLES_FILE, with_tables
from calibrate.checkpoint.links import link, own_files, resolved
from calibrate.checkpoint.names import tensor_prefixes
from calibrate.checkpoint.place import check_target, folder_in_the_making
from calibrate.checkpoint.quantconfig import merged_quantization_config
from calibrate.checkpoint.shards import build_index, copy_without, shard_names
from calibrate.errors import UsageError
from calibrate.kvarn.solve import variance_tables
from calibrate.model import SourceCheckpoint
from calibrate.model.skip import skipped_layers
from calibrate.model.source import INDEX_FILE, SCALES_FILE
from calibrate.model.weights import EARLIER_SCALES
from calibrate.scales import PolicyOptions, Scales
from calibrate.statistics import Statistics

SCHEMA = "kv-calibrate/provenance/1"
SERVE_SCHEMA = "kv-calibrate/serve/1"
ENGINE_SCALES = "kv-calibrate/engine-scales/1"
FOLDER = "kv_calibration"
_OURS = {"config.json", INDEX_FILE, SCALES_FILE, "README.md", FOLDER}
_TOKENS_OR_PROMPTS = re.compile(r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config")


@dataclass(frozen=True)
class Written:
    """A calibrated checkpoint on disk.

    Attributes:
        path: its folder.
        tensors: scale name → float32 array, as engines load them.
        how: number of files linked, reflinked and copied.
        serve: vLLM engine arguments that the checkpoint needs and cannot carry (`engines.serving`).
    """

    path: Path
    tensors: dict[str, np.ndarray]
    how: dict[str, int]
    serve: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """How scales ride in a checkpoint.

    Attributes:
        tensors: scale name → float32 array, as engines load them.
        quantization_config: what makes engines load them, for config.json.
        files: further JSON files, name → content.
        card: what the model card says of the scales and of their use.
        serve: what vLLM must be told to use them, by the name of its engine argument (`engines.serving` reads it); {} where nothing.
    """

    tensors: dict[str, np.ndarray]
    quantization_config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    card: Use = VLLM_USE
    serve: dict[str, Any] = field(default_factory=dict)


def scale_tensors(source: SourceCheckpoint, scales: Scales) -> dict[str, np.ndarray]:
    """Scales under the names that vLLM looks them up by: float32 [1] or [heads] each."""
    weights = [name for name in source.weight_map if not EARLIER_SCALES.search(name)]
    prefixes = tensor_prefixes([layer.module for layer in scales.layers], weights)
    return {f"{prefixes[layer.module]}.{kind}_scale": scale for layer in scales.layers for kind, scale in layer.items()}


def check_writable(source: SourceCheckpoint, output: Path, options: PolicyOptions, *, force: bool = False) -> None:
    """Everything about the target, the source and the scales asked for that can be refused before hours of calibration. Raises UsageError."""
    source.check_can_carry_scales()
    merged_quantization_config(source.quantization, options)
    check_target(source.path, output, force=force)


def check_layers(layers: Sequence[Mapping[str, Any]], options: PolicyOptions, skip_layers: Sequence[int | str] = ()) -> tuple[int, ...]:
    """What can be refused once a model's attention layers are known, still before they are calibrated.

    Args:
        layers: the layout's. skip_layers: as for `write_checkpoint`.

    Returns:
        indices of the layers that are to keep 16 bits.

    Raises:
        UsageError: `skip_layers` that the model lacks; scales per head where layers differ in their number of heads.
    """
    counts = sorted({(layer["num_heads"], layer["num_key_value_heads"]) for layer in layers})
    if options.granularity == "head" and len(counts) > 1:
        heads = ", ".join(f"{kv_heads} ({heads} query heads)" for heads, kv_heads in counts)
        raise UsageError(
            f"vLLM loads scales per head only where all layers have as many heads; this model's have {heads} KV heads: give --granularity tensor"
        )
    return skipped_layers(layers, skip_layers)


def write_checkpoint(
    source: SourceCheckpoint,
    scales: Scales,
    output: Path,
    *,
    statistics: Statistics | None = None,
    skip_layers: Sequence[int | str] = (),
    force: bool = False,
) -> Written:
    """Write the calibrated checkpoint; scales of an earlier calibration are replaced.

    Args:
        skip_layers: layers that are to keep a 16-bit cache, as `model.skip` reads them. They have scales all the same.
        statistics: kept beside the scales, so that another policy can be solved later without the corpus. Where they hold second moments,
            KVarN tables are made of them and written too.

    Raises:
        UsageError: scales of other weights, a format that cannot carry them, an output that may not be written, a full disk.
    """
    check_writable(source, output, scales.options, force=force)
    check_same_weights(source, scales)
    skipped = check_layers(scales.layout["layers"], scales.options, skip_layers)
    serve = {"kv_cache_dtype_skip_layers": list(skipped)} if skipped else {}
    form = Form(scale_tensors(source, scales), merged_quantization_config(source.quantization, scales.options), serve=serve)
    return write_form(source, scales, form, output, statistics=statistics)


def write_form(source: SourceCheckpoint, scales: Scales, form: Form, output: Path, *, statistics: Statistics | None) -> Written:
    """Write a checkpoint that carries scales in `form`; the caller has checked that it may (`check_target`) and that they belong together."""
    names = shard_names(source)
    dropped = {name for name in source.weight_map if EARLIER_SCALES.search(name)}
    index = build_index(source, names, dropped, {name: array.nbytes for name, array in form.tensors.items()})
    rewritten = {names[source.weight_map[name]] for name in dropped}
    tables = variance_tables(statistics) if statistics is not None and statistics.has_second_moments else None
    config = {**source.config, "quantization_config": with_tables(form.quantization_config, tables is not None)}
    with folder_in_the_making(output) as making:
        how = _bring_files(source, names, dropped, making)
        write_tensors(making / SCALES_FILE, form.tensors, {"schema": ENGINE_SCALES, "scales": scales.digest()})
        for name, content in {"config.json": config, INDEX_FILE: index, **form.files}.items():
            write_json(making / name, content)
        fold = source.path / FOLD_FILE
        write_text(making / "README.md", with_section(_card(source), scales, form.card, form.serve, folded=fold.is_file()))
        scales.save(making / FOLDER / "scales.safetensors")
        if fold.is_file():
            link(resolved(fold, source.path), making / FOLD_FILE)
        if form.serve:
            write_json(making / SERVE_FILE, {"schema": SERVE_SCHEMA, "vllm": form.serve})
        if statistics is not None:
            statistics.save(making / FOLDER / "statistics.safetensors")
        if tables is not None:
            tables.save(making / TABLES_FILE)
        write_json(making / FOLDER / "provenance.json", _provenance(source, scales, making, rewritten | form.files.keys(), form.serve))
    return Written(output, form.tensors, dict(how), form.serve)


def check_same_weights(source: SourceCheckpoint, scales: Scales) -> None:
    """Raise UsageError where the scales were calibrated on other weights than the source's."""
    for run in scales.provenance:
        if run["model"]["fingerprint"] != source.fingerprint:
            raise UsageError(f"these scales were calibrated on other weights than those in {source.path}: collect again")


def _bring_files(source: SourceCheckpoint, names: dict[str, str], dropped: set[str], making: Path) -> Counter[str]:
    stale = {source.weight_map[name] for name in dropped}
    how: Counter[str] = Counter()
    for relative, real in own_files(source.path, _OURS):
        target = making / names.get(str(relative), str(relative))
        target.parent.mkdir(parents=True, exist_ok=True)
        if str(relative) in stale:
            copy_without(real, source.headers[str(relative)], target, lambda name: name in dropped)
            how["copy"] += 1
        else:
            how[link(real, target)] += 1
    return how


def _card(source: SourceCheckpoint) -> str:
    path = source.path / "README.md"
    return resolved(path, source.path).read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""  # bytes: line ends stay


def _provenance(source: SourceCheckpoint, scales: Scales, making: Path, rewritten: set[str], serve: dict[str, Any]) -> dict[str, Any]:
    """Who wrote what from what. Digests of written files, of shards that had to be rewritten, and of what decides on tokens and prompts."""
    ours = [SCALES_FILE, "config.json", INDEX_FILE, "README.md", *(f"{FOLDER}/{path.name}" for path in (making / FOLDER).iterdir())]
    files = sorted({*ours, *rewritten, *(path.name for path in making.iterdir() if path.is_file() and _TOKENS_OR_PROMPTS.match(path.name))})
    return {
        "schema": SCHEMA,
        "scales": scales.digest(),
        "statistics": scales.statistics_digest,
        "options": scales.options.model_dump(),
        "model": {"fingerprint": source.fingerprint, "config_sha256": sha256_file(source.path / "config.json")},
        "counted": dict(sorted(scales.counted.items())),
        "runs": json.loads(json.dumps(scales.provenance, sort_keys=True)),  # one order of keys, whether they come from memory or a file
        "warnings": list(scales.warnings),
        **({"serve": serve} if serve else {}),
        "files": {name: sha256_file(making / name) for name in files},
    }
