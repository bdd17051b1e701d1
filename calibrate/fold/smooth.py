"""Factors for formats that rotate keys before they round them token by token: powers of two, so that no weight is rounded.

Such a format spreads a token's error evenly: every rotated channel gets noise in proportion to |k|². With K × λ and Q ÷ λ the noise of a logit is in
proportion to (Σ λ² E[k²]) · (Σ E[q²] / λ²) over the head's channels. By Cauchy and Schwarz it is at least (Σ √(E[k²] E[q²]))², reached at
λ⁴ = E[q²] / E[k²]. The two channels of a rotary pair share λ, so their energies are summed. Means count: these formats do not take them off.
"""

import numpy as np
import torch

from calibrate.fold.artefact import LayerFold
from calibrate.fold.choose import Predicted
from calibrate.fold.parts import Parts
from calibrate.fold.sample import LayerSample

_WORTH = 0.02  # of the noise: a head that gains less keeps its weights
_FLOOR = 1e-8  # of the head's largest energy: a channel that is nearly dead is not blown up without bound
_PLACES = 16  # of an octave, at which rounding to powers of two is tried

_Energies = tuple[np.ndarray, np.ndarray]  # E[k²] and E[q²] of each pair, then of each channel outside RoPE: float64 [kv_heads, pairs + rest]


def smooth(sample: LayerSample, parts: Parts) -> tuple[LayerFold, Predicted]:
    """Choose the factors of one layer.

    The prediction holds "k" alone, since these formats leave Q as it is: the noise of logits, held out, summed over KV heads, up to a factor that is
    the format's and the same for all layers.
    """
    one, two = (_energies(half, parts) for half in sample.halves())
    kept = (_noise(two, _factors(one, parts)) + _noise(one, _factors(two, parts))) / 2  # [kv_heads]
    worth = _by_row(kept, parts) < 1 - _WORTH
    factors = np.where(worth[:, None], _factors(((one[0] + two[0]) / 2, (one[1] + two[1]) / 2), parts), 1.0)
    pairs, rest = np.split(factors, [len(parts.first)], axis=1)
    fold = LayerFold(parts.layer.index, parts.layer.module, pairs.astype(np.complex128), rest)
    before = (_size(one) + _size(two)) / 2
    return fold, Predicted({"k": float(before.sum())}, {"k": float((before * np.where(worth, kept, 1.0)).sum())})


def _energies(sample: LayerSample, parts: Parts) -> _Energies:
    def energy(values: torch.Tensor) -> np.ndarray:  # [kv_heads, tokens, head_dim]
        square = values.double().square().mean(dim=1).cpu().numpy()
        return np.concatenate([square[:, parts.first] + square[:, parts.second], square[:, parts.rest]], axis=1)

    return energy(sample.k), energy(sample.q)


def _factors(energies: _Energies, parts: Parts) -> np.ndarray:
    """Powers of two near the best λ of geometric mean 1, so that K keeps its size: float64 [rows, width], a row a KV head or one for all.

    A factor of all channels is free, so the best of some is taken before each λ goes to its nearest power: no powers of two make less noise than
    the best of such roundings. Heads that share a norm's weight share λ. Each counts by its shares of its own energies, which is the first step
    towards the least product of all heads' noises: heads of large keys or queries do not decide for the others.
    """
    key, query = (_floored(kind) for kind in energies)
    if parts.norm:
        key, query = ((kind / kind.sum(axis=1, keepdims=True)).sum(axis=0, keepdims=True) for kind in (key, query))
    exponents = (np.log2(query) - np.log2(key)) / 4
    exponents -= exponents.mean(axis=1, keepdims=True)
    places = sorted(range(-_PLACES // 2, _PLACES // 2), key=abs)  # of equals the one that moves least
    tried = np.stack([np.exp2(np.rint(exponents + place / _PLACES)) for place in places])  # [places, rows, width]
    noise = np.stack([_by_row(_noise(energies, factors), parts) for factors in tried])  # [places, rows]
    return np.take_along_axis(tried, noise.argmin(axis=0)[None, :, None], axis=0)[0]


def _floored(energy: np.ndarray) -> np.ndarray:
    """Positive energies; a head without any counts all channels alike."""
    most = energy.max(axis=1, keepdims=True)
    return np.where(most > 0, np.maximum(energy, _FLOOR * most), 1.0)


def _size(energies: _Energies) -> np.ndarray:
    """Noise of logits without factors, float64 [kv_heads]."""
    key, query = energies
    return key.sum(axis=1) * query.sum(axis=1)


def _noise(energies: _Energies, factors: np.ndarray) -> np.ndarray:
    """Noise of logits over that without factors, float64 [kv_heads]."""
    key, query = energies
    before, after = _size(energies), _size((key * factors**2, query / factors**2))
    return np.divide(after, before, out=np.ones_like(before), where=before > 0)


def _by_row(of_heads: np.ndarray, parts: Parts) -> np.ndarray:
    """Of each KV head, or the mean of all that share a norm's weight."""
    return of_heads.mean(keepdims=True) if parts.norm else of_heads
