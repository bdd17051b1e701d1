"""Which result a rule is to judge: of the engines that the policy accepts, about this very checkpoint, and of the variants it compares."""

from collections.abc import Iterable
from typing import Any

from calibrate.evaluate.evidence import READBACK_FILE
from calibrate.evaluate.results import FOLDER, Data
from calibrate.gate.material import Found, Material
from calibrate.gate.policy import Policy

COMMANDS = {"readback": "verify", "compare": "compare", "niah": "niah", "reasoning": "reason"}


def wanted(policy: Policy) -> list[str]:
    """The kinds of evidence that this policy needs."""
    return ["readback", "compare", "niah", *(["reasoning"] if policy.reasoning.required else [])]


def absent(kind: str, policy: Policy) -> str:
    """That there is no such evidence, and which command makes it."""
    names = READBACK_FILE if kind == "readback" else " or ".join(f"{kind}-{engine}.json" for engine in policy.engines)
    return f"no {names} in {FOLDER}: run kv-calibrate {COMMANDS[kind]}"


def usable(material: Material, policy: Policy, kind: str) -> Found[Any]:
    """The result to judge, or why there is none: absent, unreadable, or about another checkpoint."""
    name = material.evidence.name_of(kind, policy.engines)
    if name is None:
        return Found(None, absent(kind, policy))
    if name in material.evidence.faults:
        return Found(None, material.evidence.faults[name])
    if material.subject.value is None:
        return Found(None, f"{name} cannot be attributed: {material.subject.fault}")
    result = material.evidence.results[name]
    if result.subject != material.subject.value:
        return Found(None, f"{name} is about another checkpoint, so it says nothing here")
    return Found(result)


def variant(results: Iterable[Data], name: str) -> Any | None:
    """The entry of a result's tuple whose `variant` is `name`."""
    return next((one for one in results if one.variant == name), None)
