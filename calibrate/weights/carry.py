"""The checkpoint that is calibrated: the source itself, or its weights quantized or converted first and kept beside the output until it is there."""

import shutil
from collections.abc import Callable
from pathlib import Path

from calibrate.checkpoint import check_writable
from calibrate.checkpoint.place import check_target
from calibrate.checkpoint.quantconfig import merged_quantization_config
from calibrate.corpus import Corpus
from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint
from calibrate.progress import note
from calibrate.scales import PolicyOptions
from calibrate.weights.convert import check_convertible, convert_checkpoint, convertible
from calibrate.weights.convert import made_from as converted_from
from calibrate.weights.quantize import check_quantizable, quantize_checkpoint
from calibrate.weights.quantize import made_from as quantized_from
from calibrate.weights.record import made_of
from calibrate.weights.schemes import SCHEMES


def place_of(output: Path) -> Path:
    """Where the weights of an output are kept until it is complete."""
    return output.with_name(f".{output.name}.weights")


def check_carrier(source: SourceCheckpoint, output: Path, scheme: str | None, policy: PolicyOptions, *, force: bool, for_vllm: bool) -> None:
    """Everything that can be refused before hours of work: by `carrier`, and by the writer afterwards. Raises UsageError, HostError."""
    if scheme is None and not convertible(source):
        check_writable(source, output, policy, force=force)
        return
    source.check_attention_carries_scales()
    merged_quantization_config({}, policy)
    check_target(source.path, output, force=force)
    if scheme is None:
        check_convertible(source, for_vllm=for_vllm)
    else:
        check_quantizable(source)


def carrier(
    source: SourceCheckpoint, output: Path, scheme: str | None, rows: Callable[[], Corpus], *, seed: int, device: str, trust: bool
) -> SourceCheckpoint:
    """The checkpoint to calibrate. Weights that an interrupted run made of the same source, in the same way, are used again.

    Args:
        scheme: how to quantize the weights first; None leaves them, and converts those of formats that carry no KV scales.
        rows: gives the corpus that the weights are quantized on, where the scheme needs one.
    """
    place = place_of(output)
    if scheme is None and not convertible(source):
        return source
    corpus = rows() if scheme is not None and SCHEMES[scheme].needs_rows else None
    made = converted_from(source) if scheme is None else quantized_from(source, scheme, corpus, seed)
    if made_of(place) == made:
        note(f"going on with the weights in {place}")
    elif scheme is None:
        convert_checkpoint(source, place, force=True)
    else:
        quantize_checkpoint(source, scheme, place, corpus, seed=seed, device=device, trust=trust, force=True)
    try:
        return SourceCheckpoint.open(place, trust_remote_code=trust)
    except UsageError:
        shutil.rmtree(place, ignore_errors=True)  # damaged since: the next run makes it again
        raise


def discard_carrier(output: Path) -> None:
    """Remove the weights beside a finished output, which holds links to them."""
    shutil.rmtree(place_of(output), ignore_errors=True)
