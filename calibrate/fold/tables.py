"""The error of FP8 at every phase: how much of a channel's energy is lost, by where in the octave its multiplier puts it.

Above its subnormals E4M3's relative error repeats with every factor of two, so a table over one octave holds for any scale: multiplying a channel
by m and quantizing with scale s is quantizing it with s/m.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample
from calibrate.scales import FORMATS

PHASES = 16  # steps of an octave
TURNS = 16  # steps of a quarter turn: a whole quarter only swaps the two channels
_STILL = 0.02  # |E[z²]| / E|z|² of a pair that turns all the time is 0: rotating it changes nothing
_HEADROOM = 2.0
_FORMAT = FORMATS["e4m3"]


@dataclass(frozen=True)
class KeyTables:
    """Logit error of each rotary pair (and of each channel outside RoPE) by rotation and phase: float64 [rows, TURNS, PHASES, pairs + rest].

    Attributes:
        key: Σ over the pair of E[q²]·Var(K's error); a mean error of a channel moves all logits of a query alike, which softmax does not see.
        query: Σ of Var(k)·E[Q's error²], likewise.
    """

    key: np.ndarray
    query: np.ndarray


def key_tables(sample: LayerSample, parts: Parts, *, turns: bool) -> KeyTables:
    """Tables of one layer; one row a KV head, one for all heads where a norm's weight is shared."""
    rows = [_head_tables(sample.k[head], sample.q[head], parts, turns and not parts.norm) for head in range(len(sample.k))]
    key, query = (np.stack([row[side] for row in rows]) for side in (0, 1))
    if parts.norm:
        key, query = key.sum(axis=0, keepdims=True), query.sum(axis=0, keepdims=True)
    return KeyTables(key, query)


def value_table(values: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
    """Output error of each channel by phase: float64 [kv_heads, PHASES, channels].

    Args:
        values: [kv_heads, tokens, channels]. weights: squared norm of the output projection's columns, [kv_heads, channels].
    """
    unit = _unit(values)
    table = torch.stack([_errors(head / unit)[1] for head in values.float()])  # [kv_heads, PHASES, channels]
    return (table * unit**2 * weights[:, None].to(table)).cpu().numpy()


def _head_tables(key: torch.Tensor, query: torch.Tensor, parts: Parts, turns: bool) -> tuple[np.ndarray, np.ndarray]:
    k, q = _planes(key, parts), _planes(query, parts)  # complex64 [tokens, pairs + rest]
    units = _unit(key), _unit(query)
    width, pairs = k.shape[1], len(parts.first)
    tables = torch.full((2, TURNS, PHASES, width), math.inf, dtype=torch.float64)
    for step in range(TURNS if turns else 1):
        where = torch.arange(width) if step == 0 else torch.nonzero(_stands(k[:, :pairs]) | _stands(q[:, :pairs])).flatten()
        if not len(where):
            break
        turn = complex(np.exp(0.5j * np.pi * step / TURNS))
        turned = [torch.view_as_real(plane[:, where.to(plane.device)] * turn) for plane in (k, q)]  # [tokens, where, 2]
        spread, second = turned[0].var(dim=0, unbiased=False), turned[1].square().mean(dim=0)
        of_key = _errors(turned[0].flatten(1) / units[0])[0].view(PHASES, -1, 2) * units[0] ** 2
        of_query = _errors(turned[1].flatten(1) / units[1])[1].view(PHASES, -1, 2) * units[1] ** 2
        tables[0, step][:, where] = (of_key * second).sum(dim=-1).cpu()
        tables[1, step][:, where] = (of_query * spread).sum(dim=-1).cpu()
    return tables[0].numpy(), tables[1].numpy()


def _planes(values: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Rotary pairs as complex numbers, then the other channels as real ones: [tokens, head_dim] → complex64 [tokens, pairs + rest]."""
    values = values.float()
    rest = values[:, parts.rest]
    return torch.cat([torch.complex(values[:, parts.first], values[:, parts.second]), torch.complex(rest, torch.zeros_like(rest))], dim=1)


def _stands(pairs: torch.Tensor) -> torch.Tensor:
    """Which pairs prefer a direction: bool [pairs], on the host."""
    return (pairs.square().mean(dim=0).abs() > _STILL * pairs.abs().square().mean(dim=0)).cpu()


def _unit(values: torch.Tensor) -> float:
    """A power of two that brings values well below the format's largest number and far above its smallest."""
    largest = float(values.abs().max())
    return 2.0 ** math.ceil(math.log2(largest * _HEADROOM * 2 / _FORMAT.max)) if largest > 0 else 1.0


def _errors(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean square of the error at every phase, of [tokens, channels] in units of a scale: float64 [PHASES, channels] each."""
    spread, square = [], []
    for phase in range(PHASES):
        factor = 2.0 ** (phase / PHASES)
        scaled = values * factor
        wrong = (_FORMAT.round_trip(scaled) - scaled) / factor
        second, mean = wrong.square().mean(dim=0, dtype=torch.float64), wrong.mean(dim=0, dtype=torch.float64)
        square.append(second)
        spread.append((second - mean**2).clamp_min(0))
    return torch.stack(spread), torch.stack(square)
