"""What vLLM must be told beside the checkpoint: `kv_calibration/serve.json`. vLLM reads none of it from a checkpoint by itself."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from calibrate.artefact import SERVE_FILE, read_header
from calibrate.checkpoint.card import vllm_flags
from calibrate.errors import UsageError

SCALES_ORIGIN = "kv_calibration/scales.safetensors"


class Serving(BaseModel):
    """vLLM's engine arguments for a checkpoint, under vLLM's own names.

    Attributes:
        kv_cache_dtype_skip_layers: indices of the layers that keep a 16-bit cache.
        model_impl: "transformers" where only vLLM's Transformers backend loads the scales; None leaves the choice to vLLM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    kv_cache_dtype_skip_layers: tuple[StrictInt, ...] = ()
    model_impl: str | None = Field(None, pattern="^transformers$")

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of `vllm.LLM`; {} where vLLM needs to be told nothing."""
        skip = {"kv_cache_dtype_skip_layers": [str(index) for index in self.kv_cache_dtype_skip_layers]} if self.kv_cache_dtype_skip_layers else {}
        return skip | ({"model_impl": self.model_impl} if self.model_impl else {})

    def leaves_out(self, module: str) -> bool:
        """Whether the layer of this vLLM module keeps 16 bits, told as vLLM tells it: by the number in its path."""
        return next((int(part) for part in module.split(".") if part.isdecimal()), None) in self.kv_cache_dtype_skip_layers

    def flags(self) -> str:
        """As `vllm serve` takes them; "" where it needs none."""
        return vllm_flags(self.arguments())


def cache_name(cache: str, sixteen_bit: Sequence[int]) -> str:
    """The FP8 cache's type, with the layers that keep 16 bits: with others it is not the same cache."""
    return f"{cache}, 16 bits in layers {', '.join(map(str, sixteen_bit))}" if sixteen_bit else cache


def serving(checkpoint: Path) -> Serving:
    """What the checkpoint's serve.json says; nothing special where there is none. Raises UsageError where it is damaged."""
    path = checkpoint / SERVE_FILE
    try:
        value: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Serving(**{name: tuple(one) if isinstance(one, list) else one for name, one in value["vllm"].items()})
    except FileNotFoundError:
        return Serving()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise UsageError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error


def misplaced(ranks: Sequence[Sequence[Mapping[str, Any]]], told: Serving, kv_cache_dtype: str) -> str:
    """What is wrong where vLLM keeps a layer in FP8 that was to be left in 16 bits, or the other way round; "" where nothing is,
    or the cache is not FP8.

    Args:
        ranks: records of `extension.scales_of`. kv_cache_dtype: of the layers that are not left out.
    """
    if not kv_cache_dtype.startswith("fp8"):
        return ""
    for record in (record for records in ranks for record in records if record["caches"]):
        wanted = not told.leaves_out(record["module"])
        if record["kv_cache_dtype"].startswith("fp8") != wanted:
            return f"{record['module']} keeps a cache of type {record['kv_cache_dtype']}, it is to keep {'FP8' if wanted else '16 bits'}"
    return ""


def other_heads(ranks: Sequence[Sequence[Mapping[str, Any]]], layers: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong where vLLM caches another number of heads than was observed: then it caches something else, and the scales are not its own.

    Args:
        ranks: records of `extension.scales_of`. layers: the layout's, of the model that was calibrated; none where it is not known.
    """
    observed = {layer["index"]: layer["num_key_value_heads"] for layer in layers}
    for record in (record for records in ranks for record in records if record["caches"]):
        numbers = [int(part) for part in record["module"].split(".") if part.isdecimal()]
        wanted = observed.get(numbers[0]) if len(numbers) == 1 else None
        held = record["num_kv_heads"] * len(ranks)
        if wanted is not None and held != wanted and not (record["num_kv_heads"] == 1 and held % wanted == 0):
            return f"{record['module']} caches {held} KV heads, {wanted} were observed: vLLM caches something else than what was calibrated"
    return ""


def calibrated_layers(checkpoint: Path) -> list[dict[str, Any]]:
    """The layers of the layout that the checkpoint's scales were solved for; [] where it does not say."""
    path = checkpoint / SCALES_ORIGIN
    layout = read_header(path).get("layout") if path.is_file() else None
    return layout.get("layers", []) if isinstance(layout, dict) else []


def contradiction(checkpoint: Path, ranks: Sequence[Sequence[Mapping[str, Any]]], kv_cache_dtype: str) -> str:
    """What vLLM's layers are that the checkpoint says they are not; "" where they agree."""
    return misplaced(ranks, serving(checkpoint), kv_cache_dtype) or other_heads(ranks, calibrated_layers(checkpoint))
