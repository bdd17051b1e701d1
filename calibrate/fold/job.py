"""The whole of folding: choose, check that the function stayed what it was, write."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from calibrate.checkpoint.place import check_target
from calibrate.corpus import Corpus
from calibrate.errors import CheckFailed
from calibrate.fold.apply import fold_model, round_to
from calibrate.fold.artefact import Fold, LayerFold
from calibrate.fold.choose import Predicted, choose
from calibrate.fold.parts import Parts, check_foldable, parts_of
from calibrate.fold.sample import chosen_rows, take_samples
from calibrate.fold.smooth import smooth
from calibrate.fold.write import write_folded
from calibrate.model import CacheLayout, SourceCheckpoint, cache_dtype_of, load_model, probe_layout
from calibrate.progress import note
from calibrate.statistics import CACHE_DTYPES

_CHECK_TOKENS = 1024
_SAME = {torch.float32: 1e-3}  # relative change of the logits that arithmetic alone explains
_SAME_16_BIT = 0.1


@dataclass(frozen=True)
class FoldResult:
    """A folded checkpoint on disk, and what was chosen."""

    path: Path
    fold: Fold

    def summary(self) -> str:
        """One line: what moved, what it is predicted to gain, and what rounding the weights again cost."""
        report, for_rotated = self.fold.report, "smooth" in self.fold.switches
        means = {kind: f"{entry['mean']:.2f}" for kind, entry in report["predicted"].items()}
        error = "FP8 error predicted at " + ", ".join(f"{kind} {mean}" for kind, mean in means.items())
        if for_rotated:
            error = f"noise of rotated keys in logits predicted at {report['predicted']['logits']['total']:.2f}"
        moved = ", ".join(f"{count:,} {name}" for name, count in report["moved"].items() if count)
        rounding = f"rounding the weights again moves log p by {report['rounding']['mean_abs_dlogp']:.4f}"
        if for_rotated and not report["logits_change"] and not report["rounding"]["weights"]:
            rounding = "no weight is rounded and no logit changes"
        return f"folded {moved or 'nothing'}; {error} of what it was; {rounding}"


def fold_checkpoint(
    source: SourceCheckpoint,
    corpus: Corpus,
    output: Path,
    switches: tuple[str, ...],
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
    trust: bool = False,
    force: bool = False,
) -> FoldResult:
    """Fold a plain 16-bit checkpoint: the same function, whose K and Q lose less when they are quantized. Runs about 10,000 tokens of the corpus.

    Args:
        dtype: of the computation; only float32 can check that the function is the same to the last digits.

    Raises:
        UsageError: weights or an architecture that cannot be folded, an output that may not be written.
        CheckFailed: the folded model computes something else; nothing was written.
    """
    check_target(source.path, output, force=force)
    check_foldable(source)
    model = load_model(source, device=device, dtype=dtype, trust_remote_code=trust)
    layout = probe_layout(model)
    parts = parts_of(model, layout, switches)
    rows = chosen_rows(corpus)
    cache_dtype = CACHE_DTYPES[cache_dtype_of(source)].dtype
    note(f"fold {','.join(switches)}: {sum(map(len, rows)):,} tokens of {len(rows)} rows")
    chosen = chosen_folds(model, layout, parts, rows, cache_dtype, switches)
    layers = tuple(layer for layer, _ in chosen)
    check = rows[0][:_CHECK_TOKENS][None].to(model.device)
    measured = _fold_and_measure(model, Fold(switches, layers, source.fingerprint), parts, check, cache_dtype)
    report = {"corpus": corpus.digest, "predicted": _ratios([predicted for _, predicted in chosen]), "moved": _moved(layers), **measured}
    fold = Fold(switches, layers, source.fingerprint, report)
    write_folded(source, fold, parts, output)
    return FoldResult(output, fold)


def chosen_folds(
    model: PreTrainedModel, layout: CacheLayout, parts: dict[int, Parts], rows: Sequence[torch.Tensor], store: torch.dtype, switches: tuple[str, ...]
) -> list[tuple[LayerFold, Predicted]]:
    """Run the rows (int64 [length] each), and choose each layer's fold with what it is predicted to gain. store: the cache's 16-bit type."""
    samples = take_samples(model, layout, rows, store)
    if "smooth" in switches:
        return [smooth(samples.pop(index), part) for index, part in parts.items()]
    return [choose(samples.pop(index), part, switches) for index, part in parts.items()]


def _fold_and_measure(model: PreTrainedModel, fold: Fold, parts: dict, check: torch.Tensor, store: torch.dtype) -> dict[str, Any]:
    """Fold the loaded model and compare it with what it was: exactly folded, and with its weights rounded to their type."""
    before = _logits(model, check)
    changed = fold_model(model, fold, parts)
    exact = _logits(model, check)
    change = float((exact - before).norm() / before.norm())
    limit = _SAME.get(model.dtype, _SAME_16_BIT)
    if not change <= limit:
        raise CheckFailed(f"the folded model's logits differ by {change:.2g} from the original's, {limit:g} is arithmetic: nothing was written")
    unrounded = [parameter.clone() for parameter in changed]
    round_to(changed, store)
    weights = sum(int((one != other).sum()) for one, other in zip(unrounded, changed, strict=True))
    rounded = _logits(model, check)
    truth = check[:, 1:, None].cpu()
    moved = (_log_p(rounded, truth) - _log_p(before, truth)).double()
    return {
        "logits_change": change,
        "rounding": {"weights": weights, "tokens": moved.numel(), "mean_abs_dlogp": float(moved.abs().mean()), "delta_nll": float(-moved.mean())},
    }


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float().cpu()


def _log_p(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].log_softmax(dim=-1).gather(2, truth)


def _ratios(predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Predicted error after folding over that before, of K, of Q where it counts and of both together: each layer's, their mean, and that of all
    layers' errors summed."""
    result, both = {}, all("q" in one.before for one in predicted)
    for name, kinds in ({"k": "k", "q": "q", "logits": "kq"} if both else {"logits": "k"}).items():
        errors = [[sum(side[kind] for kind in kinds) for side in (one.before, one.after)] for one in predicted]  # [layers, 2]
        by_layer = [after / before if before else 1.0 for before, after in errors]
        before, after = (sum(each) for each in zip(*errors, strict=True))
        total = after / before if before else 1.0
        result[name] = {"total": total, "mean": float(np.mean(by_layer)), "layers": [round(ratio, 4) for ratio in by_layer]}
    return result


def _moved(layers: Sequence) -> dict[str, int]:
    return {name: sum(layer.moved[name] for layer in layers) for name in ("pairs", "rest")}
