"""The error of FP8 at every phase: how much of a channel's energy is lost, by where in the octave its multiplier puts it.

Above its subnormals E4M3's relative error repeats with every factor of two, so a table over one octave holds for any scale: multiplying a channel
by m and quantizing with scale s is quantizing it with s/m. Subnormals and saturation are left out: scales keep both far from where energy is.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample

PHASES = 16  # steps of an octave
TURNS = 16  # steps of a quarter turn: a whole quarter only swaps the two channels
_STILL = 0.1  # |E[z²]| / E|z|² of a pair that turns all the time is 0: rotating it changes nothing
_DROPPED = 20  # of the 23 mantissa bits of a float32


@dataclass(frozen=True)
class KeyTables:
    """Logit error of each rotary pair (and of each channel outside RoPE) by rotation and phase: float64 [rows, TURNS, PHASES, pairs + rest].

    Attributes:
        key: Σ over the pair of E[q²]·Var(K's error); a mean error of a channel moves all logits of a query alike, which softmax does not see.
        query: Σ of Var(k)·E[Q's error²], likewise.
    """

    key: np.ndarray
    query: np.ndarray


def key_tables(sample: LayerSample, parts: Parts, *, turns: bool) -> list[KeyTables]:
    """Tables of one layer, of each half of the sample; one row a KV head, one for all heads where a norm's weight is shared."""
    turning = [_turning(sample.k[head], sample.q[head], parts, turns and not parts.norm) for head in range(len(sample.k))]
    result = []
    for half in sample.halves():
        rows = [_head_tables(half.k[head], half.q[head], half.looked[head], parts, places) for head, places in enumerate(turning)]
        key, query = (np.stack([row[side] for row in rows]) for side in (0, 1))
        if parts.norm:
            key, query = key.sum(axis=0, keepdims=True), query.sum(axis=0, keepdims=True)
        result.append(KeyTables(key, query))
    return result


def _turning(key: torch.Tensor, query: torch.Tensor, parts: Parts, turns: bool) -> torch.Tensor:
    """Places of the pairs whose rotation makes a difference: int64 [some]."""
    if not turns:
        return torch.arange(0)
    pairs = len(parts.first)
    return torch.nonzero(_stands(_planes(key, parts)[:, :pairs]) | _stands(_planes(query, parts)[:, :pairs])).flatten()


def _head_tables(key: torch.Tensor, query: torch.Tensor, looked: torch.Tensor, parts: Parts, turning: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    k, q = _planes(key, parts), _planes(query, parts)  # complex64 [tokens, pairs + rest]
    width = k.shape[1]
    tables = torch.full((2, TURNS, PHASES, width), math.inf, dtype=torch.float64)
    for step in range(TURNS if len(turning) else 1):
        where = turning if step else torch.arange(width)
        turn = complex(np.exp(0.5j * np.pi * step / TURNS))
        turned = [torch.view_as_real(plane[:, where.to(plane.device)] * turn) for plane in (k, q)]  # [tokens, where, 2]
        spread, second = _spread(turned[0], looked), turned[1].square().mean(dim=0)
        of_key = _errors(turned[0].flatten(1), looked)[0].view(PHASES, -1, 2)
        of_query = _errors(turned[1].flatten(1))[1].view(PHASES, -1, 2)
        tables[0, step][:, where] = (of_key * second).sum(dim=-1).cpu()
        tables[1, step][:, where] = (of_query * spread).sum(dim=-1).cpu()
    return tables[0].numpy(), tables[1].numpy()


def _planes(values: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Rotary pairs as complex numbers, then the other channels as real ones: [tokens, head_dim] → complex64 [tokens, pairs + rest]."""
    values = values.float()
    rest = values[:, parts.rest]
    return torch.cat([torch.complex(values[:, parts.first], values[:, parts.second]), torch.complex(rest, torch.zeros_like(rest))], dim=1)


def _spread(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted variance over tokens: [tokens, ...] → float64 [...]."""
    share, exact = _shares(weights), values.double()
    mean = torch.tensordot(share, exact, dims=1)
    return torch.tensordot(share, (exact - mean).square(), dims=1)


def _stands(pairs: torch.Tensor) -> torch.Tensor:
    """Which pairs prefer a direction: bool [pairs], on the host."""
    return (pairs.square().mean(dim=0).abs() > _STILL * pairs.abs().square().mean(dim=0)).cpu()


def _errors(values: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean square of the error at every phase, of [tokens, channels] in units of a scale: float64 [PHASES, channels] each.

    `weights`: of the tokens, [tokens]; None counts all alike.
    """
    spread, square = [], []
    share = _shares(torch.ones(len(values), device=values.device) if weights is None else weights).to(values.dtype)
    for phase in range(PHASES):
        factor = 2.0 ** (phase / PHASES)
        scaled = values * factor
        wrong = rounded(scaled).sub_(scaled)
        mean, second = (share @ wrong).double() / factor, (share @ wrong.square_()).double() / factor**2
        square.append(second)
        spread.append((second - mean**2).clamp_min(0))
    return torch.stack(spread), torch.stack(square)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """float32 → the nearest number of three mantissa bits, ties to even: E4M3 without its limits, several times faster than a cast."""
    bits = values.contiguous().view(torch.int32)
    even = (bits >> _DROPPED) & 1
    return even.add_(bits).add_((1 << (_DROPPED - 1)) - 1).bitwise_and_(-(1 << _DROPPED)).view(torch.float32)


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """float64 weights that add up to 1."""
    exact = weights.double().clamp_min(0)
    return exact / exact.sum()
