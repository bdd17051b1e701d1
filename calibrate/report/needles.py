"""Needle recall as heatmaps, length × depth, side by side: tables that any screen, printer and screen reader can take."""

from dataclasses import dataclass

from calibrate.errors import UsageError
from calibrate.evaluate.heatmap import Recall, recall_of
from calibrate.evaluate.results import SIXTEEN_BIT, NeedleResult
from calibrate.evaluate.summary import needle_summary

# cividis at 0, ¼, ½, ¾ and 1: legible to the colour blind and in grey print
_ANCHORS = ((0, 34, 78), (67, 78, 108), (125, 124, 120), (188, 175, 111), (254, 232, 56))


@dataclass(frozen=True)
class Square:
    """One cell of a heatmap. `change` is hits less the 16-bit cache's."""

    hits: int
    asked: int
    change: int
    colour: str
    ink: str


@dataclass(frozen=True)
class Panel:
    variant: str
    total: str
    lengths: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Square, ...]], ...]  # (depth, squares)


@dataclass(frozen=True)
class Group:
    """The heatmaps of one engine, task and language."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class RecallRow:
    """One variant over all its cells."""

    variant: str
    found: str
    recall: str
    interval: str
    lost: str
    p: str


def groups(result: NeedleResult, engine: str) -> list[Group]:
    """Heatmaps by task and language, the 16-bit cache first in each."""
    pairs = sorted({(cell.task, cell.language) for each in result.variants for cell in each.cells})
    return [Group(f"{task}, {language}, {engine}", _panels(result, task, language)) for task, language in pairs]


def _panels(result: NeedleResult, task: str, language: str) -> tuple[Panel, ...]:
    cells = {each.variant: [cell for cell in each.cells if (cell.task, cell.language) == (task, language)] for each in result.variants}
    recalls = [recall_of(variant, some) for variant, some in cells.items() if some]
    recalls.sort(key=lambda recall: recall.variant != SIXTEEN_BIT)
    reference = recalls[0] if recalls[0].variant == SIXTEEN_BIT else None
    return tuple(_panel(recall, reference) for recall in recalls)


def _panel(recall: Recall, reference: Recall | None) -> Panel:
    same = reference is not None and reference.asked.shape == recall.asked.shape and (reference.asked == recall.asked).all()
    before = reference.hits if same else recall.hits
    rows = tuple(
        (f"{depth:.0%}", tuple(_square(int(h), int(a), int(h - b)) for h, a, b in zip(recall.hits[row], recall.asked[row], before[row], strict=True)))
        for row, depth in enumerate(recall.depths)
    )
    return Panel(recall.variant, f"{recall.hits.sum()}/{recall.asked.sum()}", tuple(f"{length:,}" for length in recall.lengths), rows)


def _square(hits: int, asked: int, change: int) -> Square:
    share = hits / asked if asked else 0.0
    place = min(int(share * 4), 3)
    within = share * 4 - place
    mixed = (round(a + (b - a) * within) for a, b in zip(_ANCHORS[place], _ANCHORS[place + 1], strict=True))
    return Square(hits, asked, change, "#{:02x}{:02x}{:02x}".format(*mixed), "#000" if share > 0.55 else "#fff")


def recall_rows(result: NeedleResult) -> tuple[list[RecallRow], str]:
    """One row a variant; where the variants were not asked the same, none, and why."""
    try:
        found = needle_summary(result)
    except UsageError as error:
        return [], str(error)
    return [_recall_row(row) for row in found], ""


def _recall_row(row: dict) -> RecallRow:
    share, paired = row["share"], row["against_16_bit"]
    recall, interval = f"{share['value']:.1%}", f"({share['low']:.1%} to {share['high']:.1%})"
    lost = "–" if paired is None else f"{paired['first_only']} / {paired['second_only']}"
    p = "–" if paired is None else f"{paired['second_worse']:.2g}"
    return RecallRow(row["variant"], f"{row['hits']} of {row['asked']}", recall, interval, lost, p)
