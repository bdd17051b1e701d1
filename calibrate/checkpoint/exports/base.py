"""What an exporter is given, what it returns, and what no scalar E4M3 form can hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.scales import Scales
from calibrate.statistics import Statistics


@dataclass(frozen=True)
class Given:
    """A checkpoint, its scales and, where they were kept, the statistics that the scales were solved from."""

    source: SourceCheckpoint
    scales: Scales
    statistics: Statistics | None


@dataclass(frozen=True)
class ExportOptions:
    """What the engine will be.

    Attributes:
        tensor_parallel_size: its ranks, for forms that list them.
        model_dtype: the 16-bit type that it loads the model in, "bfloat16" or "float16", for forms whose scales it keeps in that type.
        serve: what vLLM must be told for the checkpoint that is exported, by the name of its engine argument.
    """

    tensor_parallel_size: int = 1
    model_dtype: str = "bfloat16"
    serve: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sixteen_bit(self) -> str:
        """The layers that are to keep 16 bits, as text; "" where none are."""
        return ", ".join(map(str, self.serve.get("kv_cache_dtype_skip_layers", ())))


@dataclass(frozen=True)
class Loss:
    """What one scale for K and V costs a layer, exactly, over everything that was calibrated on.

    Attributes:
        layer: its index. k_scale, v_scale: its own scales; shared: the larger of the two, which is exported.
        snr_db, shared_snr_db: signal to noise at its own and at the shared scale, by kind ("k", "v").
        saturated: fraction of elements that the shared scale saturates, by kind.
    """

    layer: int
    k_scale: float
    v_scale: float
    shared: float
    snr_db: dict[str, float]
    shared_snr_db: dict[str, float]
    saturated: dict[str, float]

    def loss_db(self, kind: str) -> float:
        """dB that the kind loses; below 0 where the larger scale happens to suit it better."""
        own, shared = self.snr_db[kind], self.shared_snr_db[kind]
        return 0.0 if own == shared else own - shared  # infinite both, where there is no error at all


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file or folder. layers: attention layers in it.
        losses: what sharing a scale costs each layer; empty where nothing is shared, or no statistics were kept.
        how: number of the source's files linked, reflinked and copied; empty for a single file.
        notes: what a reader should know.
    """

    format: str
    path: Path
    layers: int
    losses: tuple[Loss, ...] = ()
    how: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        losses = [vars(one) | {"loss_db": {kind: one.loss_db(kind) for kind in one.snr_db}} for one in self.losses]
        return vars(self) | {"path": str(self.path), "losses": losses, "notes": list(self.notes)}


class Exporter(Protocol):
    """A form. `folder` says whether it writes a whole checkpoint rather than one file."""

    folder: bool

    def export(self, given: Given, output: Path, options: ExportOptions, *, force: bool) -> Exported:
        """Write it. Raises UsageError where the form cannot hold these scales, or nothing may be written at `output`."""
        ...


def check_scalar_e4m3(given: Given, form: str) -> None:
    """Raise UsageError for scales that a form of one E4M3 scale a layer cannot hold; multi-head latent attention is the form's own matter."""
    options = given.scales.options
    if options.granularity != "tensor":
        raise UsageError(f"{form} holds one scale a layer, these are per KV head: solve them with --granularity tensor")
    if options.number_format == "e4m3fnuz":
        raise UsageError(f"{form} means E4M3 scales, which engines convert for MI300 themselves, not e4m3fnuz: solve them with --format e4m3")
    if options.number_format != "e4m3":
        raise UsageError(f"{form} means E4M3, these scales are for {options.number_format}: solve them with --format e4m3")


def latent_layers(given: Given) -> list[int]:
    """Indices of the layers that cache a compressed latent."""
    return [layer["index"] for layer in given.scales.layout["layers"] if layer["latent"]]
