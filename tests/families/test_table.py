"""The support table: between its markers, and what the docs show is what the recipes say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.errors import UsageError
from calibrate.families.check import Row
from calibrate.families.table import BEGIN, END, check_target, markdown, write_table
from calibrate.recipes import all_recipes

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
ROWS = [
    Row("llama", "llama", "tensor", "loads", 9, "", 1.0),
    Row("llama", "llama", "head", "loads", 9, "", 1.0),
    Row("jamba", "jamba", "tensor", "refused", 0, "no | parameters", 1.0),
    Row("jamba", "jamba", "head", "refused", 0, "no | parameters", 1.0),
    Row("odd", "odd", "tensor", "failed", 0, "it crashed", 1.0),
]


def cells(text: str) -> list[list[str]]:
    """The table's rows: family, model type, per tensor, per head, scales, reason."""
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")][2:]


def test_a_row_a_model_type_with_a_reason_for_every_no():
    assert cells(markdown(ROWS)) == [
        ["llama", "`llama`", "yes", "yes", "9 + 9", ""],
        ["jamba", "`jamba`", "no", "no", "–", "no \\| parameters"],
        ["odd", "`odd`", "**failed**", "not checked", "–", "it crashed"],
    ]
    assert "1 model types of 1 families load, 1 refused, 1 failed; vllm" in markdown(ROWS)
    assert "0 model types of 0 families load, 1 failed; vllm" in markdown([ROWS[0], replace(ROWS[1], outcome="failed")])


def test_the_table_is_put_between_the_markers_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(ROWS, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    write_table(ROWS, page)
    assert page.read_text() == text
    write_table(ROWS, tmp_path / "new.md")
    assert cells((tmp_path / "new.md").read_text()) == cells(text)


def test_a_page_without_markers_is_refused_and_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(UsageError, match="no place for the table"):
        write_table(ROWS, page)
    with pytest.raises(UsageError, match="no place for the table"):
        check_target(page)
    assert page.read_text() == f"{END}\n{BEGIN}\n"


def test_the_docs_table_says_what_the_recipes_say():
    shown = cells(DOCS.read_text(encoding="utf-8"))
    recipes = all_recipes()
    types = [(name, kind) for name, one in recipes.items() for kind in one.model_types]
    assert [(row[0], row[1].strip("`")) for row in shown] == types, "`make families` writes the table anew"
    for family, kind, tensor, head, _, reason in shown:
        if tensor == head == "not checked":
            assert recipes[family].needs[kind.strip("`")] in reason
            continue
        expected = ("yes", "yes", "") if recipes[family].support == "vllm" else ("no", "no", recipes[family].reason)
        assert (tensor, head, reason.replace("\\|", "|")) == expected, family
    assert sum(row[2] == row[3] == "yes" for row in shown) >= 25
    assert re.search(r"; vllm\S* [\d.]+, transformers [\d.]+\.$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
