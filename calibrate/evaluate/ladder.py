"""Which level suffices for this model: no calibration (scale 1.0), random tokens, or calibration; a pure function of measured results."""

from pydantic import BaseModel, ConfigDict, Field

from calibrate.errors import UsageError
from calibrate.evaluate.fidelity import kl_difference, nll_difference
from calibrate.evaluate.mcnemar import compare_cells
from calibrate.evaluate.results import CALIBRATED, RANDOM, SIXTEEN_BIT, UNIT, CompareResult, Fidelity, Ladder, NeedleResult

_ENOUGH_DOCUMENTS = 8
LEVELS = (UNIT, RANDOM, CALIBRATED)  # cheapest first
_NAMES = {UNIT: "scale 1.0", RANDOM: "random-token scales", CALIBRATED: "calibrated scales"}


class LadderBounds(BaseModel):
    """What is still good, and what is still equal. Every default is a choice that a user may change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    perplexity_ratio: float = Field(1.05, gt=0, description="largest acceptable perplexity over the 16-bit cache's")
    saturated: float = Field(1e-4, ge=0, description="largest acceptable share of clamped elements in any layer and kind, on held-out text")
    underflow: float = Field(0.5, ge=0, description="largest acceptable share of non-zero K or V elements that become zero in any layer")
    significance: float = Field(0.05, gt=0, lt=1, description="of McNemar's test: needles lost against the 16-bit cache beyond chance")
    nll_tolerance: float = Field(0.01, ge=0, description="nats a token (1% of perplexity) that two levels may differ by and still count as equal")
    kl_tolerance: float = Field(0.25, ge=0, description="relative difference in KL to the 16-bit cache that still counts as equal")


def decide(result: CompareResult, needles: NeedleResult | None = None, bounds: LadderBounds | None = None, *, seed: int = 0) -> Ladder:
    """The lowest level that does acceptable damage and is as good as the best acceptable one.

    As good means, for −log p and for KL to the 16-bit cache alike: not distinguishable from the best level by a 95% paired bootstrap over
    documents, or within the tolerance.

    Raises:
        UsageError: the comparison does not hold the calibrated variant or the 16-bit cache.
    """
    bounds = bounds or LadderBounds()
    found = {each.variant: each for each in result.fidelity}
    for name in (SIXTEEN_BIT, CALIBRATED):
        if name not in found:
            raise UsageError(f"the comparison holds no {name} variant: nothing can be said about levels")
    reasons = [f"{_NAMES[name]}: not measured" for name in LEVELS if name not in found]
    documents = len(found[CALIBRATED].documents)
    if documents < _ENOUGH_DOCUMENTS:
        reasons.append(f"only {documents} documents were scored: too few to tell levels apart, give more --samples")
    good: list[Fidelity] = []
    for name in LEVELS:
        if name not in found:
            continue
        damage = [*_damage(found[name], result, bounds), *_needle_damage(name, needles, bounds)]
        reasons += [f"{_NAMES[name]}: {text}" for text in damage]
        if not damage:
            good.append(found[name])
            reasons.append(f"{_NAMES[name]}: acceptable, {_summary(found[name])}")
    if not good:
        sentence = "No FP8 cache is good enough here: keep the 16-bit cache, or look at the layers that fail."
        return Ladder(level="none", sentence=sentence, reasons=tuple(reasons))
    for candidate in good:
        worse = _worse(candidate, good, bounds, seed)
        if not worse:
            return Ladder(level=candidate.variant, sentence=_sentence(candidate, reasons), reasons=tuple(reasons))
        reasons.append(f"{_NAMES[candidate.variant]}: {worse}")
    best = min(good, key=lambda each: each.kl_mean.value)  # two measures that disagree about the best: the cheapest is worse in one of them
    return Ladder(level=best.variant, sentence=_sentence(best, reasons), reasons=tuple(reasons))


def _damage(fidelity: Fidelity, result: CompareResult, bounds: LadderBounds) -> list[str]:
    reasons = []
    if fidelity.perplexity_ratio.value > bounds.perplexity_ratio:
        reasons.append(f"perplexity {fidelity.perplexity_ratio.value:.4g} times the 16-bit cache's, above {bounds.perplexity_ratio:g}")
    rows = [row for row in result.held_out if row.variant == fidelity.variant]
    if rows:
        worst = max(rows, key=lambda row: row.saturated)
        if worst.saturated > bounds.saturated:
            reasons.append(f"{worst.saturated:.2g} of {worst.kind.upper()} of layer {worst.layer} saturates, above {bounds.saturated:g}")
    cached = [row for row in rows if row.kind != "q"]
    if cached:
        worst = max(cached, key=lambda row: row.underflow)
        if worst.underflow > bounds.underflow:
            reasons.append(f"{worst.underflow:.0%} of {worst.kind.upper()} of layer {worst.layer} becomes zero, above {bounds.underflow:.0%}")
    return reasons


def _needle_damage(name: str, needles: NeedleResult | None, bounds: LadderBounds) -> list[str]:
    if needles is None:
        return []
    cells = {each.variant: each.cells for each in needles.variants}
    if SIXTEEN_BIT not in cells or name not in cells:
        return []
    test = compare_cells(cells[SIXTEEN_BIT], cells[name])
    if test.second_worse >= bounds.significance:
        return []
    found = f"loses {test.first_only} needles that the 16-bit cache finds and finds {test.second_only} that it does not"
    return [f"{found} (McNemar p = {test.second_worse:.2g})"]


def _worse(candidate: Fidelity, good: list[Fidelity], bounds: LadderBounds, seed: int) -> str:
    """Why a level is not as good as the best ones; "" where it is."""
    best = min(good, key=lambda each: sum(row.nll for row in each.documents))
    nll = nll_difference(candidate, best, seed=seed)
    if nll.low > 0 and nll.value > bounds.nll_tolerance:
        return f"{nll.value:.4f} nats a token worse than {_NAMES[best.variant]} (95% interval {nll.low:.4f} to {nll.high:.4f})"
    best = min(good, key=lambda each: each.kl_mean.value)
    kl = kl_difference(candidate, best, seed=seed)
    if kl.low > 0 and kl.value > bounds.kl_tolerance * best.kl_mean.value:
        both = f"{candidate.kl_mean.value:.2g}, {_NAMES[best.variant]} {best.kl_mean.value:.2g}"
        return f"KL to the 16-bit cache {both} (95% interval of the difference {kl.low:.2g} to {kl.high:.2g})"
    return ""


def _summary(fidelity: Fidelity) -> str:
    ratio, kl = fidelity.perplexity_ratio, fidelity.kl_mean
    agreement = fidelity.top1_agreement.value
    return f"perplexity ratio {ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f}), KL {kl.value:.2g}, top-1 agreement {agreement:.1%}"


def _sentence(fidelity: Fidelity, reasons: list[str]) -> str:
    if fidelity.variant == UNIT:
        return "Scale 1.0 is enough here: no other level is better beyond noise or by more than the tolerance."
    if fidelity.variant == RANDOM:
        return "Random-token scales are enough here: calibration is not better beyond noise or by more than the tolerance, and scale 1.0 is worse."
    broken = any(text.startswith(_NAMES[UNIT]) and "acceptable" not in text and "not measured" not in text for text in reasons)
    return "Calibrate: " + ("lower levels damage this model or are measurably worse." if broken else "it is measurably better than the levels below.")
