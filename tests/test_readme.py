"""README.md: every example runs and prints what the README says, and its tables are true to the code."""

import dataclasses
import re
from pathlib import Path

from fxshard import MixedPrecision, Options
from fxshard.ir import ops
from fxshard.options import COMPUTE
from tests.snippets import printed_by

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
EXAMPLES = [text for language, text in FENCES if language == "python"]
OUTPUTS = [
    following if language == "text" else ""
    for (kind, _), (language, following) in zip(FENCES, [*FENCES[1:], ("", "")])
    if kind == "python"
]


def table(heading: str) -> list[list[str]]:
    """The rows below the table head that begins with `heading`, their cells without backticks."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def test_the_first_example_is_short():
    assert len(EXAMPLES[0].splitlines()) <= 20


def test_the_examples_run_and_print_what_follows_them():
    assert printed_by(EXAMPLES) == OUTPUTS


def test_every_output_belongs_to_an_example():
    assert [text for language, text in FENCES if language == "text"] == OUTPUTS


def test_the_options_are_those_of_the_code():
    rows = {name.strip("`"): default.strip("`") for name, default, _ in table("option")}
    default = Options()
    fields = [f.name for f in dataclasses.fields(Options)]
    assert list(rows) == fields
    shown = {name: repr(getattr(default, name)) for name in fields}
    shown["mixed_precision"] = "MixedPrecision()"
    assert rows == shown
    precision = {f.name: repr(getattr(default.mixed_precision, f.name)) for f in dataclasses.fields(MixedPrecision)}
    assert precision == {name.strip("`"): value.strip("`") for name, value, _ in table("field")}
    assert COMPUTE == ("eager",), "the README says that there is nothing else"


def test_the_operations_are_those_of_the_code():
    explained = {word for row in table("operation") for word in re.findall(r"`(\w+)`", row[0])}
    assert explained == {*ops.LABELS.values(), "FWD", "GRAD"}


def test_links_and_make_targets_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)} <= targets
