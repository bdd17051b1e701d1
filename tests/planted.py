"""Statistics with known contents, made by a slow independent path: NumPy's counting over the values themselves."""

import numpy as np
import torch

from calibrate.statistics import CACHE_DTYPES, CODES, PARTS, Observed, Statistics
from calibrate.statistics.exactsum import carry, to_limbs


def observed_of(values: np.ndarray, *, part: int = 0, kind: str = "k", dtype: str = "bfloat16") -> Observed:
    """What an observer of `values`, [heads, tokens, head_dim], must report."""
    rounded = torch.from_numpy(np.asarray(values, dtype=np.float32)).to(CACHE_DTYPES[dtype].dtype)
    codes = rounded.view(torch.int16).numpy().astype(np.int64) & 0x7FFF
    counts = np.stack([np.bincount(head.ravel(), minlength=CODES) for head in codes])
    part_amax = np.zeros((PARTS, len(codes)), dtype=np.int32)
    part_amax[part] = codes.reshape(len(codes), -1).max(axis=1)
    if kind == "q":
        return Observed(counts, part_amax, None)
    exact = rounded.double()
    limbs = [carry(to_limbs(power.transpose(0, 1)).sum(dim=1)).numpy() for power in (exact, exact.square())]  # [4, heads, head_dim] each
    return Observed(counts, part_amax, np.stack(limbs))


def layer_entry(index: int, *, target: int | None = None, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, latent: bool = False, **rest) -> dict:
    """One layer of a layout."""
    return {
        "index": index,
        "module": f"model.layers.{index}.self_attn",
        "target": index if target is None else target,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "value_head_dim": head_dim,
        "sliding_window": None,
        "latent": latent,
        "query_from": "interface",
        **rest,
    }


def planted(*, seed: int = 0, layers: int = 2, fingerprint: str = "weights", tokens: int = 16, entries: list[dict] | None = None) -> Statistics:
    """Random statistics of a two-layer model with 2 KV and 4 query heads of 8 channels (or of the given layout)."""
    rng = np.random.default_rng(seed)
    entries = entries or [layer_entry(index) for index in range(layers)]
    seen: dict[int, dict[str, Observed]] = {}
    for entry in entries:
        index, spread = entry["index"], 2.0 ** rng.integers(-6, 6)
        kinds = ("k", "v", "q") if entry["target"] == index else ("q",)
        for kind in kinds:
            heads = entry["num_heads" if kind == "q" else "num_key_value_heads"]
            values = rng.normal(size=(heads, tokens, entry["head_dim"])) * spread
            seen.setdefault(index, {})[kind] = observed_of(values, kind=kind)
    run = {
        "model": {"fingerprint": fingerprint},
        "corpus": {"digest": str(seed), "sources": [{"data": "planted"}]},
        "tool": "kv-calibrate test",
        "batches": str(seed),
    }
    return Statistics(
        cache_dtype=CACHE_DTYPES["bfloat16"],
        layers=seen,
        layout={"model_type": "llama", "layers": entries},
        counted={"tokens": tokens, "documents": 1, "samples": 1},
        provenance=(run,),
    )
