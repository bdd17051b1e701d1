"""The gate's policy: a YAML file whose every key is here (docs/gate.md explains them). Unknown keys are refused."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from calibrate.errors import UsageError
from calibrate.resources import resource

RULES = (
    "coverage",
    "finite_positive",
    "provenance_files",
    "provenance_weights",
    "scales_agree",
    "statistics",
    "evidence_complete",
    "evidence_subject",
    "evidence_engine",
    "readback",
    "held_out_saturation",
    "kl",
    "perplexity",
    "top1",
    "not_worse_than_unit",
    "not_worse_than_random",
    "needle_recall",
    "reasoning",
)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FidelityBounds(_Part):
    """Bounds on the calibrated cache against the 16-bit cache; each is held against the worse end of the 95% interval."""

    kl_mean: float = Field(0.03, gt=0, description="nats per token")
    perplexity_ratio: float = Field(1.03, gt=0)
    top1_agreement: float = Field(0.90, ge=0, le=1)
    min_documents: int = Field(8, ge=2, description="fewer make no interval")


class BaselineBounds(_Part):
    """How much worse than scale 1.0 and than random-token scales is still noise."""

    tolerance: float = Field(0.002, ge=0, description="nats per token")
    resamples: int = Field(2000, ge=100, le=100_000)


class RecallBounds(_Part):
    """Paired answers against the 16-bit cache: needles, and reasoning with its own values."""

    min_cells: int = Field(20, ge=1)
    min_hits: int = Field(8, ge=1, description="answers that the 16-bit cache gets right; with fewer, nothing can be lost")
    max_drop: float = Field(0.05, ge=0, le=1)
    significance: float = Field(0.05, gt=0, lt=1, description="of the one-sided McNemar test")


class ReasoningBounds(RecallBounds):
    """As needles; asked for only where `required`."""

    required: bool = False


class Policy(_Part):
    """A release policy."""

    description: str = ""
    engine: Literal["vllm", "any"] = "any"
    accept_versions: tuple[str, ...] = ()
    held_out_saturation: float = Field(1e-4, ge=0, le=1)
    fidelity: FidelityBounds = FidelityBounds()
    baselines: BaselineBounds = BaselineBounds()
    needles: RecallBounds = RecallBounds()
    reasoning: ReasoningBounds = ReasoningBounds()
    waive: dict[str, str] = Field(default_factory=dict, description="rule → why it is switched off")

    @field_validator("waive")
    @classmethod
    def _known_and_explained(cls, value: dict[str, str]) -> dict[str, str]:
        for name, why in value.items():
            if name not in RULES:
                raise ValueError(f"no rule {name}; there are {', '.join(RULES)}")
            if not why.strip():
                raise ValueError(f"say why {name} is waived")
        return value

    @property
    def engines(self) -> tuple[str, ...]:
        """Whose results are evidence, the preferred first."""
        return ("vllm",) if self.engine == "vllm" else ("vllm", "transformers")


def default_policy_file() -> Path:
    return resource("data") / "policies" / "default.yaml"


def load_policy(path: Path | None = None) -> Policy:
    """Read a policy; None is the shipped one. Raises UsageError with the file, the key and the reason."""
    path = path or default_policy_file()
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Policy.model_validate({} if value is None else value)
    except OSError as error:
        raise UsageError(f"cannot read policy {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"policy {path}: {where}: {first['msg']}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist is a ValueError of its own
        raise UsageError(f"policy {path} is not YAML: {' '.join(str(error).split())}") from error
