"""Number formats, scale policies, exact error at any scale, and the `Scales` artefact."""

from calibrate.scales.artefact import LayerScales, Scales
from calibrate.scales.error import ErrorReport, Population, report, squared_errors
from calibrate.scales.formats import FORMATS, NumberFormat
from calibrate.scales.policies import POLICIES, PolicyOptions
from calibrate.scales.solve import solve

__all__ = [
    "FORMATS",
    "POLICIES",
    "ErrorReport",
    "LayerScales",
    "NumberFormat",
    "PolicyOptions",
    "Population",
    "Scales",
    "report",
    "solve",
    "squared_errors",
]
