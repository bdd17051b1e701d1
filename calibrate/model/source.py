"""A Hugging Face checkpoint folder, read and checked before anything is loaded: every fault that can be seen early is seen here."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calibrate.artefact import SCALES_FILE, sha256_file
from calibrate.errors import UsageError
from calibrate.model.support import is_latent, unsupported
from calibrate.model.weights import fingerprint, read_safetensors_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# vLLM builds no scale parameter in the attention layers of these formats (docs/formats.md): the scales would be dropped in silence.
_CANNOT_CARRY = {"awq", "gptq", "gptq_marlin", "awq_marlin", "mxfp4", "torchao", "fbgemm_fp8", "inc", "bitsandbytes", "auto-round", "hqq"}
_OTHER_CARRIERS = {"fp8", "modelopt", "quark"}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")  # GPT-2's is the second
_LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # GPT-2 and GPT-J have the second
_JSON_NAMES = {str: "string", list: "list of strings", dict: "object"}


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint that passed the checks.

    Attributes:
        path: its folder.
        config: config.json.
        weight_map: tensor name → file name, without kv-calibrate's own scales.
        headers: file name → safetensors header bytes, of every weight file.
        indexed: whether the folder has a model.safetensors.index.json.
    """

    path: Path
    config: dict[str, Any]
    weight_map: dict[str, str]
    headers: dict[str, bytes]
    indexed: bool

    @classmethod
    def open(cls, path: Path, *, trust_remote_code: bool = False) -> "SourceCheckpoint":
        """Read and check a folder.

        Raises:
            UsageError: no folder, config, tokenizer or weights; a truncated, foreign or missing shard; not a causal LM; custom code.
        """
        if not path.is_dir():
            raise UsageError(f"no model folder at {path}: give a Hugging Face checkpoint folder or a hub id")
        config = _read_json(path / "config.json", "a Hugging Face checkpoint has a config.json")
        _check_types(path, config)
        _check_architecture(path, config, trust_remote_code)
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
            raise UsageError(f"no tokenizer in {path}: add tokenizer.json (or tokenizer.model) and tokenizer_config.json")
        indexed = (path / INDEX_FILE).is_file()
        files = _indexed_files(path) if indexed else _plain_files(path)
        headers = {name: read_safetensors_header(path / name) for name in files}
        weight_map = {tensor: name for name, header in headers.items() for tensor in json.loads(header) if tensor != "__metadata__"}
        if indexed:
            _check_index(path, weight_map)
        return cls(path, config, weight_map, headers, indexed)

    @property
    def model_type(self) -> str:
        return self.config.get("model_type", "")

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantization_config, {} where the weights are not quantized."""
        return self.config.get("quantization_config") or self.text_config.get("quantization_config") or {}

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config."""
        return self.config.get("text_config") or self.config

    @property
    def vocab_size(self) -> int:
        size = self.text_config.get("vocab_size")
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{self.path}/config.json gives no vocab_size")
        return size

    @property
    def context_length(self) -> int | None:
        """Positions that the model was made for, None where its config names no limit."""
        return context_length_of(self.config)

    @property
    def calibrated(self) -> bool:
        """Whether it already carries KV scales of any tool."""
        return bool(self.quantization.get("kv_cache_scheme")) or (self.path / SCALES_FILE).is_file()

    @cached_property
    def fingerprint(self) -> str:
        """Tells these weights from others, finetunes included, in a moment (`weights.fingerprint`)."""
        return fingerprint(self.path, self.headers)

    def weight_digests(self) -> list[dict[str, Any]]:
        """Full SHA-256 and size of every weight file, ordered by digest so that renaming a shard changes nothing. Reads all bytes."""
        rows = [{"sha256": sha256_file(self.path / name), "bytes": (self.path / name).stat().st_size} for name in self.headers]
        return sorted(rows, key=lambda row: row["sha256"])

    def check_can_carry_scales(self) -> None:
        """Raise UsageError where vLLM could not load KV scales from this checkpoint, whatever is written."""
        method = str(self.quantization.get("quant_method") or ("unnamed" if self.quantization else "")).lower()
        if method in _CANNOT_CARRY:
            raise UsageError(
                f"{self.path} is quantized with {method}, and vLLM loads no KV scales from that format: "
                "calibrate the unquantized checkpoint, or one in compressed-tensors form (`kv-calibrate convert` makes it of AWQ, GPTQ and FP8)"
            )
        if method in _OTHER_CARRIERS:
            raise UsageError(
                f"{self.path} is quantized with {method}, whose KV scales vLLM keeps in the model dtype, per tensor only: "
                "calibrate the unquantized checkpoint, or one in compressed-tensors form (`kv-calibrate convert` makes it of AWQ, GPTQ and FP8)"
            )
        if method not in ("", "compressed-tensors"):
            raise UsageError(f"{self.path} has quant_method {method}, which kv-calibrate does not know: it can write into compressed-tensors")
        self.check_attention_carries_scales()

    def check_attention_carries_scales(self) -> None:
        """Raise UsageError for attention whose scales vLLM loads under no name."""
        if is_latent(self.config):
            raise UsageError(
                f"{self.path}: {unsupported(self.config)}; `kv-calibrate collect` and `solve` work, and `export --format modelopt` writes what "
                "its Transformers backend loads (docs/architectures.md)"
            )
        if reason := unsupported(self.config):
            raise UsageError(f"{self.path}: {reason}; `kv-calibrate collect` and `solve` work, writing for vLLM does not")


