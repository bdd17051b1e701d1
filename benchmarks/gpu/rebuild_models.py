"""On the GPU host: the model files that `prepare.sh` brought, joined and converted to the checkpoints that every other host makes of them.

An older transformers may read a tokenizer from GGUF wrongly (5.17 does Gemma's): files in /tmp/models/files/NAME replace what it made.

usage: python benchmarks/gpu/rebuild_models.py [--models /tmp/models]
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from calibrate.artefact import sha256_file
from calibrate.model.default import SMOLLM2
from calibrate.model.packaged import GGUF_FILE, PackagedModel, _convert
from tests.real_models import GEMMA, QWEN


def rebuild(model: PackagedModel, models: Path) -> None:
    target, parts = models / model.name, sorted((models / f"{model.name}.gguf.parts").glob("*"))
    if target.is_dir() or not parts:
        print(f"{model.name}: {'there' if target.is_dir() else 'no parts'}")
        return
    with tempfile.TemporaryDirectory(dir=models) as folder:
        gguf = Path(folder) / GGUF_FILE
        with gguf.open("wb") as whole:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
        if (found := sha256_file(gguf)) != model.gguf_sha256:
            raise SystemExit(f"{model.name}: {len(parts)} parts give sha256 {found}, not {model.gguf_sha256}: a part is missing")
        made, brought = Path(folder) / "checkpoint", models / "files" / model.name
        _convert(replace(model, fix_tokenizer=None) if brought.is_dir() else model, Path(folder), made)
        if brought.is_dir():
            shutil.copytree(brought, made, dirs_exist_ok=True)
        made.rename(target)
    print(f"{model.name}: model.safetensors sha256 {sha256_file(target / 'model.safetensors')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    models = parser.parse_args().models
    for model in (SMOLLM2, QWEN, GEMMA):
        rebuild(model, models)


if __name__ == "__main__":
    main()
