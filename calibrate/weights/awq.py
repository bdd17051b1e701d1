"""AutoAWQ's gemm layout: `qweight` int32 [in, out/8], `qzeros` int32 [groups, out/8], `scales` [groups, out].

An int32 holds eight 4-bit values along the output; the one at bits 4·i belongs to output ORDER[i] (AutoAWQ, awq/utils/packing_utils.py).
weight[i, o] = (q[i, o] - zero[i // group_size, o]) · scale[i // group_size, o], in the scale's type.
"""

from typing import Any, ClassVar

import torch
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme

from calibrate.errors import UsageError
from calibrate.weights.packing import FLOATS, INT32, Facts, IntSettings, Tensors, check_shapes, unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # bits 4·i of an int32 hold output ORDER[i] of its eight
_PLACE = tuple(ORDER.index(output) for output in range(8))  # output → its place


class AwqGemm:
    """AutoAWQ, gemm version."""

    name = "AWQ"
    key = "qweight"
    types: ClassVar = {"qweight": INT32, "qzeros": INT32, "scales": FLOATS}

    def __init__(self, config: dict[str, Any], where: str) -> None:
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise UsageError(f"{where}: AWQ version {version} is not converted, only gemm: quantize the original again, or calibrate it")
        names = ("bits", "group_size") if "bits" in config else ("w_bit", "q_group_size")
        self.settings = IntSettings.of(config, where, allowed=(4,), names=names)

    def examine(self, module: str, shape: list[int], small: Tensors) -> Facts:
        if "qzeros" not in small or "scales" not in small:
            raise UsageError(
                f"{module} has no {'scales' if 'qzeros' in small else 'qzeros'}: AutoAWQ's gemm layout stores both, and the weight needs both"
            )
        groups = self.settings.groups(module, shape[0])
        check_shapes(module, small, {"qzeros": (groups, shape[1]), "scales": (groups, 8 * shape[1])})
        return Facts(symmetric=bool((self._zero_points(small) == 8).all()))

    def scheme(self, facts: Facts) -> QuantizationScheme:
        return self.settings.scheme(facts)

    def _zero_points(self, tensors: Tensors) -> torch.Tensor:
        """int16 [groups, out]."""
        return unpack(tensors["qzeros"], 4, _PLACE)

    def convert(self, tensors: Tensors, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
        """By compressed-tensors' own converter."""
        converter = AutoAWQConverter(bits=4, group_size=self.settings.group_size, zero_point=not scheme.weights.symmetric, ignore=())
        made = converter.process({f"module.{part}": tensor for part, tensor in tensors.items()})
        return {name.removeprefix("module."): tensor for name, tensor in made.items()}

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        codes = unpack(tensors["qweight"], 4, _PLACE)  # [in, out]
        scales, zeros = tensors["scales"], self._zero_points(tensors)  # [groups, out]
        group = torch.arange(codes.shape[0]) // (codes.shape[0] // scales.shape[0])
        return ((codes - zeros[group]).to(scales.dtype) * scales[group]).T.contiguous()
