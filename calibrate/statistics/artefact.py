"""`Statistics`: all that one pass over the corpus leaves behind, as a value and as a file. Its size does not depend on the number of tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import read_tensors, sha256_bytes, write_tensors
from calibrate.errors import UsageError
from calibrate.statistics.codes import CACHE_DTYPES, CODES, CacheDtype
from calibrate.statistics.exactsum import LIMBS, carry
from calibrate.statistics.moments import mean_and_variance
from calibrate.statistics.second import packed_length

SCHEMA = "kv-calibrate/statistics/1"
KINDS = ("k", "v", "q")
PARTS = 4


@dataclass(frozen=True)
class Observed:
    """What was seen of one kind (K, V or Q) in one layer.

    Attributes:
        counts: elements of each magnitude code, int64 [heads, 32768].
        part_amax: largest code in each quarter of the documents, int32 [4, heads]; 0 where a quarter saw nothing but zeros.
        sums: limbs of Σx and Σx² per channel (`exactsum`), int64 [2, 4, heads, head_dim]; None for Q, where none are kept.
        second: limbs of sums of products per KV head (`second`), int64 [4, kv_heads, packed]; None where they were not asked for.
    """

    counts: np.ndarray
    part_amax: np.ndarray
    sums: np.ndarray | None
    second: np.ndarray | None = None

    @property
    def amax_codes(self) -> np.ndarray:
        """Largest code of each head over the whole corpus, int32 [heads]."""
        return self.part_amax.max(axis=0)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance per channel, float64 [heads, head_dim]."""
        if self.sums is None:
            raise ValueError("no moments are kept of Q")
        head_dim = self.sums.shape[-1]
        return mean_and_variance(self.sums[0], self.sums[1], int(self.counts[0].sum()) // head_dim)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one model on one corpus.

    Attributes:
        cache_dtype: the 16-bit type in which K and V are cached.
        layers: layer index → kind → Observed. KV-shared readers have only "q".
        layout: the model's CacheLayout as a JSON value.
        counted: {"tokens", "documents", "samples"} seen.
        provenance: digests and options of each run that went in; order is canonical.
    """

    cache_dtype: CacheDtype
    layers: dict[int, dict[str, Observed]]
    layout: dict[str, Any]
    counted: dict[str, int]
    provenance: tuple[dict[str, Any], ...]

    @property
    def has_second_moments(self) -> bool:
        """Whether sums of products were collected, from which KVarN tables are made."""
        return any(seen.second is not None for kinds in self.layers.values() for seen in kinds.values())

    def values(self) -> np.ndarray:
        """Magnitude of each code, float64 [32768]."""
        return self.cache_dtype.decode()

    def save(self, path: Path) -> None:
        """Write as safetensors: only non-empty bins, so a file holds a few thousand pairs a head however long the corpus was."""
        write_tensors(path, pack_layers(self.layers), self._header())

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cache_dtype": self.cache_dtype.name,
            "layout": self.layout,
            "counted": self.counted,
            "provenance": list(self.provenance),
        }

    def digest(self) -> str:
        """SHA-256 over everything in it: what scales name as their origin."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return _digest_of(pack_layers(self.layers), self._header())

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Read a statistics file. Raises UsageError where it is missing, damaged or something else."""
        tensors, header = read_tensors(path, SCHEMA)
        try:
            loaded = cls(
                cache_dtype=CACHE_DTYPES[header["cache_dtype"]],
                layers=unpack_layers(tensors),
                layout=header["layout"],
                counted=header["counted"],
                provenance=tuple(header["provenance"]),
            )
            loaded._check_whole()
            # of the packed form, which is at hand: packing again would cost more than hashing
            loaded.__dict__["_digest"] = _digest_of(tensors, loaded._header())
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(f"{path} is damaged: {type(error).__name__} {error}") from error
        return loaded

    def _check_whole(self) -> None:
        """Raise ValueError, KeyError or TypeError where something is missing or not of the shape that the layout promises."""
        if not isinstance(self.layout["model_type"], str):
            raise TypeError("layout names no model_type")
        for layer in self.layout["layers"]:
            writes = layer["target"] == layer["index"]
            if not (isinstance(layer["module"], str) and isinstance(layer["latent"], bool) and "k" in self.layers[layer["target"]]):
                raise ValueError(f"layer {layer['index']} of its layout is incomplete")
            for kind in KINDS if writes else ("q",):
                seen = self.layers[layer["index"]][kind]
                heads = layer["num_heads" if kind == "q" else "num_key_value_heads"]
                if seen.counts.shape != (heads, CODES) or seen.part_amax.shape != (PARTS, heads) or (seen.counts < 0).any():
                    raise ValueError(f"{kind} of layer {layer['index']} is not a count of {heads} heads")
                channels = layer["value_head_dim" if kind == "v" else "head_dim"]
                if kind != "q" and (seen.sums is None or seen.sums.shape != (2, LIMBS, heads, channels)):
                    raise ValueError(f"{kind} of layer {layer['index']} has no sums of {heads} heads and {channels} channels")
                if seen.second is not None and seen.second.shape != (LIMBS, layer["num_key_value_heads"], packed_length(channels)):
                    raise ValueError(f"{kind} of layer {layer['index']} has second moments of another shape")
        if any(not isinstance(self.counted[name], int) for name in ("tokens", "documents", "samples")):
            raise TypeError("counted holds no whole numbers")
        for run in self.provenance:
            if not all(isinstance(name, str) for name in (run["model"]["fingerprint"], run["corpus"]["digest"], run["batches"])):
                raise TypeError("provenance names no model, corpus or batches")


def _digest_of(tensors: dict[str, np.ndarray], header: dict[str, Any]) -> str:
    parts = [json.dumps(header, sort_keys=True).encode()]
    for name in sorted(tensors):
        parts += [name.encode(), np.ascontiguousarray(tensors[name]).tobytes()]
    return sha256_bytes(*parts)


def pack_layers(layers: dict[int, dict[str, Observed]]) -> dict[str, np.ndarray]:
    """Layers → flat tensors; bins are kept as (code, count) pairs in head order with row offsets."""
    tensors = {}
    for index, kinds in layers.items():
        for kind, seen in kinds.items():
            name = f"layers.{index}.{kind}"
            heads, codes = np.nonzero(seen.counts)
            tensors[f"{name}.codes"] = codes.astype(np.uint16)
            tensors[f"{name}.counts"] = seen.counts[heads, codes]
            tensors[f"{name}.heads"] = np.searchsorted(heads, np.arange(len(seen.counts) + 1)).astype(np.int64)
            tensors[f"{name}.part_amax"] = seen.part_amax
            for name_of, sums in (("sums", seen.sums), ("second", seen.second)):
                if sums is not None:
                    tensors[f"{name}.{name_of}"] = sums
    return tensors


def unpack_layers(tensors: dict[str, np.ndarray]) -> dict[int, dict[str, Observed]]:
    """The inverse of `pack_layers`. Raises KeyError, ValueError or IndexError for tensors that it did not make."""
    layers: dict[int, dict[str, Observed]] = {}
    for name in tensors:
        if not name.endswith(".codes"):
            continue
        stem = name.removesuffix(".codes")
        _, index, kind = stem.split(".")
        offsets = tensors[f"{stem}.heads"]
        if offsets[0] != 0 or offsets[-1] != len(tensors[name]) or (np.diff(offsets) < 0).any():
            raise ValueError(f"{stem}.heads are no row offsets")
        counts = np.zeros((len(offsets) - 1, CODES), dtype=np.int64)
        heads = np.repeat(np.arange(len(counts)), np.diff(offsets))
        counts[heads, tensors[name]] = tensors[f"{stem}.counts"]
        layers.setdefault(int(index), {})[kind] = Observed(
            counts, tensors[f"{stem}.part_amax"], tensors.get(f"{stem}.sums"), tensors.get(f"{stem}.second")
        )
    return {index: {kind: kinds[kind] for kind in KINDS if kind in kinds} for index, kinds in sorted(layers.items())}


def merge(files: Sequence[Statistics]) -> Statistics:
    """Add statistics of the same model over different data. The order of `files` changes no bit of the result.

    Raises:
        UsageError: they are not of the same model, layout and cache type, or the same run appears twice.
    """
    if not files:
        raise UsageError("nothing to merge: give at least one statistics file")
    first = files[0]
    for other in files[1:]:
        if other.layout != first.layout or other.cache_dtype != first.cache_dtype:
            raise UsageError("these statistics are not of the same model: their cache layouts or cache types differ")
        if other.has_second_moments != first.has_second_moments:
            raise UsageError("some of these statistics hold second moments and some do not: collect all with --kvarn, or none")
        if _model_of(other) != _model_of(first):
            raise UsageError("these statistics are not of the same weights: their model fingerprints differ")
    runs = [run for file in files for run in file.provenance]
    keys = [json.dumps(run, sort_keys=True) for run in runs]
    if len({(run["corpus"]["digest"], run["batches"]) for run in runs}) != len(runs):
        raise UsageError("the same batches appear twice in this merge: their tokens would count double")
    return Statistics(
        cache_dtype=first.cache_dtype,
        layers={index: {kind: _add([file.layers[index][kind] for file in files]) for kind in kinds} for index, kinds in first.layers.items()},
        layout=first.layout,
        counted={name: sum(file.counted[name] for file in files) for name in first.counted},
        provenance=tuple(run for _, run in sorted(zip(keys, runs, strict=True), key=lambda pair: pair[0])),
    )


def _model_of(statistics: Statistics) -> set[str]:
    return {run["model"]["fingerprint"] for run in statistics.provenance}


def _add(seen: Sequence[Observed]) -> Observed:
    return Observed(
        counts=np.sum([one.counts for one in seen], axis=0),
        part_amax=np.max([one.part_amax for one in seen], axis=0),
        sums=_add_limbs([one.sums for one in seen], axis=1),
        second=_add_limbs([one.second for one in seen], axis=0),
    )


def _add_limbs(parts: Sequence[np.ndarray | None], axis: int) -> np.ndarray | None:
    """`axis`: where the limbs are."""
    if any(part is None for part in parts):
        return None
    total = np.sum(parts, axis=0)
    carry(np.moveaxis(total, axis, 0))
    return total
