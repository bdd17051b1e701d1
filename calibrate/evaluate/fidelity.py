"""How far a variant's predictions are from the 16-bit cache's, over the same tokens."""

import math
from collections.abc import Sequence

import numpy as np

from calibrate.engines.session import EngineInfo, TokenScores
from calibrate.errors import UsageError
from calibrate.evaluate.bootstrap import RESAMPLES, bootstrap
from calibrate.evaluate.results import DocumentScore, Fidelity, Interval

_TOKENS_AT_ONCE = 512
_LEAST_REST = 1e-7  # float32 log probabilities do not resolve a smaller remainder
_ROUNDING = 1e-9  # 0.01 of 100 tokens is one token
_LARGEST_EXPONENT = 700.0  # exp() of more is no float64


def fidelity(
    variant: str,
    engine: EngineInfo,
    scores: Sequence[TokenScores],
    reference: Sequence[TokenScores],
    documents: Sequence[int],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Fidelity:
    """Compare a variant's scores with the 16-bit cache's, row by row.

    Args:
        documents: the document of each row; rows of one document are summed, and documents are what the bootstrap draws.

    Raises:
        UsageError: other rows than the reference's, or a log probability that is not a number.
    """
    _check(variant, scores, reference)
    kl = [kl_lower_bound(ours, theirs) for ours, theirs in zip(reference, scores, strict=True)]
    sums, reference_nll = _document_sums(scores, reference, kl, documents)
    tokens, nll, delta, divergence, agree = sums.T

    def ratio(column: np.ndarray) -> Interval:
        return bootstrap(np.stack([column, tokens], axis=1), lambda drawn: drawn[:, 0] / drawn[:, 1], seed=seed, resamples=resamples)

    return Fidelity(
        variant=variant,
        engine=engine,
        documents=tuple(
            DocumentScore(tokens=int(row[0]), nll=row[1], abs_delta_logprob=row[2], kl=row[3], top1_agree=int(row[4])) for row in sums.tolist()
        ),
        perplexity=_exp(nll.sum() / tokens.sum()),
        perplexity_ratio=_exp_interval(ratio(nll - reference_nll)),
        mean_abs_delta_logprob=ratio(delta),
        kl_mean=ratio(divergence),
        kl_p99=_quantile(kl, documents, 0.99, seed, resamples),
        top1_agreement=ratio(agree),
    )


def nll_difference(first: Fidelity, second: Fidelity, *, seed: int = 0) -> Interval:
    """Mean over tokens of −log p of the first minus the second's, paired over documents: above 0 the first is worse."""
    return _difference(first, second, "nll", seed)


def kl_difference(first: Fidelity, second: Fidelity, *, seed: int = 0) -> Interval:
    """The same for the divergence from the 16-bit cache."""
    return _difference(first, second, "kl", seed)


def delta_difference(first: Fidelity, second: Fidelity, *, seed: int = 0) -> Interval:
    """The same for |Δ log p| to the 16-bit cache, each to its own: below 0 the first is nearer."""
    return _difference(first, second, "abs_delta_logprob", seed)


def _difference(first: Fidelity, second: Fidelity, field: str, seed: int) -> Interval:
    if [each.tokens for each in first.documents] != [each.tokens for each in second.documents]:
        raise UsageError(f"{first.variant} and {second.variant} were not scored on the same documents: they cannot be paired")
    pairs = zip(first.documents, second.documents, strict=True)
    sums = np.array([[getattr(a, field) - getattr(b, field), a.tokens] for a, b in pairs], dtype=np.float64)
    return bootstrap(sums, lambda drawn: drawn[:, 0] / drawn[:, 1], seed=seed)


def kl_lower_bound(reference: TokenScores, other: TokenScores) -> np.ndarray:
    """KL(reference ‖ other) of each token from the two lists of likeliest tokens: never above the true one, float64 [n].

    The vocabulary is coarsened into cells: every token that both lists name, the tokens that only the reference names (A), and all others.
    Merging outcomes never raises a divergence (log-sum inequality), so that the coarse one is a lower bound. The other distribution's
    probability of A is not known, but each of its tokens has at most that of the last one in its list; the bound takes whatever allowed
    value makes the divergence least.
    """
    parts = []
    for start in range(0, len(reference.logprob), _TOKENS_AT_ONCE):
        place = slice(start, start + _TOKENS_AT_ONCE)
        parts.append(_coarse_kl(reference.top_ids[place], reference.top_logprobs[place], other.top_ids[place], other.top_logprobs[place]))
    return np.concatenate(parts)


def _coarse_kl(ids: np.ndarray, logp: np.ndarray, other_ids: np.ndarray, other_logp: np.ndarray) -> np.ndarray:
    logp, other_logp = logp.astype(np.float64), other_logp.astype(np.float64)
    order = np.argsort(other_ids, axis=1)  # [n, k]
    width = np.int64(1) << 32  # ids of row r become r·2^32 + id: one sorted list for all rows
    offset = np.arange(len(ids), dtype=np.int64)[:, None] * width
    ordered = (np.take_along_axis(other_ids, order, axis=1) + offset).ravel()
    at = np.minimum(np.searchsorted(ordered, (ids + offset).ravel()), ordered.size - 1).reshape(ids.shape)
    both = ordered[at] == ids + offset  # [n, k]
    q = np.where(both, np.take_along_axis(other_logp, order, axis=1).ravel()[at], 0.0)
    common = np.where(both, np.exp(logp) * (logp - q), 0.0).sum(axis=1)
    p_common, q_common = (np.where(both, np.exp(values), 0.0).sum(axis=1) for values in (logp, q))
    p_only = np.where(both, 0.0, np.exp(logp)).sum(axis=1)
    q_rest = np.maximum(1.0 - q_common, _LEAST_REST)
    p_rest = np.maximum(1.0 - p_common - p_only, _LEAST_REST)
    most = (~both).sum(axis=1) * np.exp(other_logp.min(axis=1))
    q_only = np.minimum(most, q_rest * p_only / (p_only + p_rest))
    with np.errstate(divide="ignore", invalid="ignore"):
        named = np.where(p_only > 0, p_only * np.log(p_only / q_only), 0.0)
    return np.maximum(common + named + p_rest * np.log(p_rest / (q_rest - q_only)), 0.0)


def _document_sums(
    scores: Sequence[TokenScores], reference: Sequence[TokenScores], kl: Sequence[np.ndarray], documents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Per document, in order of their numbers: [documents, 5] (tokens, nll, |Δ log p|, KL, top-1 agreement), and the reference's nll."""
    numbers, owner = np.unique(np.asarray(documents), return_inverse=True)
    sums, reference_nll = np.zeros((len(numbers), 5)), np.zeros(len(numbers))
    for row, (ours, theirs, divergence) in enumerate(zip(scores, reference, kl, strict=True)):
        logp, reference_logp = ours.logprob.astype(np.float64), theirs.logprob.astype(np.float64)
        agree = (ours.top_ids[:, 0] == theirs.top_ids[:, 0]).sum()
        sums[owner[row]] += (len(logp), -logp.sum(), np.abs(logp - reference_logp).sum(), divergence.sum(), agree)
        reference_nll[owner[row]] -= reference_logp.sum()
    return sums, reference_nll


def _quantile(kl: Sequence[np.ndarray], documents: Sequence[int], share: float, seed: int, resamples: int) -> Interval:
    """The least value that a share of the tokens does not exceed; the draws' weights of a document are those of each of its tokens."""
    numbers, owner = np.unique(np.asarray(documents), return_inverse=True)
    values = np.concatenate(kl)
    order = np.argsort(-values, kind="stable")  # from the top: a quantile near 1 is met early
    owners = np.repeat(owner, [len(row) for row in kl])[order]
    values = values[order]
    tokens = np.bincount(owners, minlength=len(numbers))

    def statistic(drawn: np.ndarray) -> np.ndarray:  # how often each document was drawn, [resamples, documents]
        above = np.floor((1 - share) * (drawn @ tokens) + _ROUNDING)  # tokens that may lie above
        seen, found = np.zeros(len(drawn)), np.full(len(drawn), -1)
        for start in range(0, len(values), _TOKENS_AT_ONCE):
            weights = seen[:, None] + np.cumsum(drawn[:, owners[start : start + _TOKENS_AT_ONCE]], axis=1)  # [resamples, tokens of the block]
            seen, met = weights[:, -1], weights > above[:, None]
            new = (found < 0) & met.any(axis=1)
            found[new] = start + met[new].argmax(axis=1)
            if (found >= 0).all():
                break
        return values[found]

    return bootstrap(np.eye(len(numbers)), statistic, seed=seed, resamples=resamples)


def _check(variant: str, scores: Sequence[TokenScores], reference: Sequence[TokenScores]) -> None:
    if [len(each.logprob) for each in scores] != [len(each.logprob) for each in reference]:
        raise UsageError(f"variant {variant} was scored on other rows than the 16-bit cache")
    if not scores:
        raise UsageError("no rows were scored: there is nothing to compare")
    for row, each in enumerate(scores):
        if not (np.isfinite(each.logprob).all() and np.isfinite(each.top_logprobs).all()):
            raise UsageError(f"variant {variant} gives log probabilities that are not finite, first in row {row}: its cache overflows")


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))


def _exp_interval(interval: Interval) -> Interval:
    return Interval(value=_exp(interval.value), low=_exp(interval.low), high=_exp(interval.high))
