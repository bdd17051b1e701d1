"""The rotation: orthonormal, its own inverse, exact scores, and what it does to heads that are no power of two."""

import pytest
import torch

from calibrate.kvarn.hadamard import block_size, rotate


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128, 256])
def test_sylvester_is_orthonormal_and_symmetric(size):
    matrix = rotate(torch.eye(size, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix.abs(), torch.full((size, size), size**-0.5, dtype=torch.float64))


def test_entries_are_sylvesters():
    """Entry (i, j) is −1 to the number of bits that i and j share."""
    matrix = rotate(torch.eye(16, dtype=torch.float64)) * 4
    assert all(matrix[i, j] == (-1) ** (i & j).bit_count() for i in range(16) for j in range(16))


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (96, 32), (80, 16), (192, 64), (576, 64), (7, 1)])
def test_other_heads_are_rotated_in_blocks(dim, block):
    assert block_size(dim) == block
    x = torch.randn(2, 3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x)
    assert torch.allclose(rotate(turned), x)
    one = torch.zeros(dim, dtype=torch.float64)
    one[0] = 1
    assert rotate(one).count_nonzero() == block  # channels mix within their block, not beyond


def test_a_token_does_not_depend_on_its_neighbours():
    x = torch.randn(1, 2, 333, 128, generator=torch.Generator().manual_seed(2))
    whole = rotate(x)
    assert all(torch.equal(rotate(x[:, :, start : start + 7]), whole[:, :, start : start + 7]) for start in range(0, 333, 7))
    assert torch.equal(rotate(x.mT.contiguous().mT), whole)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_scores_are_preserved(dim):
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 4, 16, dim, dtype=torch.float64, generator=generator)
    assert torch.allclose(rotate(q) @ rotate(k).mT, q @ k.mT, atol=1e-12)
    assert not torch.allclose(q @ rotate(k).mT, q @ k.mT, atol=1e-2)  # rotating one side alone does change them
