"""Additive vector quantization whose key codebooks commute with RoPE, after CommVQ (arXiv 2506.18879): the format, and its codebooks as a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.artefact import read_tensors, sha256_bytes, write_tensors
from calibrate.errors import UsageError
from calibrate.lowbit import sizes
from calibrate.lowbit.base import LowBitFormat, Start, half
from calibrate.lowbit.rope import as_complex, as_real, turns
from calibrate.model import AttentionLayer

SCHEMA = "kv-calibrate/codebooks/1"
GROUP = 32  # channels that share a code
ENTRIES = 16  # of a key table; a code is a pair of them
CODES = ENTRIES**2  # one byte
_SOURCE = (
    "after arXiv 2506.18879: key codewords z_a + i·z_b over RoPE pairs, fitted by EM on keys before RoPE. Smaller books than the paper's (one byte "
    "for 32 channels a stage), per head; values by plain residual books instead of its trained encoder"
)


@dataclass(frozen=True)
class LayerCodebooks:
    """Books of one layer; a vector is the sum of one codeword of each stage, times its norm.

    Attributes:
        key: tables of complex entries, float32 [kv_heads, groups, stages, ENTRIES, GROUP/2 pairs, 2]; code (a, b) stands for z_a + i·z_b.
        value: codewords, float32 [kv_heads, groups, stages, CODES, GROUP].
        frequencies: radians a position of each pair, float64 [head_dim/2].
    """

    key: np.ndarray
    value: np.ndarray
    frequencies: np.ndarray


@dataclass(frozen=True)
class Codebooks:
    """Codebooks of a model by layer index, and what they were fitted to."""

    layers: dict[int, LayerCodebooks]
    origin: dict[str, Any]

    @property
    def stages(self) -> int:
        return next(iter(self.layers.values())).key.shape[2]

    def _tensors(self) -> dict[str, np.ndarray]:
        return {f"layers.{index}.{name}": getattr(books, name) for index, books in self.layers.items() for name in ("key", "value", "frequencies")}

    def digest(self) -> str:
        """SHA-256 over the books."""
        tensors = self._tensors()
        return sha256_bytes(*(part for name in sorted(tensors) for part in (name.encode(), tensors[name].tobytes())))

    def save(self, path: Path) -> None:
        """Write as safetensors."""
        write_tensors(path, self._tensors(), {"schema": SCHEMA, "layers": sorted(self.layers), "origin": self.origin})

    @classmethod
    def load(cls, path: Path) -> "Codebooks":
        """Read a codebooks file. Raises UsageError where it is missing, damaged or something else."""
        tensors, header = read_tensors(path, SCHEMA)
        try:
            layers = {
                int(index): LayerCodebooks(*(tensors[f"layers.{index}.{name}"] for name in ("key", "value", "frequencies")))
                for index in header["layers"]
            }
            loaded = cls(layers, header["origin"])
            if len({books.key.shape[2] for books in layers.values()} | {books.value.shape[2] for books in layers.values()}) != 1:
                raise ValueError("stages differ")
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UsageError(f"{path} is damaged: {' '.join(f'{type(error).__name__} {error}'.split())}") from error
        return loaded


def key_codewords(tables: torch.Tensor) -> torch.Tensor:
    """All z_a + i·z_b of tables [..., ENTRIES, pairs, 2]: real codewords [..., CODES, 2·pairs], real parts first. Code = a·ENTRIES + b."""
    entries = torch.view_as_complex(tables.contiguous())  # [..., ENTRIES, pairs]
    return as_real((entries[..., :, None, :] + 1j * entries[..., None, :, :]).flatten(-3, -2))


def encode(vectors: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """Greedy codes, stage by stage: vectors [..., n, channels] in books [..., stages, CODES, channels] → int64 [..., n, stages]."""
    rest, codes = vectors, []
    for stage in range(books.shape[-3]):
        book = books[..., stage, :, :]
        codes.append(nearest_code(rest, book))
        rest = rest - take(book, codes[-1])
    return torch.stack(codes, dim=-1)


def nearest_code(vectors: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """[..., n, channels] and [..., CODES, channels] → [..., n]."""
    return (vectors @ book.mT - book.square().sum(dim=-1)[..., None, :] / 2).argmax(dim=-1)


def take(book: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Codewords [..., n, channels] of codes [..., n]; the book may have fewer leading axes."""
    return torch.take_along_dim(book.expand(*codes.shape[:-1], *book.shape[-2:]), codes[..., None], dim=-2)


