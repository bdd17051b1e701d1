"""Which level suffices: known answers from made results."""

import pytest

from calibrate.engines.session import EngineInfo
from calibrate.errors import UsageError
from calibrate.evaluate.ladder import LadderBounds, decide
from calibrate.evaluate.results import (
    Cell,
    CompareResult,
    DocumentScore,
    Fidelity,
    HeldOut,
    Interval,
    NeedleResult,
    NeedleVariant,
    Subject,
)

INFO = EngineInfo(engine="transformers", version="x", attention_backend="sdpa", kv_cache_dtype="fp8_e4m3", compute_dtype="float32", device="cpu")
SUBJECT = Subject(scales_digest="a", kv_scales_sha256="b", weights_fingerprint="c")
BASE = [2.0, 2.5, 3.0, 2.2, 2.8, 2.4, 2.6, 2.1]  # nats a token of each document with the 16-bit cache
WIGGLE = [1, -1, 2, -2, 1, -1, 2, -2]


def variant(name, worse=0.0, kl=0.001, noise=0.0):
    """A variant that is `worse` nats a token worse on average, ± noise from document to document."""
    losses = [worse + noise * step for step in WIGGLE]
    documents = tuple(
        DocumentScore(tokens=100, nll=100 * (base + loss), abs_delta_logprob=1.0, kl=100 * kl, top1_agree=95)
        for base, loss in zip(BASE, losses, strict=True)
    )
    ratio = 2.718281828459045**worse
    one = Interval(value=ratio, low=ratio, high=ratio)
    many = Interval(value=kl, low=kl, high=kl)
    return Fidelity(
        variant=name,
        engine=INFO,
        documents=documents,
        perplexity=10.0,
        perplexity_ratio=one,
        mean_abs_delta_logprob=many,
        kl_mean=many,
        kl_p99=many,
        top1_agreement=Interval(value=0.95, low=0.9, high=1.0),
    )


def row(name, kind="k", saturated=0.0, underflow=0.0):
    return HeldOut(
        variant=name,
        layer=3,
        kind=kind,
        scale=(1.0,),
        amax=(1.0,),
        calibration_amax=1.0,
        snr_db=31.0,
        head_snr_db=(31.0,),
        saturated=saturated,
        head_saturated=(saturated,),
        underflow=underflow,
        head_underflow=(underflow,),
    )


def result(*fidelity, rows=()):
    everything = (variant("16-bit", kl=0.0), *fidelity)
    return CompareResult(subject=SUBJECT, model="m", corpus={}, number_format="e4m3", fidelity=everything, held_out=tuple(rows))


def needles(**hits):
    """Of 20 questions each variant answers the first so many."""
    variants = tuple(
        NeedleVariant(
            variant=name.replace("_", "-"),
            engine=INFO,
            cells=tuple(
                Cell(task="single", language="en", length=512, depth=0.5, needle=str(n), seed=0, hit=n < count, expected=("x",), output="")
                for n in range(20)
            ),
        )
        for name, count in hits.items()
    )
    return NeedleResult(subject=SUBJECT, model="m", grid={}, variants=variants)


def level(*arguments, **options):
    return decide(*arguments, **options).level


def test_all_alike_needs_no_calibration():
    ladder = decide(result(variant("unit", 0.02), variant("random", 0.021), variant("calibrated", 0.019)))
    assert ladder.level == "unit"
    assert ladder.sentence.startswith("Scale 1.0 is enough here")


def test_unit_better_than_calibrated_needs_none():
    assert level(result(variant("unit", 0.01), variant("random", 0.03), variant("calibrated", 0.03))) == "unit"


def test_a_clear_gain_calls_for_calibration():
    ladder = decide(result(variant("unit", 0.04), variant("random", 0.045), variant("calibrated", 0.02)))
    assert ladder.level == "calibrated"
    assert any("0.0200 nats a token worse than calibrated scales" in reason for reason in ladder.reasons)


def test_a_clear_gain_that_random_tokens_bring_too():
    ladder = decide(result(variant("unit", 0.04), variant("random", 0.021), variant("calibrated", 0.02)))
    assert ladder.level == "random"


