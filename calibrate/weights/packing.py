"""What the converters of packed integers share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from calibrate.errors import UsageError

Tensors = Mapping[str, torch.Tensor]
INT32, FLOATS = ("I32",), ("F16", "BF16", "F32")  # safetensors types


@dataclass(frozen=True)
class Facts:
    """What one module needs, or all: whether its zero points are all the middle code, and whether its groups are columns out of order."""

    symmetric: bool = True
    reordered: bool = False

    def __or__(self, other: "Facts") -> "Facts":
        return Facts(self.symmetric and other.symmetric, self.reordered or other.reordered)


class WeightFormat(Protocol):
    """A foreign format: how to tell its modules, convert one, and compute by the format's own rules what its weight is.

    name: for messages. key: the tensor that every quantized module has. types: that and the others it may have → safetensors types they may be of.
    """

    name: str
    key: str
    types: Mapping[str, tuple[str, ...]]

    def __init__(self, config: dict[str, Any], where: str) -> None:
        """Raise UsageError for settings that are not converted; `where` names the file in messages."""

    def examine(self, module: str, shape: list[int], small: Tensors) -> Facts:
        """Look at a module without its `key` tensor, which is a matrix of this shape. Raises UsageError where its parts do not fit together, or
        compressed-tensors cannot hold its exact values."""

    def scheme(self, facts: Facts) -> QuantizationScheme:
        """The whole checkpoint's scheme, given what all its modules need."""

    def convert(self, tensors: Tensors, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
        """The module's tensors as compressed-tensors names and packs them."""

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        """The weight [out, in] that the format's own published formula gives, in the type that it computes in."""


@dataclass(frozen=True)
class IntSettings:
    """Bits and group size (-1: one group) of a config, checked."""

    bits: int
    group_size: int

    @classmethod
    def of(cls, config: dict[str, Any], where: str, *, allowed: tuple[int, ...], names: tuple[str, str]) -> "IntSettings":
        """Read them under either format's names. Raises UsageError for those that are not converted."""
        bits, size = (config.get(name) for name in names)
        if type(bits) is not int or bits not in allowed:
            raise UsageError(f"{where}: {names[0]} is {bits}: only {' and '.join(map(str, allowed))} bits are converted")
        if type(size) is not int or (size != -1 and size < 1):
            raise UsageError(f"{where}: {names[1]} is {size}: it must be -1 or a positive number")
        return cls(bits, size)

    def groups(self, module: str, columns: int) -> int:
        """Groups of a weight of so many inputs. Raises UsageError where they are not whole: compressed-tensors holds nothing else."""
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise UsageError(f"{module}: groups of {size} do not make its {columns} inputs: compressed-tensors holds only whole groups")
        return columns // size

    def scheme(self, facts: Facts) -> QuantizationScheme:
        """Weight-only integers, in groups or one group a channel."""
        grouping = {"strategy": "channel"} if self.group_size == -1 else {"strategy": "group", "group_size": self.group_size}
        order = {"actorder": "group"} if facts.reordered else {}
        weights = QuantizationArgs(num_bits=self.bits, type="int", symmetric=facts.symmetric, **grouping, **order)
        return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def check_shapes(module: str, found: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError where a part of a module is not of the shape that its weight and the config ask for."""
    for part, shape in wanted.items():
        if part in found and tuple(found[part].shape) != shape:
            raise UsageError(
                f"{module}.{part} is {list(found[part].shape)}, its weight and the config's group size ask for {list(shape)}: "
                "one of them is wrong, or the file is damaged"
            )


def unpack(packed: torch.Tensor, bits: int, places: Sequence[int] | None = None) -> torch.Tensor:
    """int32 [rows, n] → int16 [rows, n · 32/bits]: value i of an int32 lies at bits · places[i] (places[i] = i unless given)."""
    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32) * bits
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)  # [rows, n, 32/bits]; the mask undoes the sign extension
    return values.reshape(packed.shape[0], -1).to(torch.int16)
