"""Rules about the cheaper levels: calibrated scales must not do worse than scale 1.0 or random tokens, beyond noise."""

from collections.abc import Callable

import numpy as np

from calibrate.evaluate.bootstrap import bootstrap
from calibrate.evaluate.results import CALIBRATED, RANDOM, UNIT, CompareResult, DocumentScore, Fidelity, Interval
from calibrate.gate.material import Material
from calibrate.gate.measured import NO_FIGURES
from calibrate.gate.policy import Policy
from calibrate.gate.select import variant
from calibrate.gate.verdict import Outcome, judged

_NAMES = {UNIT: "scale 1.0", RANDOM: "random-token scales"}


def not_worse_than_unit(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    return _not_worse(result, UNIT, policy)


def not_worse_than_random(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    return _not_worse(result, RANDOM, policy)


def _not_worse(result: CompareResult, baseline: str, policy: Policy) -> Outcome:
    """KL and negative log likelihood of each document, ours less the baseline's: worse when even the lower end is above the tolerance."""
    ours, theirs = variant(result.fidelity, CALIBRATED), variant(result.fidelity, baseline)
    if ours is None:
        return NO_FIGURES
    name = _NAMES[baseline]
    if theirs is None:
        return Outcome("missing", f"compare has no figures of {name}")
    unpaired = _unpaired(ours, theirs, name)
    if unpaired:
        return unpaired
    resamples, tolerance = policy.baselines.resamples, policy.baselines.tolerance
    measures = {"KL": lambda one: one.kl, "log loss": lambda one: one.nll}
    found = {label: _paired_difference(ours, theirs, measure, resamples) for label, measure in measures.items()}
    figures = ", ".join(f"{label} {one.value:+.2g} ({one.low:+.2g} to {one.high:+.2g})" for label, one in found.items())
    good = all(one.low <= tolerance for one in found.values())
    limit = f"lower end at most {tolerance:+g} nats a token"
    return judged(good, f"calibrated {'is not worse' if good else 'is worse'} than {name}: {figures} nats a token (95%, paired)", limit)


def _unpaired(ours: Fidelity, theirs: Fidelity, name: str) -> Outcome | None:
    if [one.tokens for one in ours.documents] != [one.tokens for one in theirs.documents]:
        return Outcome("fail", f"calibrated and {name} were not scored on the same documents, so they cannot be paired")
    if not ours.documents or not sum(one.tokens for one in ours.documents):
        return Outcome("fail", "no token was scored")
    if ours.engine != theirs.engine:
        return Outcome("fail", f"calibrated and {name} were scored by different engines or settings, so they cannot be paired")
    return None


def _paired_difference(ours: Fidelity, theirs: Fidelity, measure: Callable[[DocumentScore], float], resamples: int) -> Interval:
    """Ours less theirs, per token: whole documents are drawn, the same for both."""
    pairs = zip(ours.documents, theirs.documents, strict=True)
    sums = np.array([(measure(a) - measure(b), a.tokens) for a, b in pairs], dtype=np.float64)  # [documents, 2]
    return bootstrap(sums, lambda drawn: drawn[:, 0] / drawn[:, 1], resamples=resamples)
