"""The gate: every rule of the policy over one checkpoint, and the verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibrate.gate import baselines, freshness, integrity, measured, recall
from calibrate.gate.material import Material, read_material
from calibrate.gate.policy import RULES, Policy
from calibrate.gate.readback import readback
from calibrate.gate.select import usable
from calibrate.gate.verdict import Check, Outcome, Verdict

ON_CHECKPOINT: dict[str, Callable[[Material, Policy], Outcome]] = {
    "coverage": integrity.coverage,
    "finite_positive": integrity.finite_positive,
    "provenance_files": integrity.provenance_files,
    "provenance_weights": integrity.provenance_weights,
    "scales_agree": integrity.scales_agree,
    "statistics": integrity.statistics,
    "evidence_complete": freshness.evidence_complete,
    "evidence_subject": freshness.evidence_subject,
    "evidence_engine": freshness.evidence_engine,
}
# rule → the kind of evidence it judges, and how
ON_EVIDENCE: dict[str, tuple[str, Callable[[Any, Material, Policy], Outcome]]] = {
    "readback": ("readback", readback),
    "held_out_saturation": ("compare", measured.held_out_saturation),
    "kl": ("compare", measured.kl),
    "perplexity": ("compare", measured.perplexity),
    "top1": ("compare", measured.top1),
    "not_worse_than_unit": ("compare", baselines.not_worse_than_unit),
    "not_worse_than_random": ("compare", baselines.not_worse_than_random),
    "needle_recall": ("niah", recall.needle_recall),
    "reasoning": ("reasoning", recall.reasoning),
}


def evaluate_gate(checkpoint: Path, policy: Policy, *, policy_name: str = "default") -> Verdict:
    """Judge a checkpoint by a policy. Every rule is looked at, whatever the others say.

    Raises:
        UsageError: the folder is no checkpoint that kv-calibrate wrote.
    """
    material = read_material(Path(checkpoint))
    return judge(material, policy, policy_name)


def judge(material: Material, policy: Policy, policy_name: str = "default") -> Verdict:
    """The same, on material that was read already."""
    checks = tuple(_check(name, material, policy) for name in RULES)
    return Verdict(str(material.checkpoint), policy_name, material.subject.value, checks)


def _check(name: str, material: Material, policy: Policy) -> Check:
    outcome = _waived(name, policy) or _outcome(name, material, policy)
    return Check(name, outcome.status, outcome.reason, outcome.limit)


def _waived(name: str, policy: Policy) -> Outcome | None:
    if name in policy.waive:
        return Outcome("waived", f"switched off by the policy: {policy.waive[name].strip()}")
    if name == "reasoning" and not policy.reasoning.required:
        return Outcome("waived", "the policy does not ask for reasoning problems")
    return None


def _outcome(name: str, material: Material, policy: Policy) -> Outcome:
    if name in ON_CHECKPOINT:
        return ON_CHECKPOINT[name](material, policy)
    kind, rule = ON_EVIDENCE[name]
    found = usable(material, policy, kind)
    return Outcome("missing", found.fault) if found.value is None else rule(found.value, material, policy)