def context_length_of(config: dict[str, Any]) -> int | None:
    """Positions that the model of a config.json, whole or its text part, was made for; None where it names no limit."""
    text = config.get("text_config") or config
    found = (text.get(name) for name in _CONTEXT_NAMES)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def layer_count_of(config: dict[str, Any]) -> int | None:
    """Layers of the language model of a config.json, with or without attention; None where it does not say."""
    text = config.get("text_config") or config
    return next((text[name] for name in _LAYER_NAMES if type(text.get(name)) is int), None)


def without_kv_scheme(quantization: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config without its KV scheme, {} where it held nothing else; one that has none stays as it is."""
    if not quantization.get("kv_cache_scheme"):
        return quantization
    return {name: value for name, value in quantization.items() if name != "kv_cache_scheme"} if quantization.get("config_groups") else {}


def resolve_model(spec: str | None) -> Path:
    """The folder of a model: a path, or a hub id that is downloaded; None is the embedded default."""
    if spec is None:
        from calibrate.model.default import default_model

        return default_model()
    path = Path(spec).expanduser()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", spec) or spec.startswith("."):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec, ignore_patterns=["consolidated*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "original/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{spec} is neither a folder here nor a model that the hub gave: {reason}") from error


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no {path.name} in {path.parent}: {why}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no JSON object")
    return value


def _check_types(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError where a field that is read here is not what it should be."""
    kinds = {"model_type": str, "architectures": list, "auto_map": dict, "quantization_config": dict, "text_config": dict}
    for holder in (config, config.get("text_config")):
        for key, kind in kinds.items() if isinstance(holder, dict) else ():
            value = holder.get(key)
            if value is not None and (not isinstance(value, kind) or (kind is list and not all(isinstance(item, str) for item in value))):
                raise UsageError(f"{path}/config.json: {key} is {json.dumps(value)[:60]}, which is no {_JSON_NAMES[kind]}")


def _check_architecture(path: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    from transformers.models.auto import modeling_auto

    names = config.get("architectures") or []
    model_type = config.get("model_type", "")
    if config.get("auto_map") and not trust_remote_code:
        known = model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not known:
            raise UsageError(f"{path} brings its own Python code (auto_map in config.json): read it, then pass --trust-remote-code to run it")
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{path} is an encoder-decoder model ({', '.join(names) or model_type}): kv-calibrate calibrates decoder-only causal LMs")
    causal = _flat(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | _flat(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if names and not trust_remote_code and not causal.intersection(names):
        raise UsageError(f"{path} is a {', '.join(names)}, not a causal LM with a KV cache: give a …ForCausalLM checkpoint")
    if not names and not trust_remote_code and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"{path}/config.json names no causal LM (model_type {model_type or 'missing'})")


def _flat(mapping: dict[str, Any]) -> set[str]:
    return {name for value in mapping.values() for name in ((value,) if isinstance(value, str) else value)}


def _indexed_files(path: Path) -> list[str]:
    index = _read_json(path / INDEX_FILE, "")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UsageError(f"{path / INDEX_FILE} has no weight_map of tensor names to file names")
    names = sorted(set(weight_map.values()) - {SCALES_FILE})
    if not names:
        raise UsageError(f"{path / INDEX_FILE} lists no weight file")
    for name in names:
        if Path(name).name != name:
            raise UsageError(f"{path / INDEX_FILE} names {name!r}, which is outside the checkpoint folder")
        if not (path / name).is_file():
            raise UsageError(f"shard {name} is listed in {INDEX_FILE} but missing from {path}")
    if SINGLE_FILE not in names and (path / SINGLE_FILE).is_file():
        raise UsageError(f"{path} has a {SINGLE_FILE} that its index does not list: transformers would load that file, vLLM the index's; remove one")
    return names


def _plain_files(path: Path) -> list[str]:
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    names = sorted(file.name for file in path.glob("*.safetensors") if file.name != SCALES_FILE)
    if len(names) == 1:
        return names
    if names:
        raise UsageError(f"{path} has {len(names)} safetensors files but no {INDEX_FILE}: the index says which tensors are where")
    others = sorted(file.name for file in path.glob("*.bin")) + sorted(file.name for file in path.glob("*.pt*"))
    hint = f" ({others[0]} is a pickle: convert it to safetensors)" if others else ""
    raise UsageError(f"no safetensors weights in {path}{hint}")


def _check_index(path: Path, present: dict[str, str]) -> None:
    wanted = _read_json(path / INDEX_FILE, "")["weight_map"]
    missing = [name for name, file in wanted.items() if file != SCALES_FILE and present.get(name) != file]
    if missing:
        raise UsageError(f"{INDEX_FILE} of {path} lists {missing[0]} in {wanted[missing[0]]}, which does not hold it ({len(missing)} such tensors)")
