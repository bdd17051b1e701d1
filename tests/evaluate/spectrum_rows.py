"""Rows of a comparison of formats with chosen figures."""

from calibrate.engines.session import EngineInfo
from calibrate.evaluate.results import DocumentScore, Fidelity, Interval
from calibrate.evaluate.spectrum_result import FormatRow

INFO = EngineInfo(
    engine="transformers", version="t", attention_backend="sdpa", kv_cache_dtype="x", compute_dtype="float32", device="cpu", tensor_parallel_size=1
)


def interval(value: float, high: float | None = None) -> Interval:
    return Interval(value=value, low=value, high=high if high is not None else value)


def fidelity(kl: float, ratio: float = 1.001, *, variant: str = "x", kl_high: float | None = None) -> Fidelity:
    return Fidelity(
        variant=variant,
        engine=INFO,
        documents=(DocumentScore(tokens=100, nll=250.0, abs_delta_logprob=1.0, kl=kl * 100, top1_agree=90),),
        perplexity=10.0,
        perplexity_ratio=interval(ratio),
        mean_abs_delta_logprob=interval(0.1),
        kl_mean=interval(kl, kl_high),
        kl_p99=interval(kl),
        top1_agreement=interval(0.9),
    )


def row(variant: str, size: float, kl: float, verdict: str = "pilot", reasons: tuple[str, ...] = ()) -> FormatRow:
    return FormatRow(
        variant=variant,
        source="s",
        served_as=None,
        sixteen_bit_layers=(),
        bytes_per_token=size,
        bytes_at_measured=size,
        key_error=None,
        value_error=None,
        fidelity=fidelity(kl, variant=variant),
        needles=None,
        reasoning=None,
        verdict=verdict,
        reasons=reasons,
    )
