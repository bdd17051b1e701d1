"""What FP8 of K, of V or of Q alone does to attention's output, at every place in the octave, on a few rows of the corpus.

Elements do not matter alike: what moves all logits of a query alike changes nothing, and tokens that nobody looks at matter little. So the
attention of some queries is computed as it is and with each kind rounded, and the squared differences are summed by phase (`statistics.phases`).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from calibrate.corpus import Corpus
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics.exactsum import LIMBS, carry, cut
from calibrate.statistics.phases import OCTAVE, PHASES, QUERIES, ROW_TOKENS, ROWS, UNIT_BITS

Key = tuple[int, str]  # (layer index, kind)
_DROPPED = 20  # of the 23 mantissa bits of a float32
_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}  # attention weights
_MOST = 2.0**99


class PhaseErrors:
    """Accumulates per layer, kind and KV head, exactly: any split, order or merge of the same batches gives the same bits.

    Layers that read another's cache and latent attention have no tables.

    Args:
        scalings: layer index → what logits are multiplied with.
        samples: numbers of the rows that are looked at.
    """

    def __init__(self, layout: CacheLayout, cache_dtype: torch.dtype, scalings: dict[int, float], samples: frozenset[int]) -> None:
        self._cache_dtype, self._scalings, self._samples = cache_dtype, scalings, samples
        self._layers = {layer.index: layer for layer in layout.layers if layer.writes and not layer.latent}
        self.limbs: dict[Key, torch.Tensor] = {}  # int64 [4, kv_heads, PHASES]
        self._rows: list[tuple[int, int]] = []
        self._held: dict[str, list[torch.Tensor]] = {}
        self._batch: dict[Key, torch.Tensor] = {}  # float64 [kv_heads, PHASES]
        self._closed: dict[Key, torch.Tensor] = {}

    def begin(self, lengths: Sequence[int], samples: Sequence[int]) -> None:
        """Start a batch of right-padded rows with these true lengths and numbers."""
        pairs = enumerate(zip(lengths, samples, strict=True))
        self._rows = [(row, min(int(length), ROW_TOKENS)) for row, (length, sample) in pairs if int(sample) in self._samples and length > 1]
        self._batch = {}

    def see(self, index: int, kind: str, values: torch.Tensor) -> None:
        """Look at one tensor, [batch, heads, seq, head_dim], of any float type; Q comes after its layer's K and V."""
        layer = self._layers.get(index)
        if layer is None or not self._rows:
            return
        self._held[kind] = [values[row, :, :length].detach().to(self._cache_dtype) for row, length in self._rows]
        if kind != "q":
            return
        rows = zip(self._held["k"], self._held["v"], self._held["q"], strict=True)
        total = sum(_errors(layer, self._scalings[index], *row) for row in rows)  # [3, kv_heads, PHASES]
        self._batch |= {(index, name): errors for name, errors in zip("kvq", total, strict=True)}
        self._held.clear()

    def close(self) -> None:
        """The batch was seen whole: another may begin before this one is added."""
        self._closed = self._batch

    def end(self) -> None:
        """Add the batch that was closed last."""
        for key, errors in self._closed.items():
            self.add(key, cut(torch.nan_to_num(errors * 2.0**UNIT_BITS, nan=0.0, posinf=_MOST).clamp_max(_MOST)))
        self._closed = {}

    def add(self, key: Key, limbs: torch.Tensor) -> None:
        """Add limbs, int64 [4, kv_heads, PHASES], which become this object's own."""
        total = self.limbs.get(key)
        self.limbs[key] = carry(limbs if total is None else total.add_(limbs))

    def all_reduce(self, sum_: Callable[[torch.Tensor], None], devices: dict[int, torch.device]) -> None:
        """Add up over processes, each of which calls this; `sum_` replaces a tensor by its sum over all."""
        for index, layer in self._layers.items():
            for kind in layer.kinds:
                limbs = self.limbs.get((index, kind))
                limbs = torch.from_numpy(_zeros(layer)).to(devices[index]) if limbs is None else limbs
                sum_(limbs)
                self.limbs[index, kind] = carry(limbs)

    def of(self, key: Key) -> np.ndarray | None:
        """What was summed, on the host; None for a layer that has no table."""
        layer = self._layers.get(key[0])
        if layer is None:
            return None
        return self.limbs[key].cpu().numpy() if key in self.limbs else _zeros(layer)


def looked_at(corpus: Corpus) -> frozenset[int]:
    """Numbers of the rows that tables are made on: the longest of each of `ROWS` stretches of the corpus."""
    lengths = np.array([len(sample.tokens) for sample in corpus.samples])
    stretches = np.array_split(np.arange(len(lengths)), min(ROWS, len(lengths)))
    return frozenset(int(stretch[lengths[stretch].argmax()]) for stretch in stretches)


def scalings_of(model: nn.Module, layout: CacheLayout) -> dict[int, float]:
    """What each layer multiplies its logits with: its module's own number, or 1/√head_dim where it names none."""
    found = {layer.index: getattr(model.get_submodule(layer.module), "scaling", None) for layer in layout.layers}
    return {layer.index: float(value) if isinstance(value := found[layer.index], float) else layer.head_dim**-0.5 for layer in layout.layers}


def rounded(values: torch.Tensor) -> torch.Tensor:
    """float32 → the nearest number of three mantissa bits, ties to even: E4M3 without its limits, several times faster than a cast."""
    bits = values.contiguous().view(torch.int32)
    even = (bits >> _DROPPED) & 1
    return even.add_(bits).add_((1 << (_DROPPED - 1)) - 1).bitwise_and_(-(1 << _DROPPED)).view(torch.float32)


def _errors(layer: AttentionLayer, scaling: float, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Of one row, [heads, seq, channels] each: float64 [3, kv_heads, PHASES], of K, V and Q."""
    seq, kv_heads, device = key.shape[1], layer.num_key_value_heads, key.device
    places = torch.from_numpy(np.unique(np.linspace(seq / QUERIES, seq, QUERIES).astype(np.int64).clip(1) - 1)).to(device)
    key, value = key.float(), value.float()
    query = query[:, places].float().unflatten(0, (kv_heads, -1))  # [kv_heads, group, places, head_dim]
    distance = places[:, None] - torch.arange(seq, device=device)  # [places, seq]
    hidden = distance < 0
    if layer.sliding_window:
        hidden |= distance >= layer.sliding_window
    hidden = hidden.repeat(query.shape[1], 1)
    query = query.flatten(1, 2)

    def weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(-1, -2)).mul_(scaling).masked_fill_(hidden, -torch.inf).softmax(dim=-1)

    exact_weights = weights(query, key)
    exact = exact_weights @ value
    at_once = max(1, _AT_ONCE.get(device.type, _AT_ONCE["cuda"]) // exact_weights.numel())
    found = []
    for scales in torch.from_numpy(OCTAVE).to(device, torch.float32).view(-1, 1, 1, 1).split(at_once):

        def stored(values: torch.Tensor, scales: torch.Tensor = scales) -> torch.Tensor:
            return rounded(values / scales).mul_(scales)

        outputs = (weights(query, stored(key)) @ value, exact_weights @ stored(value), weights(stored(query), key) @ value)
        found.append(torch.stack([(output - exact).square_().sum(dim=(-1, -2), dtype=torch.float64).T for output in outputs]))
    return torch.cat(found, dim=-1)


def _zeros(layer: AttentionLayer) -> np.ndarray:
    return np.zeros((LIMBS, layer.num_key_value_heads, PHASES), dtype=np.int64)
