"""The `quantization_config` that makes vLLM and transformers load KV scales."""

import copy
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from calibrate.errors import UsageError
from calibrate.scales import PolicyOptions

_KV_ONLY = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "ignore": [], "config_groups": {}}


def merged_quantization_config(existing: dict[str, Any], options: PolicyOptions) -> dict[str, Any]:
    """Add the KV scheme to a compressed-tensors config, all else untouched; {} becomes a config for KV scales alone.

    Raises:
        UsageError: another quantization method, or a format that the scheme cannot name (vLLM refuses fp8_e5m2 beside a scheme).
    """
    if existing and existing.get("quant_method") != "compressed-tensors":
        raise UsageError(f"KV scales go into compressed-tensors configs, not {existing.get('quant_method')}")
    if options.number_format == "e5m2":
        raise UsageError(
            "E5M2 scales cannot be written into a checkpoint: compressed-tensors' kv_cache_scheme means E4M3, and vLLM refuses fp8_e5m2 with it"
        )
    scheme = {"num_bits": 8, "type": "float", "strategy": options.strategy, "dynamic": False, "symmetric": True}
    QuantizationArgs(**scheme)  # compressed-tensors' own schema forbids unknown keys and odd values
    return {**(copy.deepcopy(existing) or dict(_KV_ONLY)), "kv_cache_scheme": scheme}
