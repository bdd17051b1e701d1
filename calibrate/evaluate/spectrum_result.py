"""The comparison of all cache formats as data."""

from typing import Any, Literal

from calibrate.evaluate.results import Data, Fidelity, Subject

Verdict = Literal["reference", "production", "pilot", "no"]


class StorageError(Data):
    """What storing does to K or V, over all quantized tokens of all layers and heads of the held-out text that were looked at."""

    relative_mse: float  # Σ‖x̂ − x‖² / Σ‖x‖²
    norm_error: float  # mean of |‖x̂‖ − ‖x‖| / ‖x‖ over the vectors of tokens and heads


class Hits(Data):
    """Questions that were answered right, paired with the 16-bit cache's."""

    hits: int
    asked: int
    lost: int  # right with the 16-bit cache alone
    won: int  # right with this format alone
    p_worse: float  # McNemar, one-sided

    @property
    def sixteen_bit(self) -> int:
        """Questions that the 16-bit cache answered right."""
        return self.hits + self.lost - self.won


class FormatRow(Data):
    """One format: what it costs and what it does."""

    variant: str
    source: str
    served_as: str | None  # vLLM's --kv-cache-dtype, None where no released vLLM serves it
    sixteen_bit_layers: tuple[int, ...]
    bytes_per_token: float  # of the whole cache of one sequence of `SpectrumResult.context` tokens, what stays in 16 bits included
    bytes_at_measured: float  # the same at the length of the scored rows
    key_error: StorageError | None  # None: 16 bits, or no token of the rows was quantized
    value_error: StorageError | None
    fidelity: Fidelity
    needles: Hits | None
    reasoning: Hits | None
    verdict: Verdict
    reasons: tuple[str, ...]


class SpectrumResult(Data):
    """`kv-calibrate compare --formats`."""

    schema_version: Literal["kv-calibrate/formats/1"] = "kv-calibrate/formats/1"
    subject: Subject
    model: str
    corpus: dict[str, Any]  # of the scored text
    offline: dict[str, Any]  # what tables and codebooks were made of
    context: int  # tokens for which bytes_per_token holds
    measured_length: int
    rows: tuple[FormatRow, ...]  # the 16-bit cache first
    front: tuple[str, ...]  # formats that no other beats in both bytes and KL
    left_out: dict[str, str]  # format → why it does not fit this model
    recommendation: str
