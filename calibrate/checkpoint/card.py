"""The model card's section on the KV cache."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibrate.artefact import public
from calibrate.scales import Scales

_BEGIN, _END = "<!-- kv-calibrate:begin -->", "<!-- kv-calibrate:end -->"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END) + r"\n?", re.DOTALL)


_PLAIN = "The weights are those of the original checkpoint."
_FOLDED = (
    "The weights were folded: queries and keys were turned or multiplied against each other so that the model computes what the original does, "
    "up to rounding, and a quantized cache loses less of them (`kv_calibration/fold.safetensors` holds the factors)."
)


class Use(NamedTuple):
    """What the card says of the scales: which kinds there are, and how engines use them."""

    kinds: str
    how: str


VLLM_USE = Use(
    "k, v and q",
    "vLLM uses them by itself (`kv_cache_dtype` auto);\n`--kv-cache-dtype bfloat16` turns the FP8 cache off.",
)


def with_section(card: str, scales: Scales, use: Use = VLLM_USE, serve: Mapping[str, Any] | None = None, *, folded: bool = False) -> str:
    """The card with its kv-calibrate section added at the end, or replaced where it stands; front matter and all else stay.

    Args:
        serve: vLLM engine arguments that the checkpoint needs.
        folded: whether the weights were folded.
    """
    section = f"{_BEGIN}\n{_text(scales, use, serve or {}, folded)}{_END}\n"
    if _SECTION.search(card):
        return _SECTION.sub(lambda _: section, card)
    separator = "" if not card else "\n" if card.endswith("\n") else "\n\n"
    return card + separator + section


def _text(scales: Scales, use: Use, serve: Mapping[str, Any], folded: bool) -> str:
    options, counted = scales.options, scales.counted
    corpora = sorted({public(source["data"]).replace("|", "\\|") for run in scales.provenance for source in run["corpus"].get("sources", [])}) or [
        "not recorded"
    ]
    tools = sorted({run["tool"] for run in scales.provenance})
    rows = [
        ("format", f"FP8 {options.number_format.upper()}, one scale per {'KV head' if options.granularity == 'head' else 'tensor'}"),
        ("scales", f"{use.kinds} of {len(scales.layers)} attention layers, in `kv_scales.safetensors`"),
        ("policy", f"{options.policy}, margin {options.margin:g}"),
        ("calibrated on", f"{counted['tokens']:,} tokens of {counted['documents']:,} documents ({', '.join(corpora)})"),
        ("made with", ", ".join(tools)),
    ]
    skipped = serve.get("kv_cache_dtype_skip_layers")
    if skipped:
        rows.insert(1, ("16-bit layers", f"{', '.join(map(str, skipped))}: vLLM must be told (below)"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "## FP8 KV cache\n\n"
        f"This checkpoint carries calibrated scales for an FP8 KV cache. {use.how} {_FOLDED if folded else _PLAIN}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"{_told(serve)}Digests and options are in `kv_calibration/provenance.json`.\n"
    )


def vllm_flags(serve: Mapping[str, Any]) -> str:
    """The arguments as `vllm serve` takes them."""
    return " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}" for name, value in serve.items()
    )


def _told(serve: Mapping[str, Any]) -> str:
    return f"It needs arguments that a checkpoint cannot carry: `vllm serve <this folder> {vllm_flags(serve)}`.\n\n" if serve else ""
