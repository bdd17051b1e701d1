"""Loading a causal LM for observation: compute type, device, and no trace of an earlier KV calibration."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from calibrate.errors import HostError, UsageError
from calibrate.host import cpu_has_fast_bf16
from calibrate.model.dequantize import dequantize_model, ignored_wherever_it_stands, is_compressed, load_dtype, quiet_compressed_tensors
from calibrate.model.source import SourceCheckpoint, without_kv_scheme

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cache_dtype_of(source: SourceCheckpoint) -> str:
    """The 16-bit type in which an engine serves this checkpoint's cache: its own type, bfloat16 for fp32 checkpoints."""
    name = _checkpoint_dtype(source)
    return name if name in ("bfloat16", "float16") else "bfloat16"


def choose_device(device: str | None) -> str:
    """The device asked for, else CUDA where there is one.

    Raises:
        UsageError: no such kind of device. HostError: this host has none.
    """
    if device is None or device == "auto":
        return device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
        if wanted.type != "cuda":  # which is asked without starting a context on it: under torchrun each process has a GPU of its own
            torch.empty(0, device=wanted)
        elif (wanted.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"no {device}")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if device.split(":")[0] == "cuda":
            raise HostError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here; --device cpu works on any host") from error
        raise UsageError(f"--device {device} cannot be used: give cpu, cuda, cuda:1 or auto") from error
    return device


def compute_dtype(source: SourceCheckpoint, device: str, asked: str | None) -> torch.dtype:
    """The type to compute in: the checkpoint's on a GPU; on a CPU fp32, unless bf16 matmul is done in hardware (elsewhere it is ten times slower)."""
    if asked:
        return _DTYPES[asked]
    name = _checkpoint_dtype(source)
    if not device.startswith("cpu"):
        return _DTYPES.get(name, torch.bfloat16)
    return torch.bfloat16 if name == "bfloat16" and cpu_has_fast_bf16() else torch.float32


def load_tokenizer(source: SourceCheckpoint, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises UsageError where it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the Rust tokenizers raise bare Exception
        raise UsageError(f"the tokenizer in {source.path} cannot be loaded: {_first_line(error)}") from error


def load_model(
    source: SourceCheckpoint,
    *,
    device: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    placement: dict[str, str] | None = None,
    offload_folder: Path | None = None,
) -> PreTrainedModel:
    """Load for inference, without the KV fake quantization that an already calibrated checkpoint asks for.

    Args:
        placement: module name → "cpu" or "disk", in the place of `device`; what is converted on its way to the disk goes into `offload_folder`.

    Raises:
        UsageError: unknown architecture, weights that do not fit the config, or tensors that the checkpoint lacks (transformers would fill
            them with random numbers).
    """
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
        _strip_kv_scheme(config)
        if is_compressed(source) and source.text_config is not source.config:
            config.quantization_config = ignored_wherever_it_stands(source.quantization)
        with quiet_transformers(), quiet_compressed_tensors():
            where = {"device_map": placement or ("auto" if device == "auto" else {"": device}), "offload_folder": offload_folder}
            model, report = _from_pretrained(source, config, where, load_dtype(source, dtype), trust_remote_code)
            if is_compressed(source):
                dequantize_model(model, _DTYPES.get(_checkpoint_dtype(source), torch.bfloat16), dtype)
    except Exception as error:  # safetensors, huggingface_hub and the model's own code each raise their own kinds
        raise UsageError(f"{source.path} cannot be loaded by transformers: {_first_line(error)}") from error
    if unread := sorted(name for name in report["unexpected_keys"] if name.endswith((".weight_scale", ".weight_packed"))):
        raise UsageError(f"{source.path} has quantized weights that its quantization_config does not name, first {unread[0]}")
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(f"{source.path} lacks {len(missing)} tensors that its config asks for, first {missing[0]}")
    return model.eval()


def _from_pretrained(source: SourceCheckpoint, config: Any, where: dict[str, Any], dtype: torch.dtype, trust: bool) -> tuple[PreTrainedModel, dict]:
    options = {
        "config": config,
        "dtype": dtype,
        **where,
        "trust_remote_code": trust,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    auto = auto_class(source.model_type, source.config.get("architectures"))
    try:
        return auto.from_pretrained(source.path, attn_implementation="sdpa", **options)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return auto.from_pretrained(source.path, attn_implementation="eager", **options)


def auto_class(model_type: str, architectures: Sequence[str] | None) -> type:
    """The class that holds every tensor of the checkpoint: a vision-language model is loaded whole, though only its text tower will run."""
    whole = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    named = architectures or [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, whole)]
    return AutoModelForImageTextToText if whole in named else AutoModelForCausalLM


def _strip_kv_scheme(config: Any) -> None:
    """An already calibrated checkpoint would be observed through its old FP8 cache: take the scheme out, and a config that held nothing else."""
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict):
        return
    if rest := without_kv_scheme(quantization):
        config.quantization_config = rest
    else:
        del config.quantization_config


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and load report: what matters in them is checked and raised by `load_model`."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _checkpoint_dtype(source: SourceCheckpoint) -> str:
    text = source.config.get("text_config") or {}
    for holder in (source.config, text):
        name = holder.get("dtype") or holder.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return "float32"


def _first_line(error: BaseException) -> str:
    """What an error says first; where that is but a headline, with the two lines below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "ignore_mismatched_sizes" in lines[0]:
        return "its weights are not of the shapes that its config asks for"
    return " ".join(lines[: 3 if lines[0].endswith(":") or "validation error" in lines[0] else 1])
