"""From final hidden states to what is compared: log probabilities, the likeliest token, and KL from the reference."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.errors import CheckFailed

TOP = 64  # likeliest tokens of the reference that KL names one by one
_LOGITS_AT_ONCE = 1 << 28  # elements: 1 GiB of float32
_TOKENS_AT_ONCE = 4096
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Reference:
    """The 16-bit cache's predictions of all tokens but the first of each row, rows joined.

    Attributes:
        lengths: tokens of each row, so that a row has lengths − 1 predictions.
        logprob: of the token that stands there, float32 [n]. top_ids: the likeliest, likeliest first, int32 [n, TOP].
        top_logprobs: theirs, float32 [n, TOP]. rest: log of what all others have together, float32 [n].
    """

    lengths: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    rest: np.ndarray

    def save(self, path: Path) -> None:
        """Write as npz, complete or not at all."""
        part = path.with_suffix(f".{os.getpid()}.part.npz")
        np.savez(part, **vars(self))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        with np.load(path) as file:
            return cls(**{name: file[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Scores:
    """A cache's predictions beside the reference's, rows joined: `logprob` and `kl` float32 [n], `top1` int32 [n]."""

    lengths: np.ndarray
    logprob: np.ndarray
    kl: np.ndarray
    top1: np.ndarray


@dataclass(frozen=True)
class OutputMatrix:
    """How the model makes logits of its hidden states: as vLLM's logits processor, but with fp32 sums and without rounding the result."""

    weight: torch.Tensor  # [vocabulary, hidden]
    bias: torch.Tensor | None
    soft_cap: float | None
    scale: float

    @classmethod
    def of(cls, model: torch.nn.Module, hidden_size: int) -> "OutputMatrix":
        """What the model's own `compute_logits` hands to its logits processor."""
        processor, caught = model.logits_processor, []
        handle = processor.register_forward_pre_hook(lambda module, args, kwargs: caught.append((args, kwargs)), with_kwargs=True)
        parameter = next(model.parameters())
        with torch.inference_mode():
            model.compute_logits(torch.zeros(1, hidden_size, dtype=parameter.dtype, device=parameter.device))
        handle.remove()
        args, kwargs = caught[0]
        head = args[0] if args else kwargs["lm_head"]
        bias, size = getattr(head, "bias", None), processor.org_vocab_size
        return cls(head.weight[:size], None if bias is None else bias[:size].float(), processor.soft_cap, float(processor.scale))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocabulary]; products of 16-bit numbers are exact in float32."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            found = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            found = hidden.float() @ self.weight.float().t()
        if self.bias is not None:
            found += self.bias
        if self.soft_cap is not None:
            found = torch.tanh(found / self.soft_cap) * self.soft_cap
        return found * self.scale if self.scale != 1.0 else found

    def blocks(self, hidden: torch.Tensor, rows: Sequence[np.ndarray]) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Logits by blocks, the tokens that stood there, and their place among all predictions."""
        own = torch.from_numpy(np.concatenate([row[1:] for row in rows]).astype(np.int64)).to(hidden.device)
        step = max(1, min(_TOKENS_AT_ONCE, _LOGITS_AT_ONCE // len(self.weight)))
        for start in range(0, len(own), step):
            place = slice(start, min(start + step, len(own)))
            yield self.logits(hidden[place]), own[place], place


def first(logits: torch.Tensor, own: torch.Tensor) -> tuple[np.ndarray, ...]:
    """The reference's columns: log p of `own`, the likeliest tokens, theirs, and that of all others together. Overwrites the logits."""
    whole = torch.logsumexp(logits, -1, keepdim=True)
    values, ids = torch.topk(logits, min(TOP, logits.shape[1] - 1), -1)
    logprob = logits.gather(1, own[:, None])[:, 0] - whole[:, 0]
    rest = torch.logsumexp(logits.scatter_(1, ids, -torch.inf), -1) - whole[:, 0]
    return logprob.cpu().numpy(), ids.int().cpu().numpy(), (values - whole).cpu().numpy(), rest.cpu().numpy()


def beside(logits: torch.Tensor, own: torch.Tensor, ids: torch.Tensor, theirs: torch.Tensor, their_rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log p of `own`, KL(reference ‖ this) and the likeliest token. Overwrites the logits.

    KL is taken over the reference's likeliest tokens and one cell for all others: never above the whole one, by the log-sum inequality.
    """
    ids = ids.long()
    whole = torch.logsumexp(logits, -1, keepdim=True)
    logprob = logits.gather(1, own[:, None])[:, 0] - whole[:, 0]
    top1 = logits.argmax(-1).int()
    ours = logits.gather(1, ids) - whole
    rest = torch.logsumexp(logits.scatter_(1, ids, -torch.inf), -1) - whole[:, 0]
    kl = (theirs.exp() * (theirs - ours)).double().sum(-1) + (their_rest.exp() * (their_rest - rest)).double()
    return logprob, kl.float(), top1


def groups(rows: Sequence[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    """Consecutive rows that fit into one step of `most` tokens together."""
    group: list[np.ndarray] = []
    for row in rows:
        if group and (sum(map(len, group)) + len(row) > most or len(group) == _ROWS_AT_ONCE):
            yield group
            group = []
        group.append(np.asarray(row, dtype=np.int64))
    if group:
        yield group


def rows_of(steps: Sequence[tuple[Any, Any, Any]], rows: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Hidden states of each row without its last token, from steps of (token ids, positions, hidden states).

    A row is known by its tokens; it must have been taken in one piece.
    """
    waiting: dict[bytes, list[int]] = {}
    for number, row in enumerate(rows):
        waiting.setdefault(row.tobytes(), []).append(number)
    found: dict[int, torch.Tensor] = {}
    for ids, positions, hidden in steps:
        tokens, places = ids.cpu().numpy().astype(np.int64), positions.cpu().numpy()
        starts = np.flatnonzero(places == 0)
        for start, stop in zip(starts, [*starts[1:], len(places)], strict=True):
            number = _known(waiting, tokens[start:stop], rows)
            if number is not None:
                found[number] = hidden[start : start + len(rows[number]) - 1]
    if len(found) < len(rows):
        raise CheckFailed(
            f"vLLM took {len(rows) - len(found)} of {len(rows)} rows in pieces: its cache is too small for {sum(map(len, rows))} tokens"
        )
    return [found[number] for number in range(len(rows))]


def _known(waiting: dict[bytes, list[int]], tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int | None:
    """The row with these tokens, padding behind them aside; it waits no longer."""
    for length in (len(tokens), *sorted({len(row) for row in rows if len(row) < len(tokens)}, reverse=True)):
        numbers = waiting.get(tokens[:length].tobytes())
        if numbers:
            return numbers.pop(0)
    return None
