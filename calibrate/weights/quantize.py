"""A checkpoint → the same model with quantized weights, as compressed-tensors."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import SCALES_FILE, write_json
from calibrate.checkpoint.links import link, own_files
from calibrate.checkpoint.place import check_target, folder_in_the_making
from calibrate.corpus import Corpus
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.model.load import auto_class
from calibrate.model.source import INDEX_FILE
from calibrate.progress import note
from calibrate.weights.process import find_python, run_llmcompressor
from calibrate.weights.record import WEIGHTS_FILE, write_record
from calibrate.weights.schemes import SCHEMES

_LEFT_OUT = {"config.json", INDEX_FILE, SCALES_FILE, WEIGHTS_FILE, "kv_calibration"}
_OLD_SETTINGS = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}  # of AutoGPTQ, AutoAWQ, ModelOpt: they describe other weights


@dataclass(frozen=True)
class Quantized:
    """A checkpoint with quantized weights on disk. `group_size` is None where the scheme has none, or one a channel."""

    path: Path
    scheme: str
    group_size: int | None
    bytes_before: int
    bytes_after: int


def check_quantizable(source: SourceCheckpoint) -> None:
    """Raise UsageError for weights that are quantized already and for calibrated checkpoints; HostError where llmcompressor is missing."""
    if source.quantization or source.calibrated:
        what = "calibrated" if source.calibrated else f"quantized already ({source.quantization.get('quant_method')})"
        raise UsageError(f"{source.path} is {what}: weights are quantized from the original checkpoint")
    find_python()


def made_from(source: SourceCheckpoint, scheme: str, corpus: Corpus | None, seed: int) -> dict[str, Any]:
    """What decides the result."""
    return {"source": source.fingerprint, "scheme": scheme, "corpus": None if corpus is None else corpus.digest, "seed": seed}


def quantize_checkpoint(
    source: SourceCheckpoint,
    scheme: str,
    output: Path,
    corpus: Corpus | None,
    *,
    seed: int = 0,
    device: str = "cpu",
    trust: bool = False,
    force: bool = False,
) -> Quantized:
    """Quantize the weights with llmcompressor in its own environment. The output is absent or complete at every moment.

    Args:
        corpus: the rows that `scheme` is calibrated on, handed over as tokens; None where it needs none.

    Raises:
        UsageError: an output that may not be written, weights that are quantized already, or a model that llmcompressor refuses.
        HostError: no llmcompressor here, or not enough memory.
    """
    check_quantizable(source)
    check_target(source.path, output, force=force)
    note(f"quantizing the weights of {source.path} with llmcompressor: {SCHEMES[scheme].says}")
    made = made_from(source, scheme, corpus, seed)
    with folder_in_the_making(output) as making, tempfile.TemporaryDirectory(prefix="kv-calibrate-rows-") as folder:
        job = {
            "model": str(source.path.resolve()),
            "auto_class": auto_class(source.model_type, source.config.get("architectures")).__name__,
            "output": str(making.resolve()),
            "scheme": scheme,
            "tokens": None if corpus is None else _save_rows(Path(folder) / "rows.npz", corpus),
            "seed": seed,
            "device": device,
            "trust_remote_code": trust,
        }
        found = run_llmcompressor(job, source.path)
        write_json(making / "config.json", _merge_config(source, making))
        open_to_all(making)
        bring_others(source, making)
        write_record(making, made, {"scheme": SCHEMES[scheme].says, **found})
    before, after = (
        sum((where / name).stat().st_size for name in names) for where, names in ((source.path, source.headers), (output, _weights(output)))
    )
    return Quantized(output, scheme, found["group_size"], before, after)


def _save_rows(path: Path, corpus: Corpus) -> str:
    tokens = np.concatenate([sample.tokens for sample in corpus.samples]).astype(np.int32)
    np.savez(path, tokens=tokens, lengths=[len(sample.tokens) for sample in corpus.samples])
    return str(path)


def open_to_all(making: Path) -> None:
    """safetensors writes files that only their owner may read."""
    for name in _weights(making):
        (making / name).chmod((making / "config.json").stat().st_mode)


def _merge_config(source: SourceCheckpoint, making: Path) -> dict[str, Any]:
    """The source's config with llmcompressor's quantization; another transformers wrote the rest of what lies there."""
    written = json.loads((making / "config.json").read_text(encoding="utf-8"))
    quantization = written.get("quantization_config") or (written.get("text_config") or {}).get("quantization_config")
    if not quantization or not quantization.get("config_groups"):
        raise UsageError(f"llmcompressor quantized nothing in {source.path}: it found no Linear layers there")
    if written.get("tie_word_embeddings") != source.config.get("tie_word_embeddings", written.get("tie_word_embeddings")):
        return {**source.config, "tie_word_embeddings": written["tie_word_embeddings"], "quantization_config": quantization}
    return {**source.config, "quantization_config": quantization}


def bring_others(source: SourceCheckpoint, making: Path) -> None:
    """Everything of the source but weights and what describes them: tokenizer, card, licence, as they are."""
    for relative, real in own_files(source.path, _LEFT_OUT | _OLD_SETTINGS | source.headers.keys()):
        target = making / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # llmcompressor's own generation_config.json
        link(real, target)


def _weights(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.safetensors")]
