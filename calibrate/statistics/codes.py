"""The 2^15 magnitude codes of a 16-bit float: the unit in which K, V and Q are counted.

The sign of an element never changes its quantization error in a symmetric format, so |x| is all that is kept: its bit pattern without the
sign bit, an integer in [0, 32768) that grows with |x|. Codes from `first_nonfinite` upwards are infinity and NaN.
"""

from dataclasses import dataclass

import numpy as np
import torch

CODES = 1 << 15
_MAGNITUDE = 0x7FFF


@dataclass(frozen=True)
class CacheDtype:
    """A 16-bit float type of the KV cache.

    Attributes:
        name: "bfloat16" or "float16".
        dtype: the torch type.
        first_nonfinite: smallest code that is not a finite number.
    """

    name: str
    dtype: torch.dtype
    first_nonfinite: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Round floats to this type (nearest even) and return their magnitude codes: int16, same shape."""
        return values.to(self.dtype).view(torch.int16) & _MAGNITUDE

    def decode(self) -> np.ndarray:
        """Magnitude of every code: float64 [32768], infinity and NaN where a code is not finite."""
        codes = torch.arange(CODES, dtype=torch.int32).to(torch.int16)
        return codes.view(self.dtype).to(torch.float64).numpy()


CACHE_DTYPES = {
    "bfloat16": CacheDtype("bfloat16", torch.bfloat16, 0x7F80),
    "float16": CacheDtype("float16", torch.float16, 0x7C00),
}
