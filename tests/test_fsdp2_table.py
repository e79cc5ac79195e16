"""docs/fsdp2_tests.md: every test it names is there, and its counts are those of its tables."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "fsdp2_tests.md").read_text()
CITED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
KINDS = {"does not apply: ": "do not apply", "not covered": "are not covered", "`tests/": "are covered"}


def rows() -> list[list[str]]:
    """The cells of every line of a table but heads and rules."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if cells[-1] != "here"]


@cache
def functions(path: str) -> set[str]:
    file = ROOT / path
    return (
        {f.name for f in ast.parse(file.read_text()).body if isinstance(f, ast.FunctionDef)} if file.exists() else set()
    )


def missing(text: str) -> list[str]:
    """The tests that `text` names and nobody has."""
    return sorted({f"{path}::{name}" for path, name in CITED.findall(text) if name not in functions(path)})


def kind(cell: str) -> str | None:
    return next((kind for start, kind in KINDS.items() if cell.startswith(start)), None)


def test_every_test_named_exists():
    assert missing(PAGE) == []
    assert PAGE.count("::") == len(CITED.findall(PAGE)) > 100


def test_a_test_that_is_gone_is_told():
    text = "`tests/test_fsdp2_table.py::rows`, `tests/test_fsdp2_table.py::gone`, `tests/gone.py::rows`"
    assert missing(text) == ["tests/gone.py::rows", "tests/test_fsdp2_table.py::gone"]


def test_every_line_says_where_its_behaviour_is_checked_or_why_not():
    assert [cells for cells in rows() if len(cells) != 3 or kind(cells[2]) is None] == []


def test_the_counts_are_those_of_the_tables():
    counts = Counter(kind(cells[2]) for cells in rows())
    told = {
        words: int(number) for number, words in re.findall(r"(\d+) (are covered|do not apply|are not covered)", PAGE)
    }
    assert told == counts
