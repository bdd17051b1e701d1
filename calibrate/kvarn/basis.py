"""Bases for keys in which the noise of a quantizer moves attention logits least, from second moments of K and Q. This project's own method.

A quantizer with a scale for each channel of y = kT errs in proportion to each channel's spread. With C = Cov(k) and M = E[q qᵀ] the logit q·k, whose
query is q T⁻ᵀ in that basis, gets noise of variance Σ_d (Tᵀ C T)_dd (T⁻¹ M T⁻ᵀ)_dd. By Cauchy and Schwarz no T goes below (Σ √λ)² / head_dim, λ being
the eigenvalues of C M. The balancing of C and M (B. C. Moore, "Principal component analysis in linear systems", 1981, for Gramians), which makes both
the same diagonal matrix, followed by a Hadamard rotation, which deals out diagonals evenly, has just that noise. Heads of no power of two channels
are rotated in blocks: directions are dealt out so that blocks are nearly alike, and the noise comes within a tenth.
"""

from dataclasses import dataclass

import numpy as np
import torch

from calibrate.kvarn.hadamard import block_size, rotate
from calibrate.statistics.second import Second

NAMES = ("plain", "rotated", "smooth", "balanced")  # as they are; after KVarN's rotation; after a factor a channel, or balancing, and the rotation
# No direction is blown up without bound: a basis is made for moments in which each channel has this share of its own variance more, and a dead one a
# trace of its head's. `noise` tells what it does to the moments as they are.
_RIDGE, _TRACE = 1e-4, 1e-10
_LEAST = 1e-12  # of the largest eigenvalue of C M


@dataclass(frozen=True)
class KeyBasis:
    """What goes before the Hadamard rotation of one layer's keys, and what it is worth.

    Attributes:
        smooth: a factor of each channel, float32 [kv_heads, head_dim].
        balanced: k becomes k @ balanced, float32 [kv_heads, head_dim, head_dim].
        noise: standard deviation of a logit (softmax scale 1/√head_dim) where each channel errs by its own standard deviation, in the bases of
            `NAMES`: float64 [kv_heads, 4].
    """

    smooth: np.ndarray
    balanced: np.ndarray
    noise: np.ndarray


def key_basis(k: Second, q: Second, deviation: float) -> KeyBasis:
    """The bases for K with these moments, read by queries with those; rotated channels get this root mean square deviation."""
    spread, weight = k.covariance, q.second_moment
    pairs = [_bases(*matrices) for matrices in zip(spread, weight, strict=True)]
    smooth, balanced = (np.stack([_scaled(pair[place], one, deviation) for pair, one in zip(pairs, spread, strict=True)]) for place in (0, 1))
    identity = np.stack([np.eye(spread.shape[-1])] * len(spread))
    noise = [logit_noise(identity, spread, weight)]
    noise += [logit_noise(_rotated(before), spread, weight) for before in (identity, smooth, balanced)]
    factors = np.diagonal(smooth, axis1=1, axis2=2)
    return KeyBasis(factors.astype(np.float32), balanced.astype(np.float32), np.stack(noise, axis=1))


def logit_noise(basis: np.ndarray, spread: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The deviation that `KeyBasis.noise` tells, for keys that are stored as k @ basis: float64 [heads] of three times [heads, dim, dim]."""
    back = np.linalg.inv(basis)
    errors = np.einsum("hid,hij,hjd->hd", basis, spread, basis)
    reach = np.einsum("hdi,hij,hdj->hd", back, weight, back)
    return np.sqrt((errors * reach).sum(axis=1) / spread.shape[-1])


def plain_basis(heads: int, dim: int) -> KeyBasis:
    """Keys as they are: no factor, no matrix, no noise known."""
    matrices = np.stack([np.eye(dim, dtype=np.float32)] * heads)
    return KeyBasis(np.ones((heads, dim), np.float32), matrices, np.zeros((heads, len(NAMES))))


def _bases(spread: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smoothing, as a diagonal matrix, and balancing of one head: float64 [dim, dim] each."""
    identity = np.eye(len(spread))
    if not spread.trace() > 0 or not weight.trace() > 0:
        return identity, identity
    spread, weight = (matrix + np.diag(_RIDGE * matrix.diagonal() + _TRACE * matrix.trace()) for matrix in (spread, weight))
    smooth = np.diag((weight.diagonal() / spread.diagonal()) ** 0.25)
    values, vectors = np.linalg.eigh(spread)
    root, inverse = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    products, turned = np.linalg.eigh(root @ weight @ root)
    balanced = inverse @ turned * np.maximum(products, products.max() * _LEAST) ** 0.25
    return smooth, balanced[:, _dealt_out(len(spread))]


def _dealt_out(dim: int) -> np.ndarray:
    """An order of ascending directions in which the blocks that are rotated together get as much each: to and fro over the blocks."""
    size = block_size(dim)
    rounds = np.arange(dim).reshape(size, dim // size)  # [place in a block, block]
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.ravel()


def _scaled(before: np.ndarray, spread: np.ndarray, deviation: float) -> np.ndarray:
    """The same up to a factor, so that channels have this deviation on average."""
    own = np.sqrt(np.trace(before.T @ spread @ before) / len(before))
    return before * (deviation / own) if own > 0 else before


def _rotated(before: np.ndarray) -> np.ndarray:
    return rotate(torch.from_numpy(before)).numpy()
