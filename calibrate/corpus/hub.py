"""Datasets of the Hugging Face hub, streamed: nothing is downloaded as a whole, converted or cached."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from calibrate.errors import UsageError

_BUFFER = 1000
_PATTERN = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@:]+))?(@(?P<split>.+))?")


@dataclass(frozen=True)
class HubId:
    """org/name[:config][@split]"""

    name: str
    config: str | None
    split: str | None


def parse_hub_id(text: str) -> HubId:
    """Parse `org/name[:config][@split]`. Raises UsageError where it is none."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is no hub dataset: write hub:org/name, hub:org/name:config or hub:org/name:config@split")
    return HubId(match["name"], match["config"], match["split"])


def resolve_revision(hub: HubId) -> str | None:
    """The commit that is read, for provenance. Also the quick way to learn that the hub, or the dataset, is out of reach."""
    from huggingface_hub import HfApi

    with _reachable(hub):
        return HfApi().dataset_info(hub.name, timeout=30).sha


def hub_rows(hub: HubId, revision: str | None, split: str, seed: int) -> Iterator[tuple[int, Any]]:
    """Rows in a seeded order: shards shuffled, then a buffer. They are numbered as drawn, from 1.

    Raises:
        UsageError: out of reach, no such config or split, or unreadable.
    """
    import datasets  # seconds to import, and only the hub needs it

    datasets.disable_progress_bars()
    with _reachable(hub):
        stream = datasets.load_dataset(hub.name, hub.config, split=hub.split or split, revision=revision, streaming=True)
        # Pictures and sound stay bytes: decoding them would need more libraries, and nobody reads them here.
        yield from enumerate(stream.decode(False).shuffle(seed=seed, buffer_size=_BUFFER), 1)


@contextmanager
def _reachable(hub: HubId) -> Iterator[None]:
    import pyarrow as pa
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # Its base is the HTTP library's own error: httpx or httpx2, by the version of huggingface_hub.
    transport = (HfHubHTTPError, *HfHubHTTPError.__bases__)
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UsageError(f"hub dataset {hub.name} cannot be read: HF_HUB_OFFLINE is set: unset it, or give a local file or folder") from error
    except (*transport, OSError, ValueError, RuntimeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"hub dataset {hub.name} cannot be read: {reason}: check its name and the network, or give a local file") from error
