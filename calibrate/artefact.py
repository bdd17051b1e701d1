"""Files that stages hand to each other: atomic writes, safetensors with a JSON header, digests."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from calibrate.errors import UsageError

HEADER_KEY = "kv_calibrate"
SCALES_FILE = "kv_scales.safetensors"  # of a calibrated checkpoint
FOLD_FILE = "kv_calibration/fold.safetensors"  # in a checkpoint whose weights were folded: what they were multiplied with
SERVE_FILE = "kv_calibration/serve.json"  # in it, where vLLM must be told more than the checkpoint says


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `target`; on success it replaces `target`, on any failure it is removed and `target` is as it was.

    Raises:
        UsageError: the folder is missing, read-only or full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files private
        temporary.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def discard(target: Path) -> None:
    """Remove a file that is of no more use, and what killed writers left of it."""
    target.unlink(missing_ok=True)
    _remove_leftovers(target)


def _remove_leftovers(target: Path) -> None:
    """Remove what writers of this file that were killed left beside it."""
    prefix, suffix = f".{target.name}.", ".tmp"
    for entry in list(target.parent.iterdir()):
        if entry.name.startswith(prefix) and entry.name.endswith(suffix):
            number = entry.name.removeprefix(prefix).split(".")[0]
            if number.isdigit() and process_is_dead(int(number)):
                entry.unlink(missing_ok=True)


def process_is_dead(number: int) -> bool:
    """Whether no process of this number runs on this host."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(target: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically, keys in their own order."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tensors(target: Path, tensors: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header as safetensors, atomically. Equal input gives equal bytes: names and header keys are sorted."""
    ordered = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}  # ascontiguousarray would make () into (1,)
    metadata = {"format": "pt", HEADER_KEY: json.dumps(header, sort_keys=True, ensure_ascii=False)}
    with atomic_path(target) as temporary:
        temporary.write_bytes(_metadata_in_order(save(ordered, metadata=metadata)))


def _metadata_in_order(content: bytes) -> bytes:
    """The same file with its metadata sorted: safetensors keeps them in a hash map and writes them in an order that differs from call to call."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format keeps tensor data aligned
    return len(text).to_bytes(8, "little") + text + content[end:]


def read_tensors(path: Path, schema: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file written by `write_tensors` whose header has `"schema": schema`.

    Raises:
        UsageError: the file is missing, not safetensors, truncated, or of another schema.
    """
    header = read_header(path)
    if header.get("schema") != schema:
        raise UsageError(f"{path} holds {header.get('schema', 'no kv-calibrate data')}, not {schema}")
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 (safe_open is no dict)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a kv-calibrate safetensors file, {} where it is another program's. Raises UsageError as `read_tensors`."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get(HEADER_KEY, "{}"))
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise UsageError(f"{path} is damaged: its kv-calibrate header is no JSON object")
    return header


def sha256_bytes(*parts: bytes) -> str:
    """Hex SHA-256 over the parts, each preceded by its length so that boundaries count."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sha256_artefact(header: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Hex SHA-256 over a header and the values of its tensors, in the order of their names."""
    return sha256_bytes(json.dumps(header, sort_keys=True).encode(), *(tensors[name].tobytes() for name in sorted(tensors)))


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def public(data: str) -> str:
    """A hub id or built-in name as it is, of a local path the last part: cards and reports are published."""
    return Path(data).name if data.startswith(("/", "~", ".")) else data
