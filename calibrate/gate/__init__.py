"""Policy file → verdict with reasons, as data, Markdown and JUnit XML."""

from calibrate.gate.evaluate import evaluate_gate
from calibrate.gate.policy import RULES, Policy, load_policy
from calibrate.gate.verdict import Check, Verdict

__all__ = ["RULES", "Check", "Policy", "Verdict", "evaluate_gate", "load_policy"]
