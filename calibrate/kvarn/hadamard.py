"""The rotation of KVarN: orthonormal Hadamard over the channels of a head. It is symmetric, so that it is its own inverse."""

import torch


def block_size(dim: int) -> int:
    """The largest power of two that divides `dim`: Sylvester's construction exists for powers of two alone.

    A head of 64, 128 or 256 channels is one block. One of 96 or 192 is rotated in three equal blocks, one of 80 in five blocks of 16, as vLLM's
    INT4 cache does it: channels mix within their block only, norms and scores are preserved all the same.
    """
    return dim & -dim


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis, [..., dim], block by block. Rotating twice gives the values back.

    By butterflies: sums of two numbers each, so that a token's result does not depend on how many others are rotated with it.
    """
    size, step = block_size(values.shape[-1]), 1
    while step < size:
        pairs = values.unflatten(-1, (-1, 2, step))  # [..., dim / 2·step, 2, step]
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        step *= 2
    return values * size**-0.5
