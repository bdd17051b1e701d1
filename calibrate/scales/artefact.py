"""`Scales`: one positive fp32 scale (or one a head) for q, k and v of every attention layer, as a value and as a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import read_tensors, sha256_artefact, write_tensors
from calibrate.errors import UsageError
from calibrate.scales.policies.base import PolicyOptions

SCHEMA = "kv-calibrate/scales/1"
_KINDS = ("k", "v", "q")


@dataclass(frozen=True)
class LayerScales:
    """Scales of one layer: x̂ = scale · fp8(x / scale).

    Attributes:
        index: layer index. module: attention module path in the model.
        k, v: float32 [1] or [num_key_value_heads]. q: float32 [1] or [num_heads].
    """

    index: int
    module: str
    k: np.ndarray
    v: np.ndarray
    q: np.ndarray

    def items(self) -> list[tuple[str, np.ndarray]]:
        return [("k", self.k), ("v", self.v), ("q", self.q)]


@dataclass(frozen=True)
class Scales:
    """The scales of a model and where they come from."""

    layers: tuple[LayerScales, ...]
    options: PolicyOptions
    layout: dict[str, Any]
    statistics_digest: str
    counted: dict[str, int]
    provenance: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...] = ()

    def _tensors(self) -> dict[str, np.ndarray]:
        return {f"layers.{layer.index}.{kind}_scale": scale for layer in self.layers for kind, scale in layer.items()}

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "options": self.options.model_dump(),
            "layout": self.layout,
            "statistics": self.statistics_digest,
            "counted": self.counted,
            "provenance": list(self.provenance),
            "warnings": list(self.warnings),
        }

    def digest(self) -> str:
        """SHA-256 over the scales and their origin."""
        return sha256_artefact(self._header(), self._tensors())

    def save(self, path: Path) -> None:
        """Write as safetensors: `layers.N.k_scale`, `.v_scale`, `.q_scale`."""
        write_tensors(path, self._tensors(), self._header())

    @classmethod
    def load(cls, path: Path) -> "Scales":
        """Read a scales file. Raises UsageError where it is missing, damaged or something else."""
        tensors, header = read_tensors(path, SCHEMA)
        try:
            loaded = cls(
                tuple(
                    LayerScales(layer["index"], layer["module"], *(tensors[f"layers.{layer['index']}.{kind}_scale"] for kind in _KINDS))
                    for layer in header["layout"]["layers"]
                ),
                PolicyOptions(**header["options"]),
                header["layout"],
                header["statistics"],
                header["counted"],
                tuple(header["provenance"]),
                tuple(header["warnings"]),
            )
            loaded.check()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is damaged: {' '.join(f'{type(error).__name__} {error}'.split())}") from error
        return loaded

    def check(self) -> None:
        """Raise ValueError for a scale that is no positive finite float32 of the granularity's shape: engines load anything in silence."""
        for layer, heads in zip(self.layers, self.layout["layers"], strict=True):
            for kind, scale in layer.items():
                count = 1 if self.options.granularity == "tensor" else heads["num_heads" if kind == "q" else "num_key_value_heads"]
                if scale.dtype != np.float32 or scale.shape != (count,) or not (np.isfinite(scale) & (scale > 0)).all():
                    raise ValueError(f"the {kind} scale of layer {layer.index} is not {count} positive float32")
        if any(not isinstance(run["model"]["fingerprint"], str) for run in self.provenance):
            raise TypeError("provenance names no model")