def decode(codes: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """The sum of the codewords, [..., n, channels]."""
    return sum(take(books[..., stage, :, :], codes[..., stage]) for stage in range(books.shape[-3]))


def key_groups(keys: torch.Tensor) -> torch.Tensor:
    """[..., tokens, dim] → [..., groups, tokens, GROUP]: the real parts of a group's pairs, then their imaginary parts."""
    halves = keys.unflatten(-1, (2, -1, GROUP // 2))  # [..., tokens, 2, groups, pairs]
    return halves.movedim(-2, -4).flatten(-2)


def key_ungroup(groups: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return groups.unflatten(-1, (2, GROUP // 2)).movedim(-4, -2).flatten(-3)


@dataclass(frozen=True, kw_only=True)
class Additive(LowBitFormat):
    codebooks: Codebooks
    _books: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def check(self, layers: Sequence[AttentionLayer]) -> None:
        for layer in layers:
            books = self.codebooks.layers.get(layer.index)
            heads, dims = layer.num_key_value_heads, (layer.head_dim, layer.value_head_dim)
            if books is None or (books.key.shape[0], books.key.shape[1] * GROUP, books.value.shape[1] * GROUP) != (heads, *dims):
                raise UsageError(
                    f"the codebooks do not fit layer {layer.index} ({layer.module}) with {heads} heads of {dims} channels: they are of another model"
                )

    def books(self, layer: int, kind: str, device: torch.device) -> torch.Tensor:
        """Codewords [kv_heads, groups, stages, CODES, GROUP]."""
        if (layer, kind) not in self._books:
            given = torch.from_numpy(getattr(self.codebooks.layers[layer], "key" if kind == "k" else "value")).to(device)
            self._books[layer, kind] = key_codewords(given) if kind == "k" else given
        return self._books[layer, kind]

    def key(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        turned = turns(self.codebooks.layers[layer].frequencies, start, tile.shape[-2], tile.device)
        plain = as_real(as_complex(tile) * turned.conj())  # before RoPE
        return as_real(as_complex(_approximate(plain, self.books(layer, "k", tile.device), key_groups, key_ungroup)) * turned)

    def value(self, tile: torch.Tensor, layer: int, start: Start) -> torch.Tensor:
        return _approximate(tile, self.books(layer, "v", tile.device), value_groups, value_ungroup)

    def key_bytes(self, dim: int) -> float:
        return sizes.additive_key(dim, GROUP, self.codebooks.stages)

    value_bytes = key_bytes


def value_groups(values: torch.Tensor) -> torch.Tensor:
    """[..., tokens, dim] → [..., groups, tokens, GROUP]."""
    return values.unflatten(-1, (-1, GROUP)).movedim(-2, -3)


def value_ungroup(groups: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return groups.movedim(-3, -2).flatten(-2)


def _approximate(tile: torch.Tensor, books: torch.Tensor, split: Any, join: Any) -> torch.Tensor:
    norm = tile.norm(dim=-1, keepdim=True)
    groups = split(tile / norm.clamp_min(1e-30))  # [batch, kv_heads, groups, tokens, GROUP]
    beside = groups.movedim(0, -3).flatten(-3, -2)  # sequences beside each other, as tokens are: a book is not copied for each
    found = decode(encode(beside, books), books).unflatten(-2, (len(tile), -1)).movedim(-3, 0)
    return half(norm) * join(found)


def additive(codebooks: Codebooks | None) -> Additive:
    """The format over fitted codebooks. Raises UsageError where there are none."""
    if codebooks is None:
        raise UsageError("additive quantization needs codebooks fitted to the model, and none were given")
    return Additive(name="additive", source=_SOURCE, codebooks=codebooks, own_exact_above=0, digest=codebooks.digest())
