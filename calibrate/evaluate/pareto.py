"""What may be said of a format from what was measured, and which formats no other beats: pure functions of results."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from calibrate.evaluate.results import SIXTEEN_BIT, Fidelity
from calibrate.evaluate.spectrum_result import FormatRow, Hits, Verdict

_NOTHING = 1e-5  # nats a token: less counts as no difference


class SpectrumBounds(BaseModel):
    """What "production" and "pilot" ask for. The stricter ones are the default gate policy's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    production_kl: float = Field(0.03, gt=0, description="upper end of the interval of mean KL to the 16-bit cache, nats a token")
    production_ratio: float = Field(1.03, gt=1, description="upper end of the interval of the perplexity ratio")
    production_recall: float = Field(
        0.95, gt=0, le=1, description="needles and problems solved, of those that the 16-bit cache solves, which are `least_hits` or more"
    )
    pilot_kl: float = Field(0.15, gt=0)
    pilot_ratio: float = Field(1.10, gt=1)
    significance: float = Field(0.05, gt=0, lt=1, description="of McNemar's test that needles or problems were lost")
    least_hits: int = Field(8, ge=1, description="questions that the 16-bit cache answers right, without which none lost says nothing")


def judge(
    fidelity: Fidelity, served_as: str | None, needles: Hits | None, problems: Hits | None, bounds: SpectrumBounds
) -> tuple[Verdict, list[str]]:
    """A verdict and what it rests on.

    "production": within the strict bounds, nearly all needles solved that the 16-bit cache solves, which are enough, nearly all problems where they
    are enough, and a released vLLM serves it.
    "pilot": within the wide bounds and nothing lost beyond chance; or production in all but a vLLM that serves it or enough questions.
    "no": anything else.
    """
    kl, ratio = fidelity.kl_mean, fidelity.perplexity_ratio
    figures = f"KL {kl.value:.2g} (to {kl.high:.2g}), perplexity ratio {ratio.value:.4f} (to {ratio.high:.4f})"
    lost: list[str] = []
    untold: dict[str, str] = {}
    for name, hits in (("needles", needles), ("problems", problems)):
        if hits is not None and hits.p_worse < bounds.significance:
            lost.append(f"{name}: {hits.hits} of {hits.asked}, {hits.lost} lost and {hits.won} won against 16 bits (McNemar p = {hits.p_worse:.2g})")
        elif hits is None or hits.sixteen_bit < bounds.least_hits:
            few = f"fewer than {bounds.least_hits}, too few to tell"
            untold[name] = f"{name}: {hits.hits} of {hits.asked}, the 16-bit cache {hits.sixteen_bit}: {few}" if hits else f"{name}: not asked"
    if lost or kl.high > bounds.pilot_kl or ratio.high > bounds.pilot_ratio:
        wide = (
            []
            if kl.high <= bounds.pilot_kl and ratio.high <= bounds.pilot_ratio
            else [f"{figures}: beyond {bounds.pilot_kl:g} or {bounds.pilot_ratio:g}"]
        )
        return "no", [*wide, *lost]
    missing = []
    if kl.high > bounds.production_kl or ratio.high > bounds.production_ratio:
        missing.append(f"{figures}: beyond {bounds.production_kl:g} or {bounds.production_ratio:g}")
    if "needles" in untold:
        missing.append(untold["needles"])
    for name, hits in (("needles", needles), ("problems", problems)):
        if hits is not None and bounds.least_hits <= hits.sixteen_bit and hits.hits < bounds.production_recall * hits.sixteen_bit:
            missing.append(f"{name}: {hits.hits} of {hits.asked}, the 16-bit cache {hits.sixteen_bit}: below {bounds.production_recall:.0%} of that")
    if served_as is None:
        missing.append("no released vLLM serves it")
    return ("pilot", missing) if missing else ("production", [figures, *untold.values()])


def front(rows: Sequence[FormatRow]) -> tuple[str, ...]:
    """Variants that no other beats in bytes and mean KL at once, the largest first."""
    found = [row for row in rows if not any(_beats(other, row) for other in rows)]
    return tuple(row.variant for row in sorted(found, key=lambda row: -row.bytes_per_token))


def _beats(one: FormatRow, other: FormatRow) -> bool:
    here, there = ((row.bytes_per_token, max(row.fidelity.kl_mean.value, _NOTHING)) for row in (one, other))
    return here != there and here[0] <= there[0] and here[1] <= there[1]


def recommend(rows: Sequence[FormatRow]) -> str:
    """One sentence: the smallest format for production, and the smallest worth a pilot below it."""
    sixteen = next(row.bytes_per_token for row in rows if row.variant == SIXTEEN_BIT)

    def smallest(verdict: Verdict) -> FormatRow | None:
        return min((row for row in rows if row.verdict == verdict), key=lambda row: row.bytes_per_token, default=None)

    def named(row: FormatRow) -> str:
        return f"{row.variant} ({sixteen / row.bytes_per_token:.2f} times smaller than 16 bits)"

    ready, pilot = smallest("production"), smallest("pilot")
    first = f"Production: {named(ready)}." if ready else "Production: keep 16 bits; no smaller format passed."
    if pilot is None or (ready is not None and pilot.bytes_per_token >= ready.bytes_per_token):
        return f"{first} Nothing smaller is worth a pilot on this evidence."
    return f"{first} Pilot: {named(pilot)}; {'; '.join(pilot.reasons)}."
