"""What a gate says: one check a rule, and the verdict over them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from calibrate.evaluate.results import Subject

SCHEMA = "kv-calibrate/verdict/1"
Status = Literal["pass", "fail", "missing", "waived"]


@dataclass(frozen=True)
class Outcome:
    """What one rule found. `reason` is a sentence with its figures, `limit` what the policy asks ("" where there is no number to it)."""

    status: Status
    reason: str
    limit: str = ""


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    reason: str
    limit: str

    @property
    def stops(self) -> bool:
        """Whether it keeps the checkpoint from being released."""
        return self.status in ("fail", "missing")


@dataclass(frozen=True)
class Verdict:
    """All checks; every one was made, whatever the others said. `subject` is None where the checkpoint could not be identified."""

    checkpoint: str
    policy: str
    subject: Subject | None
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return not self.stopping

    @property
    def stopping(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.stops)

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        waived = sum(check.status == "waived" for check in self.checks)
        tail = f", {waived} waived" if waived else ""
        if self.passed:
            return f"Release: {sum(check.status == 'pass' for check in self.checks)} checks passed{tail}."
        failed = sum(check.status == "fail" for check in self.checks)
        missing = len(self.stopping) - failed
        parts = [f"{failed} failed"] * bool(failed) + [f"{missing} lack evidence"] * bool(missing)
        return f"Do not release: of {len(self.checks)} checks {' and '.join(parts)}{tail}."

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "checkpoint": self.checkpoint,
            "policy": self.policy,
            "subject": None if self.subject is None else self.subject.model_dump(),
            "passed": self.passed,
            "sentence": self.sentence,
            "checks": [asdict(check) for check in self.checks],
        }


def judged(good: bool, reason: str, limit: str = "") -> Outcome:
    """Pass or fail with the same sentence: it states what was found."""
    return Outcome("pass" if good else "fail", reason, limit)
