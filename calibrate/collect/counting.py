"""Counting and adding up with torch's own operations, on any device: what the kernel of `histogram.cu` must equal."""

import math
import mmap

import numpy as np
import torch

_RARE = 0x3000  # bfloat16 magnitudes below 2^-31: hardly ever met, zero excepted (in float16 they are common, which costs time only)


def sums_of(exact: torch.Tensor) -> torch.Tensor:
    """Σx and Σx² of [heads, batch, seq, head_dim], overwritten: float64 [2, heads, head_dim]."""
    ones = exact.new_ones((1, exact.shape[2]))  # a product with ones runs at memory speed where a strided sum does not
    first = (ones @ exact).sum(dim=1)[:, 0]
    second = (ones @ exact.square_()).sum(dim=1)[:, 0]
    return torch.stack((first, second))


def zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """int64 zeros. On a CPU, pages that are never written to cost no memory: most codes never occur.

    The kernel would hand out huge pages and with them all of it, so the memory is mapped here and asked to stay in small ones.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int64, device=device)
    memory = mmap.mmap(-1, 8 * math.prod(shape))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.int64).reshape(shape))


def add_counts(counts: torch.Tensor, codes: torch.Tensor) -> None:
    """Count codes, int16 [elements], into int64 [32768], without touching the long stretch of magnitudes that are too small or too large to occur."""
    found = torch.bincount(codes)  # as long as the largest code
    if len(found) > _RARE and int(found[1:_RARE].count_nonzero()) == 0:
        counts[0].add_(found[0])
        counts[_RARE : len(found)].add_(found[_RARE:])
    else:
        counts[: len(found)].add_(found)
