"""Which architectures the installed vLLM lists, read from its source: importing its registry would take longer than all other checks."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from calibrate.engines.host import vllm_distribution

_REGISTRY = "model_executor/models/registry.py"


@cache
def listed_architectures() -> frozenset[str]:
    """Names in the tables of vLLM's model registry; empty where vLLM is not installed, or keeps its registry elsewhere."""
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.origin).parent / _REGISTRY if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        return frozenset()
    tables = [
        node.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]).endswith("_MODELS")
        if not ast.unparse(node.targets[0]).startswith(("_PREVIOUSLY", "_OOT"))
    ]
    keys = (key for table in tables for key in table.keys)
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def unlisted(config: dict[str, Any]) -> str:
    """What to know before hours of work where the installed vLLM lists none of a config.json's architectures; "" where it lists one, or cannot say.

    It is no refusal: vLLM tries its Transformers backend, and another version may list it.
    """
    named, listed = config.get("architectures") or [], listed_architectures()
    if not named or not listed or listed.intersection(named):
        return ""
    return (
        f"{vllm_distribution()} lists no {', '.join(named)}: it will try its Transformers backend, or refuse; if it refuses, the read-back fails "
        "after the calibration (--no-verify leaves it out)"
    )
