"""The registry of low-bit formats: one line each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from calibrate.errors import UsageError
from calibrate.kvarn import KVarNTables
from calibrate.lowbit.additive import Codebooks, additive
from calibrate.lowbit.base import LowBitFormat
from calibrate.lowbit.fp8 import Fp8, Fp8PerTokenHead
from calibrate.lowbit.gear import gear
from calibrate.lowbit.integer import Int4PerTokenHead, Int8PerTokenHead
from calibrate.lowbit.kivi import kivi
from calibrate.lowbit.kvarn import Uses, kvarn
from calibrate.lowbit.turboquant import turboquant
from calibrate.lowbit.turboquant_paper import turboquant_paper
from calibrate.scales import Scales


@dataclass(frozen=True)
class Offline:
    """What was measured or fitted beforehand; formats take what they need.

    Attributes:
        scales: of FP8; none means scale 1.0. tables: of KVarN. codebooks: of additive quantization.
    """

    scales: Scales | None = None
    tables: KVarNTables | None = None
    codebooks: Codebooks | None = None


def _fp8(number_format: str, offline: Offline) -> LowBitFormat:
    scales = offline.scales
    if scales is not None and scales.options.number_format != number_format:
        raise UsageError(f"fp8_{number_format} cannot use scales that were solved for {scales.options.number_format}")
    digest = None if scales is None else scales.digest()
    return Fp8(name=f"fp8_{number_format}", source="vLLM FLASH_ATTN and TRITON_ATTN", number_format=number_format, scales=scales, digest=digest)


_PER_TOKEN = "vLLM 0.32, TRITON_ATTN (triton_reshape_and_cache_flash.py, int4_per_token_head.py)"

FORMATS: dict[str, Callable[[Offline], LowBitFormat]] = {
    "fp8_e4m3": lambda offline: _fp8("e4m3", offline),
    "fp8_e5m2": lambda offline: _fp8("e5m2", offline),
    "fp8_per_token_head": lambda offline: Fp8PerTokenHead(name="fp8_per_token_head", source=_PER_TOKEN),
    "int8_per_token_head": lambda offline: Int8PerTokenHead(name="int8_per_token_head", source=_PER_TOKEN),
    "int4_per_token_head": lambda offline: Int4PerTokenHead(name="int4_per_token_head", source=_PER_TOKEN),
    "kivi_4bit": lambda offline: kivi(4),
    "kivi_2bit": lambda offline: kivi(2),
    "gear_4bit": lambda offline: gear(4, None),
    "gear_2bit": lambda offline: gear(2, 64),
    "turboquant_k8v4": lambda offline: turboquant("k8v4", 8, 4),
    "turboquant_4bit_nc": lambda offline: turboquant("4bit_nc", 4, 4),
    "turboquant_k3v4_nc": lambda offline: turboquant("k3v4_nc", 3, 4),
    "turboquant_3bit_nc": lambda offline: turboquant("3bit_nc", 3, 3),
    "turboquant_paper_4bit": lambda offline: turboquant_paper(4),
    "turboquant_paper_3bit": lambda offline: turboquant_paper(3),
    "turboquant_paper_2bit": lambda offline: turboquant_paper(2),
    "additive": lambda offline: additive(offline.codebooks),
}
for _key_bits, _value_bits in ((4, 4), (4, 2), (2, 2)):
    for _group in (128, 64):
        for _uses in get_args(Uses):
            _name = f"kvarn_k{_key_bits}v{_value_bits}_g{_group}" + (f"+{_uses}" if _uses else "")
            FORMATS[_name] = lambda offline, setting=(_key_bits, _value_bits, _group, _uses): kvarn(*setting, offline.tables)


def make_format(name: str, offline: Offline | None = None) -> LowBitFormat:
    """A format of the registry over what was fitted beforehand.

    Raises:
        UsageError: no such format, or it needs tables or codebooks that were not given.
    """
    if name not in FORMATS:
        raise UsageError(f"no low-bit format is called {name!r}: choose from {', '.join(FORMATS)}")
    return FORMATS[name](offline or Offline())
