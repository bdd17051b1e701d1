"""`Fold`: what the weights are multiplied with, as a value and as a file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.artefact import read_tensors, sha256_artefact, write_tensors
from calibrate.errors import UsageError

SCHEMA = "kv-calibrate/fold/2"
# what each switch moves, in the order in which they are named
SWITCHES = {
    "turn": "a rotation of each pair of K's channels that RoPE turns together, of Q's alike",
    "k": "a multiplier of each such pair, and of each channel that RoPE leaves alone; Q is divided",
    "smooth": "a power of two of each such pair and channel, for formats that rotate keys before they round them; Q is divided",
}


def parse_switches(text: str) -> tuple[str, ...]:
    """ "k,turn" → ("turn", "k"), in canonical order. Raises UsageError for an unknown or missing name, and for `smooth` with others."""
    asked = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := asked - set(SWITCHES):
        raise UsageError(f"--fold {min(unknown)}: known are {', '.join(SWITCHES)}")
    if not asked:
        raise UsageError(f"--fold names nothing: known are {', '.join(SWITCHES)}")
    if "smooth" in asked and len(asked) > 1:
        raise UsageError("--fold smooth goes alone: turn and k are for FP8, whose error does not depend on powers of two")
    return tuple(name for name in SWITCHES if name in asked)


@dataclass(frozen=True)
class LayerFold:
    """The fold of one layer; neutral where nothing is changed.

    Attributes:
        index: layer index. module: attention module path in the model.
        pairs: K's rotary pairs are multiplied with these, Q's divided by their conjugates: complex128 [kv_heads, pairs].
        rest: the same for channels outside RoPE: float64 [kv_heads, channels].
    """

    index: int
    module: str
    pairs: np.ndarray
    rest: np.ndarray

    @property
    def moved(self) -> dict[str, int]:
        """How many of each are not neutral."""
        return {"pairs": int((self.pairs != 1).sum()), "rest": int((self.rest != 1).sum())}


@dataclass(frozen=True)
class Fold:
    """The fold of a model.

    Attributes:
        switches: what was asked for. layers: of every attention layer. origin: fingerprint of the weights that it belongs to.
        report: what was predicted and measured when it was chosen (JSON).
    """

    switches: tuple[str, ...]
    layers: tuple[LayerFold, ...]
    origin: str
    report: dict[str, Any] = field(default_factory=dict)

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors = {}
        for layer in self.layers:
            stem = f"layers.{layer.index}"
            tensors[f"{stem}.pairs"] = np.stack([layer.pairs.real, layer.pairs.imag], axis=-1)  # [kv_heads, pairs, 2]
            tensors[f"{stem}.rest"] = layer.rest
        return tensors

    def _header(self) -> dict[str, Any]:
        modules = [[layer.index, layer.module] for layer in self.layers]
        return {"schema": SCHEMA, "switches": list(self.switches), "modules": modules, "origin": self.origin, "report": self.report}

    def digest(self) -> str:
        """SHA-256 over the multipliers and their origin."""
        return sha256_artefact(self._header(), self._tensors())

    def save(self, path: Path) -> None:
        """Write as safetensors: `layers.N.pairs` (real and imaginary part last) and `.rest`, float64."""
        write_tensors(path, self._tensors(), self._header())

    @classmethod
    def load(cls, path: Path) -> "Fold":
        """Read a fold. Raises UsageError where it is missing, damaged or something else."""
        tensors, header = read_tensors(path, SCHEMA)
        try:
            layers = []
            for index, module in header["modules"]:
                stem = f"layers.{index}"
                pairs = tensors[f"{stem}.pairs"]
                layers.append(LayerFold(index, module, pairs[..., 0] + 1j * pairs[..., 1], tensors[f"{stem}.rest"]))
            return cls(tuple(header["switches"]), tuple(layers), header["origin"], header["report"])
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UsageError(f"{path} is damaged: {' '.join(f'{type(error).__name__} {error}'.split())}") from error