def test_a_certain_but_tiny_gain_is_none():
    assert level(result(variant("unit", 0.024), variant("random", 0.03), variant("calibrated", 0.02))) == "unit"
    assert (
        level(result(variant("unit", 0.024), variant("random", 0.03), variant("calibrated", 0.02)), bounds=LadderBounds(nll_tolerance=0))
        == "calibrated"
    )


def test_a_gain_within_noise_is_none():
    assert level(result(variant("unit", 0.03, noise=0.05), variant("random", 0.03), variant("calibrated", 0.02))) == "unit"


def test_kl_alone_can_call_for_calibration():
    ladder = decide(result(variant("unit", 0.02, kl=0.01), variant("random", 0.02, kl=0.006), variant("calibrated", 0.02, kl=0.005)))
    assert ladder.level == "random"
    assert any(reason.startswith("scale 1.0: KL to the 16-bit cache 0.01") for reason in ladder.reasons)


def test_a_broken_unit_and_a_broken_random():
    ladder = decide(result(variant("unit", 0.5), variant("random", 0.1), variant("calibrated", 0.02)))
    assert ladder.level == "calibrated"
    assert ladder.sentence == "Calibrate: lower levels damage this model or are measurably worse."
    assert "scale 1.0: perplexity 1.649 times the 16-bit cache's, above 1.05" in ladder.reasons


def test_saturation_rules_a_level_out():
    rows = [row("unit", saturated=0.01), row("random"), row("calibrated", saturated=1e-6)]
    ladder = decide(result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02), rows=rows))
    assert ladder.level == "random"
    assert "scale 1.0: 0.01 of K of layer 3 saturates, above 0.0001" in ladder.reasons


def test_values_flushed_to_zero_rule_a_level_out():
    rows = [row("unit", "v", underflow=0.9)]
    assert level(result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02), rows=rows)) == "random"
    queries = [row("unit", "q", underflow=0.9)]
    assert level(result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02), rows=queries)) == "unit"


def test_lost_needles_rule_a_level_out():
    compared = result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02))
    ladder = decide(compared, needles(**{"16-bit": 20}, unit=12, random=19, calibrated=20))
    assert ladder.level == "random"
    assert "scale 1.0: loses 8 needles that the 16-bit cache finds and finds 0 that it does not (McNemar p = 0.0039)" in ladder.reasons


def test_a_few_lost_needles_are_chance():
    compared = result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02))
    assert level(compared, needles(**{"16-bit": 20}, unit=17)) == "unit"


def test_needles_without_a_16_bit_run_say_nothing():
    compared = result(variant("unit", 0.02), variant("random", 0.02), variant("calibrated", 0.02))
    assert level(compared, needles(unit=0, calibrated=0)) == "unit"


def test_nothing_is_good_enough():
    ladder = decide(result(variant("unit", 0.5), variant("random", 0.4), variant("calibrated", 0.3)))
    assert ladder.level == "none"
    assert "keep the 16-bit cache" in ladder.sentence
    assert len(ladder.reasons) == 3


def test_bounds_decide():
    compared = result(variant("unit", 0.5), variant("random", 0.4), variant("calibrated", 0.3))
    assert level(compared, bounds=LadderBounds(perplexity_ratio=1.4)) == "calibrated"
    assert level(compared, bounds=LadderBounds(perplexity_ratio=2, nll_tolerance=1)) == "unit"


def test_levels_that_were_not_measured():
    ladder = decide(result(variant("calibrated", 0.02)))
    assert ladder.level == "calibrated"
    assert "scale 1.0: not measured" in ladder.reasons
    with pytest.raises(UsageError, match="holds no calibrated variant"):
        decide(result(variant("unit")))


def test_user_variants_are_no_level():
    assert level(result(variant("unit", 0.04), variant("random", 0.05), variant("calibrated", 0.02), variant("mine", 0.0))) == "calibrated"


def test_measures_that_disagree_still_give_an_answer():
    """Unit is best in −log p, calibrated in KL, each far behind in the other: the one closer to the 16-bit cache."""
    ladder = decide(result(variant("unit", 0.0, kl=0.02), variant("random", 0.04, kl=0.03), variant("calibrated", 0.03, kl=0.002)))
    assert ladder.level == "calibrated"
