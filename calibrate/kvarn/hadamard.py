"""The rotation of KVarN: orthonormal Hadamard over the channels of a head. It is symmetric, so that it is its own inverse."""

from functools import lru_cache

import torch


def block_size(dim: int) -> int:
    """The largest power of two that divides `dim`: Sylvester's construction exists for powers of two alone.

    A head of 64, 128 or 256 channels is one block. One of 96 or 192 is rotated in three equal blocks, one of 80 in five blocks of 16, as vLLM's
    INT4 cache does it: channels mix within their block only, norms and scores are preserved all the same.
    """
    return dim & -dim


@lru_cache(maxsize=32)
def hadamard(size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Sylvester's matrix of a power of two, orthonormal and symmetric: [size, size]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device=device, dtype=dtype)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis, [..., dim], block by block. Rotating twice gives the values back."""
    size = block_size(values.shape[-1])
    matrix = hadamard(size, values.dtype, str(values.device))
    return (values.unflatten(-1, (-1, size)) @ matrix).flatten(-2)
