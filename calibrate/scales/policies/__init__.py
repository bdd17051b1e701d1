"""Scale policies: from counted magnitudes to one scale a row. A new one is a file here and a line in `POLICIES` (docs/extending.md)."""

from calibrate.scales.policies.amax import amax
from calibrate.scales.policies.base import Policy, PolicyOptions
from calibrate.scales.policies.mse import mse
from calibrate.scales.policies.percentile import percentile
from calibrate.scales.policies.pow2 import pow2

POLICIES: dict[str, Policy] = {"amax": amax, "mse": mse, "percentile": percentile, "pow2": pow2}

__all__ = ["POLICIES", "Policy", "PolicyOptions"]
