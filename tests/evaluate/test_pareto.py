"""What is said of a format from what was measured."""

import pytest

from calibrate.evaluate.pareto import SpectrumBounds, front, judge, recommend
from calibrate.evaluate.spectrum_result import Hits
from tests.evaluate.spectrum_rows import fidelity, row

BOUNDS = SpectrumBounds()
ENOUGH = Hits(hits=38, asked=40, lost=2, won=1, p_worse=0.5)  # the 16-bit cache solved 39
FEW = Hits(hits=3, asked=40, lost=0, won=0, p_worse=1.0)
SOME = Hits(hits=6, asked=12, lost=4, won=1, p_worse=0.19)
ALL_OF_FEW = Hits(hits=0, asked=12, lost=6, won=0, p_worse=0.0156)
ONE_LOST = Hits(hits=0, asked=48, lost=1, won=0, p_worse=0.5)  # the only one that 16 bits solved
LOST = Hits(hits=20, asked=40, lost=19, won=0, p_worse=2e-6)


@pytest.mark.parametrize(
    ("given", "served", "needles", "problems", "verdict", "says"),
    [
        (fidelity(0.01), "fp8", ENOUGH, ENOUGH, "production", "KL 0.01"),
        (fidelity(0.01), "fp8", ENOUGH, FEW, "production", "problems: 3 of 40, the 16-bit cache 3: fewer than 8"),
        (fidelity(0.01), "fp8", ENOUGH, ONE_LOST, "production", "problems: 0 of 48, the 16-bit cache 1: fewer than 8"),
        (fidelity(0.01), "fp8", FEW, ENOUGH, "pilot", "needles: 3 of 40, the 16-bit cache 3: fewer than 8"),
        (fidelity(0.01), "fp8", None, None, "pilot", "needles: not asked"),
        (fidelity(0.01), None, ENOUGH, ENOUGH, "pilot", "no released vLLM"),
        (fidelity(0.01), "fp8", SOME, ENOUGH, "pilot", "6 of 12, the 16-bit cache 9"),  # not beyond chance, but too many to wave through
        (fidelity(0.05), "fp8", ENOUGH, ENOUGH, "pilot", "beyond 0.03"),
        (fidelity(0.02, kl_high=0.04), "fp8", ENOUGH, ENOUGH, "pilot", "(to 0.04)"),  # the interval decides, not the value
        (fidelity(0.01, 1.05), "fp8", ENOUGH, ENOUGH, "pilot", "1.0500"),
        (fidelity(0.2), "fp8", ENOUGH, ENOUGH, "no", "beyond 0.15"),
        (fidelity(0.01, 1.2), "fp8", ENOUGH, ENOUGH, "no", "1.2000"),
        (fidelity(0.01), "fp8", LOST, ENOUGH, "no", "19 lost"),
        (fidelity(0.01), "fp8", ENOUGH, LOST, "no", "problems: 20 of 40"),
        (fidelity(0.01), "fp8", ALL_OF_FEW, None, "no", "6 lost"),  # few were found, and all of them lost
        (fidelity(0.2), "fp8", LOST, ENOUGH, "no", "needles"),
    ],
)
def test_verdicts_and_what_they_rest_on(given, served, needles, problems, verdict, says):
    found, reasons = judge(given, served, needles, problems, BOUNDS)
    assert found == verdict
    assert any(says in text for text in reasons), reasons


def test_few_answers_are_counted_by_what_the_16_bit_cache_solved():
    """A format that lost all of 12 needles is judged, though it has no hit itself."""
    found, reasons = judge(fidelity(0.01), "fp8", Hits(hits=0, asked=20, lost=12, won=0, p_worse=2.4e-4), None, BOUNDS)
    assert (found, len(reasons)) == ("no", 1)


def test_the_front_leaves_out_what_another_beats():
    rows = [row("16-bit", 100, 0.0), row("a", 50, 0.01), row("worse", 50, 0.02), row("larger", 60, 0.01), row("b", 25, 0.3), row("same", 25, 0.3)]
    assert front(rows) == ("16-bit", "a", "b", "same")
    nothing = [row("16-bit", 100, 0.0), row("as good", 50, 9e-6), row("larger and no better", 60, 2e-6)]
    assert front(nothing) == ("as good",)


def test_the_recommendation_names_the_smallest_of_each():
    rows = [row("16-bit", 100, 0.0, "reference"), row("fp8", 50, 0.01, "production"), row("p", 25, 0.05, "pilot", ("why",)), row("n", 10, 1, "no")]
    assert recommend(rows) == "Production: fp8 (2.00 times smaller than 16 bits). Pilot: p (4.00 times smaller than 16 bits); why."
    assert "Nothing smaller" in recommend([rows[0], rows[1], row("q", 60, 0.01, "pilot")])
    assert recommend([rows[0], rows[3]]).startswith("Production: keep 16 bits")
