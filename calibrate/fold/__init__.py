"""Folding: another set of weights for the same function, whose keys and queries lie where FP8 rounds them least. Costs nothing at run time."""

from calibrate.fold.artefact import SWITCHES, Fold, LayerFold, parse_switches
from calibrate.fold.carrier import check_fold, discard_folded, folded
from calibrate.fold.job import FoldResult, fold_checkpoint

__all__ = [
    "SWITCHES",
    "Fold",
    "FoldResult",
    "LayerFold",
    "check_fold",
    "discard_folded",
    "fold_checkpoint",
    "folded",
    "parse_switches",
]
