"""Results as data: what compare, niah and reasoning write, and what the gate and the report read. They are files with a schema version."""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from calibrate.artefact import write_text
from calibrate.engines.session import EngineInfo
from calibrate.errors import UsageError

FOLDER = "kv_calibration/evidence"  # within the checkpoint; engines do not look into it
SIXTEEN_BIT, UNIT, RANDOM, OLD_FORMULA, CALIBRATED = "16-bit", "unit", "random", "old-formula", "calibrated"


class Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Subject(Data):
    """The very checkpoint that a result is about. Evidence for another one is no evidence."""

    scales_digest: str  # provenance.json "scales"
    kv_scales_sha256: str  # of kv_scales.safetensors
    weights_fingerprint: str  # SourceCheckpoint.fingerprint


class Interval(Data):
    """A value with its 95% interval by paired bootstrap over documents (or cells)."""

    value: float
    low: float
    high: float


class DocumentScore(Data):
    """Sums over the scored tokens of one document, kept so that any two variants can be paired later."""

    tokens: int
    nll: float  # −Σ log p
    abs_delta_logprob: float  # Σ |log p − log p of the 16-bit cache|
    kl: float  # Σ KL(16-bit ‖ variant)
    top1_agree: int


class Fidelity(Data):
    """How far a variant's predictions are from the 16-bit cache's. All are per token, over the same tokens."""

    variant: str
    engine: EngineInfo
    documents: tuple[DocumentScore, ...]
    perplexity: float
    perplexity_ratio: Interval
    mean_abs_delta_logprob: Interval
    kl_mean: Interval
    kl_p99: Interval
    top1_agreement: Interval


class HeldOut(Data):
    """Exact effect of a variant's scales on held-out text, one layer and kind. The intervals say how far other documents may differ."""

    variant: str
    layer: int
    kind: Literal["k", "v", "q"]
    scale: tuple[float, ...]  # one, or one a head
    amax: tuple[float, ...]  # per head, on the held-out text
    calibration_amax: float | None  # largest seen in calibration, where it is known
    snr_db: float | None  # None: no error at all
    head_snr_db: tuple[float | None, ...]
    saturated: float
    head_saturated: tuple[float, ...]
    underflow: float
    head_underflow: tuple[float, ...]
    snr_interval: Interval | None = None  # None: no error at all, or sums of single documents were not taken
    saturated_interval: Interval | None = None
    underflow_interval: Interval | None = None
    attention_error: Interval | None = None  # ‖o − ô‖/‖o‖ of the layer's attention output, on "k" rows only


class CompareResult(Data):
    """`kv-calibrate compare`."""

    schema_version: Literal["kv-calibrate/compare/1"] = "kv-calibrate/compare/1"
    subject: Subject
    model: str
    corpus: dict[str, Any]  # description of the held-out corpus
    number_format: str
    fidelity: tuple[Fidelity, ...]
    held_out: tuple[HeldOut, ...]


class Cell(Data):
    """One needle question."""

    task: Literal["single", "multi-key", "multi-value", "variable-tracking"]
    language: str
    length: int  # tokens of the prompt
    depth: float  # 0 … 1
    needle: str  # id in its needle set
    seed: int
    hit: bool
    expected: tuple[str, ...]
    output: str


class NeedleVariant(Data):
    variant: str
    engine: EngineInfo
    cells: tuple[Cell, ...]


class NeedleResult(Data):
    """`kv-calibrate niah`."""

    schema_version: Literal["kv-calibrate/niah/1"] = "kv-calibrate/niah/1"
    subject: Subject
    model: str
    grid: dict[str, Any]  # lengths, depths, tasks, languages, needle sets and haystack with digests, seed
    variants: tuple[NeedleVariant, ...]


class Problem(Data):
    """One reasoning problem and what came of it."""

    task: str
    number: int
    expected: str
    output: str
    correct: bool


class ReasoningVariant(Data):
    variant: str
    engine: EngineInfo
    problems: tuple[Problem, ...]


class ReasoningResult(Data):
    """`kv-calibrate reason`."""

    schema_version: Literal["kv-calibrate/reasoning/1"] = "kv-calibrate/reasoning/1"
    subject: Subject
    model: str
    tasks: dict[str, Any]
    variants: tuple[ReasoningVariant, ...]


class LmEvalMetric(Data):
    """One number of one task, as lm-eval computed it."""

    metric: str
    filter: str  # "none" where the task filters no answers
    value: float | None  # None: not finite
    stderr: float | None  # None: lm-eval gives none for this metric
    higher_is_better: bool | None


class LmEvalTask(Data):
    """A task, or a group that has metrics of its own."""

    task: str
    version: str | None
    documents: int
    shots: int | None
    metrics: tuple[LmEvalMetric, ...]


class LmEvalVariant(Data):
    variant: str
    engine: EngineInfo
    truncated: int  # prompts that lost their beginning because they are longer than the context
    tasks: tuple[LmEvalTask, ...]


class LmEvalResult(Data):
    """`kv-calibrate lm-eval`."""

    schema_version: Literal["kv-calibrate/lm-eval/1"] = "kv-calibrate/lm-eval/1"
    subject: Subject
    model: str
    settings: dict[str, Any]  # tasks, limit, shots, lm-eval's version, digest of all requests
    variants: tuple[LmEvalVariant, ...]


class Ladder(Data):
    """Which level suffices for this model."""

    level: Literal["unit", "random", "calibrated", "none"]
    sentence: str
    reasons: tuple[str, ...]


Result = TypeVar("Result", bound=Data)


def save(result: Data, path: Path) -> None:
    """Write a result, atomically."""
    write_text(path, result.model_dump_json(indent=1) + "\n")


def load(kind: type[Result], path: Path) -> Result:
    """Read a result. Raises UsageError where it is missing, damaged or of another schema."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no such file: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"{path} is not a {kind.__name__}: {where}: {first['msg']}") from error
