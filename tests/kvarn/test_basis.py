"""Bases for keys: the noise that they promise, by simulation; that none is better than the balanced one; what they do not depend on."""

import numpy as np
import pytest
import torch

from calibrate.kvarn.basis import NAMES, key_basis, logit_noise
from calibrate.kvarn.hadamard import rotate
from calibrate.statistics.second import Second

DIM, HEADS, DEVIATION = 32, 2, 4.0


def moments(vectors: np.ndarray) -> Second:
    """Of [heads, tokens, dim]."""
    centred = vectors - vectors.mean(axis=1, keepdims=True)
    tokens = vectors.shape[1]
    return Second(np.full(len(vectors), tokens), vectors.mean(axis=1), centred.transpose(0, 2, 1) @ centred / tokens)


def drawn(seed: int = 0, tokens: int = 4000, dim: int = DIM) -> tuple[np.ndarray, np.ndarray]:
    """Keys with uneven, correlated channels and a mean; queries that are small where keys are large: [HEADS, tokens, dim] each."""
    rng = np.random.default_rng(seed)
    mix = np.linalg.qr(rng.normal(size=(dim, dim)))[0] * 0.3 + np.eye(dim)
    spread = np.exp(rng.normal(size=(HEADS, 1, dim)))
    key = (rng.normal(size=(HEADS, tokens, dim)) * spread) @ mix + 5 * rng.normal(size=(HEADS, 1, dim))
    query = (rng.normal(size=(HEADS, tokens, dim)) / spread) @ mix.T + rng.normal(size=(HEADS, 1, dim))
    return key, query


def hadamard(dim: int) -> np.ndarray:
    return rotate(torch.eye(dim, dtype=torch.float64)).numpy()


@pytest.fixture(scope="module")
def seen():
    key, query = drawn()
    return key, query, key_basis(moments(key), moments(query), DEVIATION)


def test_the_noise_of_each_basis_is_what_noise_in_that_basis_does_to_logits(seen):
    key, query, basis = seen
    rng = np.random.default_rng(1)
    rotation = np.broadcast_to(hadamard(DIM), (HEADS, DIM, DIM))
    smooth = basis.smooth[:, :, None] * rotation
    for place, matrix in enumerate((np.broadcast_to(np.eye(DIM), rotation.shape), rotation, smooth, basis.balanced @ rotation)):
        stored = key @ matrix
        errors = rng.normal(size=stored.shape) * stored.std(axis=1, keepdims=True)
        logits = np.einsum("htd,htd->ht", query, errors @ np.linalg.inv(matrix)) / DIM**0.5
        np.testing.assert_allclose(basis.noise[:, place], logits.std(axis=1), rtol=0.05, err_msg=NAMES[place])


def test_no_basis_has_less_noise_than_the_balanced_one(seen):
    key, query, basis = seen
    spread, weight = moments(key).covariance, moments(query).second_moment
    values = np.stack([np.linalg.eigvals(one @ other).real for one, other in zip(spread, weight, strict=True)])
    least = np.sqrt(values).sum(axis=1) / DIM
    balanced = basis.noise[:, NAMES.index("balanced")]
    np.testing.assert_allclose(balanced, least, rtol=1e-3)
    rng = np.random.default_rng(2)
    found = [logit_noise(rng.normal(size=(HEADS, DIM, DIM)) + size * np.eye(DIM), spread, weight) for size in (0, 1, 10, 100) for _ in range(20)]
    assert (np.array(found) >= least * (1 - 1e-9)).all()
    nudged = basis.balanced @ hadamard(DIM) @ (np.eye(DIM) + 0.05 * rng.normal(size=(50, 1, DIM, DIM)))
    assert all((logit_noise(each, spread, weight) >= least * (1 - 1e-9)).all() for each in nudged)


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_heads_that_are_rotated_in_blocks_come_close(dim):
    key, query = drawn(dim=dim)
    spread, weight = moments(key).covariance, moments(query).second_moment
    values = np.stack([np.linalg.eigvals(one @ other).real for one, other in zip(spread, weight, strict=True)])
    least = np.sqrt(values).sum(axis=1) / dim
    noise = key_basis(moments(key), moments(query), DEVIATION).noise
    assert (noise[:, 3] >= least * (1 - 1e-9)).all()
    assert (noise[:, 3] <= least * 1.1).all()
    assert (noise[:, 3] < noise[:, 2]).all()


def test_balanced_noise_does_not_depend_on_how_keys_are_written_down(seen):
    """K times a matrix and Q times its inverse transposed have the same logits."""
    key, query, basis = seen
    other = np.linalg.qr(np.random.default_rng(3).normal(size=(DIM, DIM)))[0] * np.geomspace(0.3, 3, DIM)
    again = key_basis(moments(key @ other), moments(query @ np.linalg.inv(other).T), DEVIATION)
    np.testing.assert_allclose(again.noise[:, 3], basis.noise[:, 3], rtol=0.01)
    assert not np.allclose(again.noise[:, 1], basis.noise[:, 1], rtol=0.1)


def test_an_outlier_channel_that_queries_hardly_read():
    """Rotation deals its error out to all channels; a factor before it takes that back. By hand: K's first channel is 100 and Q's 1/100."""
    rng = np.random.default_rng(4)
    size = np.ones(DIM)
    size[0] = 100
    basis = key_basis(moments(rng.normal(size=(1, 9000, DIM)) * size), moments(rng.normal(size=(1, 9000, DIM)) / size), DEVIATION)
    expected = [1, np.sqrt((100**2 + DIM - 1) * (DIM - 1 + 1e-4)) / DIM, 1, 1]
    np.testing.assert_allclose(basis.noise[0], expected, rtol=0.05)
    assert basis.smooth[0, 0] / basis.smooth[0, 1:].mean() == pytest.approx(1 / 100, rel=0.05)


@pytest.mark.parametrize("dim", [32, 80])
def test_stored_channels_have_the_deviation_asked_for(dim):
    rng = np.random.default_rng(5)
    k = moments(rng.normal(size=(2, 500, dim)) * np.exp(rng.normal(size=dim)))
    basis = key_basis(k, moments(rng.normal(size=(2, 500, dim))), DEVIATION)
    for before in (np.stack([np.diag(row) for row in basis.smooth]), basis.balanced):
        variance = np.diagonal(before.transpose(0, 2, 1) @ k.covariance @ before, axis1=1, axis2=2)
        np.testing.assert_allclose(np.sqrt(variance.mean(axis=1)), DEVIATION, rtol=1e-5)


def test_a_head_that_never_varies_or_is_never_read_keeps_its_channels():
    key, query = drawn()
    key[0], query[1] = 3.0, 0.0
    basis = key_basis(moments(key), moments(query), DEVIATION)
    assert np.isfinite(basis.balanced).all()
    np.testing.assert_array_equal(basis.smooth[0], np.ones(DIM))
    np.testing.assert_allclose(basis.balanced[1] / basis.balanced[1][0, 0], np.eye(DIM), atol=1e-6)
    np.testing.assert_array_equal(basis.noise, np.zeros((HEADS, 4)))
