"""Journals that two runs wrote, or that a kill cut short: only an unbroken beginning counts, each answer once."""

import pytest

from calibrate.errors import UsageError
from calibrate.evaluate.journal import Journal
from calibrate.evaluate.results import Problem


def _record(number: int) -> Problem:
    return Problem(task="t", number=number, expected="1", output=str(number), correct=False)


def test_two_writers_count_each_answer_once(tmp_path):
    first, second = (Journal(tmp_path / "r.json", "unit", "plan", Problem) for _ in range(2))
    assert first.open() == second.open() == []
    for number in range(3):
        first.add([_record(number)], number)
        second.add([_record(number)], number)
    first.add([_record(5)], 5)  # 3 and 4 are not there
    assert first.open() == [_record(0), _record(1), _record(2)]
    assert second.open() == [_record(0), _record(1), _record(2)]


def test_a_cut_line_and_another_plan_do_not_count(tmp_path):
    journal = Journal(tmp_path / "r.json", "unit", "plan", Problem)
    journal.open()
    journal.add([_record(0), _record(1)], 0)
    journal.path.write_bytes(journal.path.read_bytes()[:-3])
    assert journal.open() == [_record(0)]
    assert Journal(tmp_path / "r.json", "unit", "another", Problem).open() == []


def test_a_damaged_journal_is_named(tmp_path):
    journal = Journal(tmp_path / "r.json", "unit", "plan", Problem)
    journal.open()
    with journal.path.open("a") as file:
        file.write('{"number": 0}\n')
    with pytest.raises(UsageError, match="is damaged: delete it"):
        journal.open()
