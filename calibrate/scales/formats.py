"""The 8-bit number formats of KV caches, as engines cast to them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumberFormat:
    """An 8-bit float format.

    Attributes:
        name: what the command line calls it.
        dtype: the torch type that does the rounding (nearest, ties to even).
        max: the value at which the engine saturates; a scale maps amax to at most this.
        tiny: smallest positive magnitude (a subnormal).
        description: where it is used.
    """

    name: str
    dtype: torch.dtype
    max: float
    tiny: float
    description: str

    def round_trip(self, values: torch.Tensor) -> torch.Tensor:
        """Clamp to ±max, cast, and back: float32 [...]. The clamp comes first: a cast of values beyond the range may give NaN."""
        return values.clamp(-self.max, self.max).to(self.dtype).to(torch.float32)


# The engine side of e4m3fnuz is vLLM on MI300: its kernels saturate at ±224, and its compressed-tensors loader takes scales as they are
# (the fp8 loader would double them), so that scales solved for 224 are what the file must hold.
FORMATS = {
    fmt.name: fmt
    for fmt in (
        NumberFormat("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-9, "fp8_e4m3: NVIDIA SM89 and newer, MI350, CPUs with AVX-512"),
        NumberFormat("e4m3fnuz", torch.float8_e4m3fnuz, 224.0, 2.0**-10, "fp8_e4m3 on MI300"),
        NumberFormat("e5m2", torch.float8_e5m2, 57344.0, 2.0**-16, "fp8_e5m2: more range, two mantissa bits"),
    )
}
