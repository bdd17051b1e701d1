"""Weight files as bytes: their headers, and what tells one model's weights from another's."""

import json
import re
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from calibrate.artefact import sha256_bytes
from calibrate.errors import UsageError

# Scales of earlier calibrations, ours or another tool's, wherever they lie: they are no weights, and they are replaced.
EARLIER_SCALES = re.compile(r"\.((k|v|q|kv|prob)_scale|(k|v|q)_zero_point|(k|v|q)_proj\.output_scale)$")
_MAX_HEADER = 1 << 28
_SAMPLE = 4096


def read_safetensors_header(path: Path) -> bytes:
    """The JSON header of a safetensors file, checked against the file's size.

    Raises:
        UsageError: missing, not safetensors, or truncated.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            header = file.read(length) if length <= min(_MAX_HEADER, size) else b""
        tensors = json.loads(header)
        promised = 8 + length + max((int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(f"{path} is not a safetensors file (its header cannot be read); only safetensors weights are accepted") from error
    if size != promised:
        raise UsageError(f"{path} is truncated or damaged: {size:,} bytes, its header promises {promised:,}")
    try:
        with safe_open(path, framework="np"):  # types, shapes and gapless offsets, by the library that will load it; reads the header only
            return header
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def fingerprint(folder: Path, headers: dict[str, bytes]) -> str:
    """SHA-256 over name, type, shape and the middle 4 KiB of every tensor, earlier KV scales left out.

    Any training step moves numbers in the middle of some tensor, so finetunes of one model differ; how tensors are spread over files, and what
    those are called, does not matter. A 16 GB checkpoint takes milliseconds; `SourceCheckpoint.weight_digests` reads every byte.
    """
    rows: list[tuple[bytes, bytes, bytes]] = []
    for name, header in headers.items():
        entries: dict[str, Any] = json.loads(header)
        with (folder / name).open("rb", buffering=0) as file:
            for tensor, entry in entries.items():
                if tensor == "__metadata__" or EARLIER_SCALES.search(tensor):
                    continue
                first, last = entry["data_offsets"]
                file.seek(8 + len(header) + max(first, (first + last - _SAMPLE) // 2))
                shape = json.dumps([entry["dtype"], entry["shape"]]).encode()
                rows.append((tensor.encode(), shape, file.read(min(_SAMPLE, last - first))))
    return sha256_bytes(*(part for row in sorted(rows) for part in row))
