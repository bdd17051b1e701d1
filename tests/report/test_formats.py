"""The comparison of formats in the report and the model card; absent where there is none, or where it is about another checkpoint."""

import base64
import re
import shutil

import pytest

from calibrate.evaluate.evidence import subject_of
from calibrate.evaluate.results import FOLDER, save
from calibrate.evaluate.spectrum_result import Hits, SpectrumResult
from calibrate.gate import Policy
from calibrate.gate.material import read_material
from calibrate.report.content import content_of
from calibrate.report.write import render_html, render_markdown
from tests.evaluate.spectrum_rows import row
from tests.gate.evidence import calibrated
from tests.tiny import tiny_checkpoint

HOSTILE = '<script>alert("x")</script>|'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    return calibrated(tiny_checkpoint(folder / "base"), folder / "calibrated")


def spectrum(checkpoint, **changed) -> SpectrumResult:
    rows = (
        row("16-bit", 1000, 0.0, "reference"),
        row("small", 250, 0.08, "pilot", (HOSTILE,)).model_copy(update={"needles": Hits(hits=7, asked=12, lost=3, won=1, p_worse=0.3)}),
        row("fp8_e4m3", 500, 0.0123, "production"),
    )
    result = SpectrumResult(
        subject=subject_of(checkpoint),
        model="m",
        corpus={"data": "builtin:code"},
        offline={},
        context=32768,
        measured_length=1024,
        rows=rows,
        front=("16-bit", "fp8_e4m3", "small"),
        left_out={"gear_2bit": HOSTILE},
        recommendation="Production: fp8_e4m3.",
    )
    return result.model_copy(update=changed)


def pages(checkpoint) -> tuple[str, str]:
    content = content_of(read_material(checkpoint), Policy(), "default")
    return render_html(content), render_markdown(content)


def test_formats_are_shown_with_their_picture_and_their_words_are_harmless(checkpoint):
    save(spectrum(checkpoint), checkpoint / FOLDER / "formats-transformers.json")
    html, card = pages(checkpoint)
    section = html.split('<section id="formats">')[1].split("</section>")[0]
    assert section.index("16-bit") < section.index("fp8_e4m3 ◆") < section.index("small ◆")  # the largest first
    assert "7 of 12" in section
    assert "0.012" in section
    assert "<script>" not in html
    picture = re.search(r"data:image/png;base64,([A-Za-z0-9+/=]+)", section)
    assert base64.b64decode(picture.group(1)).startswith(b"\x89PNG")
    assert "e4m3 | 50% | 0.012" in card
    assert "Production: fp8" in card


def test_without_a_comparison_of_this_checkpoint_there_is_no_section(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "c")
    path = tmp_path / "c" / FOLDER / "formats-transformers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    assert 'id="formats"' not in pages(tmp_path / "c")[0]
    other = subject_of(checkpoint).model_copy(update={"scales_digest": "0" * 64})
    save(spectrum(checkpoint, subject=other), path)
    html, _ = pages(tmp_path / "c")
    assert 'id="formats"' not in html
    assert "formats-transformers.json is about another checkpoint" in html
