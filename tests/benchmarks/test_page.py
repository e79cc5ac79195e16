"""docs/benchmarks.md: its tables are those of the results that are committed."""

import math

import pytest

from benchmarks import suite


def test_the_tables_are_those_of_the_results() -> None:
    text = suite.PAGE.read_text()
    for name, table in suite.tables(suite.results()).items():
        begin, end = suite.marks(name)
        assert text.partition(begin)[2].partition(end)[0] == table + "\n", (
            f"`python -m benchmarks.suite --page`: {name}"
        )


def test_the_picture_is_of_the_results() -> None:
    assert suite.PICTURE.read_text() == suite.picture(suite.results())


def test_every_result_says_on_what_it_was_measured() -> None:
    found = suite.results()
    assert found
    for result in found.values():
        assert result["machine"]["torch"] and result["machine"]["processor"] and result["machine"]["commit"]


def test_a_goal_is_met_or_missed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    goals = (
        suite.Goal("at most", "a", ("ratios", "x"), 0.5),
        suite.Goal("at least", "a", ("overlap",), 0.95, least=True),
        suite.Goal("beside", "a", ("overlap",), math.inf),
        suite.Goal("gone", "b", ("overlap",), 1.0),
        suite.Goal("compile", "c", ("96", "after capture"), 3.0),
    )
    monkeypatch.setattr(suite, "GOAL_LINES", goals)
    compiled = {"rows": [{"layers": 96, "seconds": {"capture": 9.0, "passes": 1.0, "verify": 2.5}}]}
    for x, overlap, words in ((0.5, 0.95, ["met", "met"]), (0.51, 0.94, ["**missed**", "**missed**"])):
        lines = suite.goals_table({"a": {"ratios": {"x": x}, "overlap": overlap}, "c": compiled}).splitlines()[2:]
        assert [line.split(" | ")[3].strip(" |") for line in lines] == [*words, "", "", "**missed**"]
        assert "not measured" in lines[3] and "3.500" in lines[4]
