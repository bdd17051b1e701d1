"""GPTQ's layout: `qweight` int32 [in·bits/32, out], `qzeros` int32 [groups, out·bits/32], `scales` [groups, out], `g_idx` int32 [in].

Values lie in an int32 lowest bits first: along the input in `qweight`, along the output in `qzeros`.
weight[i, o] = (q[i, o] - zero[g, o]) · scale[g, o] with g = g_idx[i], in the scale's type.
`checkpoint_format` gptq (v1) stores zero - 1, gptq_v2 stores zero (GPTQModel, convert_gptq_v1_to_v2_format).
"""

from typing import Any, ClassVar

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme

from calibrate.errors import UsageError
from calibrate.weights.packing import FLOATS, INT32, Facts, IntSettings, Tensors, check_shapes, unpack

_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Gptq:
    """GPTQ as AutoGPTQ and GPTQModel write it."""

    name = "GPTQ"
    key = "qweight"
    types: ClassVar = {"qweight": INT32, "qzeros": INT32, "scales": FLOATS, "g_idx": ("I32", "I64")}

    def __init__(self, config: dict[str, Any], where: str) -> None:
        layout = str(config.get("checkpoint_format") or "gptq").lower()
        if layout not in _OFFSETS:
            raise UsageError(f"{where}: GPTQ checkpoint_format {layout} is not converted, only {' and '.join(_OFFSETS)}")
        if config.get("dynamic"):
            raise UsageError(f"{where}: GPTQ with other settings for some layers (`dynamic`) is not converted: calibrate the original")
        if config.get("lm_head"):
            raise UsageError(f"{where}: a quantized lm_head is not converted: vLLM loads none from compressed-tensors")
        self.offset = _OFFSETS[layout]
        self.settings = IntSettings.of(config, where, allowed=(4, 8), names=("bits", "group_size"))

    def examine(self, module: str, shape: list[int], small: Tensors) -> Facts:
        for part in ("qzeros", "scales"):
            if part not in small:
                raise UsageError(f"{module} has no {part}: this is no complete GPTQ checkpoint")
        bits, outputs = self.settings.bits, shape[1]
        columns, over = shape[0] * 32 // bits, 1 << bits
        groups = self.settings.groups(module, columns)
        if outputs * bits % 32:
            raise UsageError(f"{module}: the zero points of its {outputs} outputs do not fill whole int32: GPTQ kernels hold no such layer")
        check_shapes(module, small, {"qzeros": (groups, outputs * bits // 32), "scales": (groups, outputs), "g_idx": (columns,)})
        zeros, order = self._zero_points(small), small.get("g_idx")
        if bool((zeros == over).any()):
            raise UsageError(
                f"{module} stores the zero point {over - 1} in GPTQ's first format, which some kernels read as {over} and others as 0: "
                "its weights are not defined; save it as gptq_v2"
            )
        in_order = order is None or bool((order == torch.arange(columns) // (columns // groups)).all())
        if order is not None and not bool(((order >= 0) & (order < groups)).all()):
            raise UsageError(f"{module}: its g_idx names groups that are none of its {groups}: the file is damaged")
        if not in_order and not bool((torch.bincount(order.long(), minlength=groups) == columns // groups).all()):
            raise UsageError(f"{module}: its g_idx makes groups of unequal size, which compressed-tensors does not hold: calibrate the original")
        return Facts(symmetric=bool((zeros == over // 2).all()), reordered=not in_order)

    def scheme(self, facts: Facts) -> QuantizationScheme:
        return self.settings.scheme(facts)

    def _zero_points(self, tensors: Tensors) -> torch.Tensor:
        """int16 [groups, out]; 2^bits where the first format's stored value wraps."""
        return unpack(tensors["qzeros"], self.settings.bits) + self.offset

    def convert(self, tensors: Tensors, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
        """compressed-tensors has no converter for GPTQ (0.19): its packing functions, its signed codes."""
        bits, half = self.settings.bits, 1 << (self.settings.bits - 1)
        codes = (self._codes(tensors).T - half).to(torch.int8).contiguous()  # [out, in]
        made = {
            "weight_packed": pack_to_int32(codes, bits),
            "weight_scale": tensors["scales"].T.contiguous(),
            "weight_shape": torch.tensor(codes.shape),
        }
        if not scheme.weights.symmetric:
            zeros = (self._zero_points(tensors).T - half).to(torch.int8).contiguous()  # [out, groups]
            made["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
        if scheme.weights.actorder is not None:
            made["weight_g_idx"] = self._groups(tensors).to(torch.int32)
        return made | {name: tensor for name, tensor in tensors.items() if name not in self.types}

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        codes, scales, zeros, group = self._codes(tensors), tensors["scales"], self._zero_points(tensors), self._groups(tensors)
        return ((codes - zeros[group]).to(scales.dtype) * scales[group]).T.contiguous()

    def _groups(self, tensors: Tensors) -> torch.Tensor:
        """int64 [in]: each input's group."""
        if "g_idx" in tensors:
            return tensors["g_idx"].long()
        columns = tensors["qweight"].shape[0] * 32 // self.settings.bits
        return torch.arange(columns) // (columns // tensors["scales"].shape[0])

    def _codes(self, tensors: Tensors) -> torch.Tensor:
        """int16 [in, out], unsigned."""
        return unpack(tensors["qweight"].T.contiguous(), self.settings.bits).T
