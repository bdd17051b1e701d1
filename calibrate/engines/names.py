"""Which vLLM module a checkpoint's scale tensor belongs to. Pure functions on names."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

KINDS = ("k", "v", "q")
# NemotronH keeps k and v under the projection: `.mixer.k_proj.k_scale`.
_SCALE = re.compile(r"^(?P<prefix>.+?)(?:\.(?P<projection>[qkv])_proj)?\.(?P<kind>[qkv])_scale$")


def split_scale_name(name: str) -> tuple[str, str] | None:
    """`model.layers.0.self_attn.k_scale` → (`model.layers.0.self_attn`, `k`); None for any other tensor."""
    found = _SCALE.match(name)
    if found is None or found["projection"] not in (None, found["kind"]):
        return None
    return found["prefix"], found["kind"]


def group_by_layer(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Scale tensors by layer prefix, then by kind; other tensors are left out."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        split = split_scale_name(name)
        if split is not None:
            layers.setdefault(split[0], {})[split[1]] = tensor
    return layers


def match_layers(prefixes: Sequence[str], modules: Sequence[str]) -> dict[str, str]:
    """Pair checkpoint layer prefixes with vLLM attention modules; a prefix without exactly one module is left out.

    Exact names first (`P`, or `P.attn` as vLLM names its Attention inside the model's own), then, for engines that rename the outer part,
    the module of the same layer index with the longest common dotted suffix. A module is never given to two prefixes.
    """
    free = set(modules)
    pairs: dict[str, str] = {}
    for prefix in prefixes:
        module = next((name for name in (f"{prefix}.attn", prefix) if name in free), None)
        if module is not None:
            pairs[prefix] = module
            free.discard(module)
    guesses = {prefix: _nearest(prefix, free) for prefix in prefixes if prefix not in pairs}
    wanted = Counter(guesses.values())
    return pairs | {prefix: module for prefix, module in guesses.items() if module is not None and wanted[module] == 1}


def _nearest(prefix: str, modules: Iterable[str]) -> str | None:
    scored = sorted(((_common_suffix(prefix, module), module) for module in modules if _indices(module) == _indices(prefix)), reverse=True)
    if not scored or (len(scored) > 1 and scored[0][0] == scored[1][0]):
        return None
    return scored[0][1]


def _indices(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdigit())


def _common_suffix(prefix: str, module: str) -> int:
    left, right = prefix.removesuffix(".attn").split("."), module.removesuffix(".attn").split(".")
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count
