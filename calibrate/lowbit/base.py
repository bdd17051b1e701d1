"""What a low-bit KV format is: which tokens and layers it quantizes, what comes back of them, and what they cost."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from calibrate.model import AttentionLayer

Start = int | np.ndarray  # position of a tile's first token; float64 [batch, 1, 1] where each sequence has its own
HALF_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Window:
    """Which tokens of a sequence are quantized, oldest first; the others stay in 16 bits.

    Attributes:
        group: tokens that are quantized together, once, when all are there.
        residual: newest tokens that stay in 16 bits, at least.
        sink: tokens at the start that stay in 16 bits for good.
    """

    group: int = 1
    residual: int = 0
    sink: int = 0

    def quantized(self, tokens: int) -> int:
        """How many of a sequence's `tokens` are quantized: whole groups, after the sink and before the residual."""
        return max(tokens - self.sink - self.residual, 0) // self.group * self.group


@dataclass(frozen=True, kw_only=True)
class LowBitFormat(ABC):
    """A cache format that runs in the transformers engine. Each format is one small file and one line in `formats.FORMATS`.

    Attributes:
        name: in the registry. source: paper or code that it follows.
        key_window, value_window: which tokens it quantizes.
        skip_ends: layers at either end that stay in 16 bits (dense models only). skip_sliding: sliding-window layers stay in 16 bits.
        kept_layers: indices of further layers that stay in 16 bits.
        own_exact_above: a block of more new tokens than this attends to its own tokens in 16 bits, as does the first block whatever its size;
            they are quantized after it. None: a block attends to its own tokens as they are stored.
        latent: whether it can hold latents of multi-head latent attention.
        digest: of what was fitted offline, None where nothing was.
    """

    name: str
    source: str
    key_window: Window = field(default_factory=Window)
    value_window: Window = field(default_factory=Window)
    skip_ends: int = 0
    skip_sliding: bool = False
    kept_layers: frozenset[int] = frozenset()
    own_exact_above: int | None = None
    latent: bool = False
    digest: str | None = None

    def __post_init__(self) -> None:
        plain = Window()
        if not self.skip_sliding and (self.key_window, self.value_window) != (plain, plain):
            raise ValueError(f"{self.name}: a sliding window drops tokens one by one, so groups, residuals and sinks need skip_sliding")

    def check(self, layers: Sequence[AttentionLayer]) -> None:  # noqa: B027 (most formats fit every model)
        """Raise UsageError where what was fitted offline is not of a model whose quantized layers are these."""

    @abstractmethod
    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        """What is read of keys that were stored.

        Args:
            tile: float32 [batch, kv_heads, tokens, head_dim], after RoPE, tokens a whole number of groups.
            layer: index in the model. start: position of the first token; of each sequence's own where a token waits for no others.

        Returns:
            float32 of the same shape in the same basis: a rotation is undone here, so that queries need none.
        """

    @abstractmethod
    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        """The same for values."""

    @abstractmethod
    def key_bytes(self, dim: int) -> float:
        """Bytes of one quantized key of `dim` channels, with its share of the metadata."""

    @abstractmethod
    def value_bytes(self, dim: int) -> float:
        """The same for values."""

    def token_bytes(self, kv_heads: int, key_dim: int, value_dim: int) -> float:
        """Bytes of a quantized token in one layer."""
        return kv_heads * (self.key_bytes(key_dim) + self.value_bytes(value_dim))

    def sequence_bytes(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> float:
        """Bytes of a whole sequence in one layer that is quantized, its 16-bit tokens included."""
        keys, values = self.key_window.quantized(tokens), self.value_window.quantized(tokens)
        both = min(keys, values)
        alone = (keys - both) * self.key_bytes(key_dim) + (values - both) * self.value_bytes(value_dim)
        sixteen = 2 * ((tokens - keys) * key_dim + (tokens - values) * value_dim)
        return both * self.token_bytes(kv_heads, key_dim, value_dim) + kv_heads * (alone + sixteen)

    @property
    def sixteen_bit_tokens(self) -> int:
        """Tokens of a sequence that stay in 16 bits, at most, counting K and V half each."""
        return sum(window.sink + window.residual + window.group - 1 for window in (self.key_window, self.value_window)) // 2


def half(values: torch.Tensor) -> torch.Tensor:
    """Round to fp16 as stored metadata is, without overflow: float32."""
    return values.clamp(-HALF_MAX, HALF_MAX).to(torch.float16).to(torch.float32)


def sixteen_bit_layers(fmt_skip_ends: int, fmt_skip_sliding: bool, layers: dict[int, bool], depth: int | None) -> set[int]:
    """Indices of the layers that a format leaves in 16 bits.

    Args:
        layers: index → whether it has a sliding window.
        depth: number of the model's layers; None for hybrids with recurrent layers, of which no end is skipped.
    """
    ends = 0 if depth is None else min(fmt_skip_ends, depth // 2)
    skipped = set() if depth is None else {*range(ends), *range(depth - ends, depth)}
    return {index for index, sliding in layers.items() if index in skipped or (fmt_skip_sliding and sliding)}
