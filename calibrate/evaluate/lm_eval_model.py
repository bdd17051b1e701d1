"""A session as a model that lm-eval can ask. Importing this needs the extra `lm-eval`."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calibrate.engines.session import Session, TokenScores
from calibrate.errors import HostError, UsageError
from calibrate.progress import meter

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise HostError(f'lm-eval is not installed ({error}): pip install "kv-calibrate[lm-eval]" adds it') from error


class SessionLM(TemplateLM):
    """An lm-eval model that asks a session. It tokenizes and splits as lm-eval's own Hugging Face model does.

    Args:
        limit: tokens of a row, or of a prompt with its answer, at most. What is longer loses its beginning, and `truncated` counts it.
        batch: rows or prompts that the session is handed at once.
    """

    def __init__(self, session: Session, tokenizer: Any, ends: Sequence[int], *, limit: int, batch: int, label: str) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._session, self._ends, self._limit, self._batch, self._label = session, list(ends), limit, batch, label
        self._digest = hashlib.sha256()
        self.longest = self.truncated = 0

    @property
    def requests(self) -> str:
        """Digest of all that was asked so far."""
        return self._digest.hexdigest()

    @property
    def eot_token_id(self) -> int:
        return self._ends[0] if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Special tokens as the tokenizer adds them by itself where None; none where the text begins with the first one already."""
        begun = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
        special = not begun if add_special_tokens is None else add_special_tokens
        return self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Σ log p of each continuation after its context, and whether it is what greedy decoding gives."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Σ log p of each whole text after one prefix token; a text longer than the context in windows, each token scored once."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, max_seq_len=self._limit - 1, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += value
        return sums

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            if len(continuation) >= self._limit:
                raise UsageError(f"a continuation of {len(continuation):,} tokens leaves no room in the context of {self._limit:,}")
            rows.append(self._cut([*context, *continuation], self._limit))
        scores = self._put(rows, 0, self._session.score)
        return [_sum(each, continuation) for each, (_, _, continuation) in zip(scores, requests, strict=True)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Greedy answers up to the first of the task's stop strings. Raises UsageError for a task that samples, or an answer without room."""
        results = [""] * len(requests)
        settings = [normalize_gen_kwargs(request.args[1]) for request in requests]
        if any(each["do_sample"] for each in settings):
            raise UsageError("a task asks for sampled answers (do_sample): the cache is judged on greedy ones only")
        for length in dict.fromkeys(each["max_gen_toks"] for each in settings):
            if not 0 < length < self._limit:
                raise UsageError(f"answers of {length:,} tokens (max_gen_toks) do not fit into the context of {self._limit:,}")
            numbers = [number for number, each in enumerate(settings) if each["max_gen_toks"] == length]
            prompts = [self._cut(self.tok_encode(requests[number].args[0]), self._limit - length) for number in numbers]
            outputs = self._put(prompts, length, lambda chunk, length=length: self._session.generate(chunk, length, self._ends))
            for number, tokens in zip(numbers, outputs, strict=True):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                results[number] = postprocess_generated_text(text, settings[number]["until"], think_end_token=None)
        return results

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        self.truncated += len(tokens) > most
        return tokens[-most:]

    def _put(self, rows: list[list[int]], more: int, ask: Callable[[list[list[int]]], list[Any]]) -> list[Any]:
        answers: list[Any] = []
        with meter(self._label, sum(len(row) + more for row in rows)) as progress:
            for start in range(0, len(rows), self._batch):
                chunk = rows[start : start + self._batch]
                answers += ask(chunk)
                progress.advance(sum(len(row) + more for row in chunk))
        self.longest = max(self.longest, *(len(row) + more for row in rows), 0)
        self._digest.update(json.dumps([more, rows]).encode())
        return answers


def _sum(scores: TokenScores, continuation: list[int]) -> tuple[float, bool]:
    """Of the last tokens of a row; entry i of the scores is the prediction of token i + 1."""
    start = len(scores.logprob) - len(continuation)
    return float(scores.logprob[start:].sum(dtype=np.float64)), bool((scores.top_ids[start:, 0] == continuation).all())
