"""Heatmaps: what is counted, that files are what they say, and that differences are marked."""

import re
import struct
from itertools import product

import numpy as np
import pytest

from calibrate.engines.session import EngineInfo
from calibrate.errors import UsageError
from calibrate.evaluate.heatmap import draw, recall_of, write_heatmaps
from calibrate.evaluate.results import Cell, NeedleResult, NeedleVariant, Subject

INFO = EngineInfo(engine="transformers", version="x", attention_backend="sdpa", kv_cache_dtype="bfloat16", compute_dtype="float32", device="cpu")


def _cells(missed: set[tuple[int, float, int]], task: str = "single") -> tuple[Cell, ...]:
    asked = product((512, 4096), (0.0, 0.5, 1.0), range(2))
    same = {"task": task, "language": "en", "expected": ("x",), "output": ""}
    return tuple(
        Cell(length=length, depth=depth, needle=str(number), seed=number, hit=(length, depth, number) not in missed, **same)
        for length, depth, number in asked
    )


def _result(**missed: set) -> NeedleResult:
    variants = tuple(NeedleVariant(variant=name.replace("_", "-"), engine=INFO, cells=_cells(cells)) for name, cells in missed.items())
    subject = Subject(scales_digest="", kv_scales_sha256="", weights_fingerprint="")
    return NeedleResult(subject=subject, model="m", grid={}, variants=variants)


def _frames(svg: bytes) -> list[str]:
    return re.findall(r"stroke: (#c0392b|#1e6fd0|#ff6f61|#6cb6ff)", svg.decode())


def test_recall_is_counted():
    recall = recall_of("16-bit", _cells({(512, 0.5, 0), (4096, 1.0, 0), (4096, 1.0, 1)}))
    assert (recall.lengths, recall.depths) == ((512, 4096), (0.0, 0.5, 1.0))
    assert recall.hits.tolist() == [[2, 2], [1, 2], [2, 0]]
    assert np.all(recall.asked == 2)
    with pytest.raises(UsageError, match="no needle cells"):
        recall_of("unit", ())


@pytest.mark.parametrize(("theme", "worse", "better"), [("light", "#c0392b", "#1e6fd0"), ("dark", "#ff6f61", "#6cb6ff")])
def test_differences_are_framed(theme, worse, better):
    sixteen = {(512, 0.5, 0)}
    result = _result(**{"unit": {(512, 0.5, 0), (512, 1.0, 0), (4096, 1.0, 1)}, "calibrated": set(), "16_bit": sixteen})
    assert sorted(_frames(draw(result, theme=theme, kind="svg"))) == sorted([worse, worse, better])
    assert _frames(draw(_result(**{"16_bit": sixteen, "calibrated": sixteen}), theme=theme, kind="svg")) == []


def test_without_a_16_bit_cache_nothing_is_framed():
    assert _frames(draw(_result(unit={(512, 0.0, 0)}, calibrated=set()), kind="svg")) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bytes_are_images_and_repeatable(theme):
    result = _result(**{"16_bit": set(), "unit": {(512, 0.0, 0)}})
    png, svg = draw(result, theme=theme), draw(result, theme=theme, kind="svg")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > height > 300
    assert b"<svg" in svg
    assert b"<dc:date>" not in svg
    assert (png, svg) == (draw(result, theme=theme), draw(result, theme=theme, kind="svg"))


def test_files(tmp_path):
    result = _result(**{"16_bit": set(), "unit": set()})
    written = write_heatmaps(result, tmp_path / "maps")
    assert sorted(path.name for path in written) == sorted(
        f"niah-transformers-single-en-{theme}.{kind}" for theme in ("light", "dark") for kind in ("png", "svg")
    )
    assert all(path.stat().st_size > 1000 for path in written)
    with pytest.raises(UsageError, match="no needle cells"):
        draw(result, task="multi-key")
