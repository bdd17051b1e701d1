"""Fitting additive codebooks to sampled K and V by expectation and maximization, stage after stage on what the stages before left over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from calibrate.errors import UsageError
from calibrate.lowbit.additive import CODES, ENTRIES, GROUP, Codebooks, LayerCodebooks, key_codewords, key_groups, nearest_code, take, value_groups
from calibrate.lowbit.rope import as_complex, as_real
from calibrate.progress import meter

_ROUNDS = 8
_SOFT_ROUNDS = 4  # with soft assignments, ever harder; hard ones after that
_RIDGE = 1e-4

# (soft assignments [..., n, CODES], vectors [..., n, channels], parameters) → new parameters
Maximize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """Keys (after RoPE, as cached) and values of one layer.

    Attributes:
        keys, values: float32 [tokens, kv_heads, dim]. positions: of the keys, int64 [tokens].
        frequencies: of RoPE, float64 [dim/2].
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    frequencies: np.ndarray


def fit_codebooks(
    samples: Mapping[int, Samples], bits: int, *, seed: int = 0, origin: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
) -> Codebooks:
    """Codebooks of `bits` a channel for each layer, computed on `device`. The same samples and seed give the same books on the same kind of device.

    Raises:
        UsageError: fewer tokens than codes, or a head that is no multiple of GROUP channels.
    """
    stages = bits * GROUP // 8
    layers = {}
    for sample in samples.values():
        if len(sample.positions) < CODES:
            raise UsageError(f"{len(sample.positions)} tokens cannot fit a book of {CODES} codes: give more text")
        if sample.keys.shape[-1] % GROUP or sample.values.shape[-1] % GROUP:
            raise UsageError(f"heads of {sample.keys.shape[-1]} channels are no multiple of {GROUP}: additive codebooks cannot be fitted")
    with meter("fitting codebooks", len(samples), "layers") as progress:
        for index, sample in samples.items():
            generator = torch.Generator().manual_seed(seed + index)
            key, value = (
                key_groups(_unit(_before_rope(sample, device))),
                value_groups(_unit(sample.values.to(device).movedim(0, 1))),
            )  # [kv_heads, groups, tokens, GROUP]
            tables = _fit(key, stages, generator, _key_start, _key_step, key_codewords)
            books = _fit(value, stages, generator, _value_start, _value_step, lambda book: book)
            layers[index] = LayerCodebooks(tables.cpu().numpy(), books.cpu().numpy(), sample.frequencies)
            progress.advance(1)
    return Codebooks(layers, dict(origin or {}) | {"bits": bits, "seed": seed})


def _before_rope(sample: Samples, device: torch.device | str) -> torch.Tensor:
    angles = sample.positions.cpu().numpy().astype(np.float64)[:, None] * sample.frequencies
    back = torch.from_numpy(np.exp(-1j * angles)).to(device=device, dtype=torch.complex64)[:, None]  # [tokens, 1, pairs]
    return as_real(as_complex(sample.keys.to(device)) * back).movedim(0, 1)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def _fit(
    vectors: torch.Tensor,
    stages: int,
    generator: torch.Generator,
    start: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
    maximize: Maximize,
    codewords: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Parameters of each stage's book, [kv_heads, groups, stages, …], for vectors [kv_heads, groups, n, GROUP]."""
    rest, found = vectors, []
    for _ in range(stages):
        parameters = best = start(rest, generator)
        least = torch.inf
        for number in range(_ROUNDS):
            book = codewords(parameters)
            weights, error = _expect(rest, book, number)
            if error < least:
                least, best = error, parameters
            parameters = maximize(weights, rest, parameters)
        found.append(best)
        book = codewords(best)
        rest = rest - take(book, nearest_code(rest, book))
    return torch.stack(found, dim=2)


def _expect(vectors: torch.Tensor, book: torch.Tensor, number: int) -> tuple[torch.Tensor, float]:
    """Assignments [..., n, CODES], soft at first, and the squared error of hard ones."""
    closeness = vectors @ book.mT  # large, and changed in place from here on
    closeness -= book.square().sum(dim=-1)[..., None, :] / 2  # −½ distance² up to a constant of the vector
    error = float((vectors.square().sum(dim=-1) - 2 * closeness.amax(dim=-1)).clamp_min(0).mean())
    if number < _SOFT_ROUNDS:
        temperature = error / vectors.shape[-1] * 4.0 ** (1 - number)
        return torch.softmax(closeness.div_(max(temperature, 1e-12)), dim=-1), error
    best = closeness.argmax(dim=-1, keepdim=True)
    return closeness.zero_().scatter_(-1, best, 1.0), error


def _key_start(vectors: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sampled vectors, halved in energy since two of them make a codeword: [kv_heads, groups, ENTRIES, pairs, 2]."""
    chosen = torch.randperm(vectors.shape[-2], generator=generator)[:ENTRIES]
    return torch.view_as_real(as_complex(vectors[..., chosen, :]).contiguous()) / 2**0.5


def _key_step(weights: torch.Tensor, vectors: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Least squares over the entries: code (a, b) stands for z_a + i·z_b."""
    design = _design(str(vectors.device))
    mass = weights.sum(dim=-2).to(torch.complex64)  # [..., CODES]
    sums = as_complex(weights.mT @ vectors)  # [..., CODES, pairs]
    left = design.mH @ (mass[..., None] * design)
    # keeps entries without vectors where they are
    ridge = _RIDGE * mass.real.sum(dim=-1)[..., None, None] / ENTRIES * torch.eye(ENTRIES, device=vectors.device)
    old = torch.view_as_complex(tables.contiguous())
    return torch.view_as_real(torch.linalg.solve(left + ridge, design.mH @ sums + ridge.to(torch.complex64) @ old).contiguous())


@lru_cache(maxsize=2)
def _design(device: str) -> torch.Tensor:
    """Which entries make a code: complex64 [CODES, ENTRIES]."""
    ones = torch.eye(ENTRIES, dtype=torch.complex64, device=device)
    return (ones[:, None] + 1j * ones).flatten(0, 1)


def _value_start(vectors: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return vectors[..., torch.randperm(vectors.shape[-2], generator=generator)[:CODES], :].clone()


def _value_step(weights: torch.Tensor, vectors: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    mass = weights.sum(dim=-2)[..., None]
    return torch.where(mass > 1e-6, (weights.mT @ vectors) / mass.clamp_min(1e-6), book)
