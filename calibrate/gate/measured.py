"""Rules about compare's figures: saturation on held-out text, and how far the calibrated cache is from the 16-bit one."""

from calibrate.evaluate.results import CALIBRATED, CompareResult, Fidelity
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy
from calibrate.gate.select import variant
from calibrate.gate.verdict import Outcome, judged

NO_FIGURES = Outcome("missing", "compare has no figures of the calibrated cache")


def held_out_saturation(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    """The worst layer's share of held-out elements that the format's maximum cuts."""
    rows = [row for row in result.held_out if row.variant == CALIBRATED]
    if not rows:
        return NO_FIGURES
    worst = max(rows, key=lambda row: row.saturated)
    share = f"{worst.saturated:.2g} of {worst.kind.upper()} of layer {worst.layer}" if worst.saturated else "nothing"
    reason = f"{share} saturates on held-out text, at worst over {len(rows)} layers and kinds"
    return judged(worst.saturated <= policy.held_out_saturation, reason, f"at most {policy.held_out_saturation:g}")


def kl(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    """Mean KL to the 16-bit cache, upper end."""
    found = variant(result.fidelity, CALIBRATED)
    short = _too_little(found, policy)
    if short:
        return short
    bound, one = policy.fidelity.kl_mean, found.kl_mean
    reason = f"mean KL to the 16-bit cache is {one.value:.2g} nats a token, at most {one.high:.2g} (95%)"
    return judged(one.high <= bound, reason, f"upper end at most {bound:g}")


def perplexity(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    """Perplexity over the 16-bit cache's, upper end."""
    found = variant(result.fidelity, CALIBRATED)
    short = _too_little(found, policy)
    if short:
        return short
    bound, one = policy.fidelity.perplexity_ratio, found.perplexity_ratio
    reason = f"perplexity is {one.value:.4f} times the 16-bit cache's, at most {one.high:.4f} (95%)"
    return judged(one.high <= bound, reason, f"upper end at most {bound:g}")


def top1(result: CompareResult, material: Material, policy: Policy) -> Outcome:
    """Agreement on the likeliest token, lower end."""
    found = variant(result.fidelity, CALIBRATED)
    short = _too_little(found, policy)
    if short:
        return short
    bound, one = policy.fidelity.top1_agreement, found.top1_agreement
    reason = f"the likeliest token is the 16-bit cache's in {one.value:.2%} of places, at least {one.low:.2%} (95%)"
    return judged(one.low >= bound, reason, f"lower end at least {bound:.2%}")


def _too_little(found: Fidelity | None, policy: Policy) -> Outcome | None:
    if found is None:
        return NO_FIGURES
    least = policy.fidelity.min_documents
    if len(found.documents) < least:
        return Outcome("fail", f"only {len(found.documents)} documents were scored, too few for an interval", f"at least {least} documents")
    return None
