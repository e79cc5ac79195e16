"""`fxshard verify`, `diff` and `passes`."""

import dataclasses
import re

import pytest

import fxshard
from fxshard import passes
from fxshard.cli import main
from fxshard.options import Options
from tests.cli.models import chain, chain_inputs

CHAIN = "tests.cli.models:chain"


@pytest.fixture
def saved(tmp_path, capsys) -> str:
    path = str(tmp_path / "step.json")
    assert main(["show", CHAIN, "--F", "2", "-o", path]) == 0
    return path


# -- verify


def test_a_traced_schedule_is_valid(capsys):
    assert main(["verify", CHAIN, "--F", "2", "--world", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid: W=4 F=2, 4 units; forward 4 AG; backward 2 AG 4 RS 4 AR; ")


def test_a_saved_schedule_is_valid(saved, capsys):
    assert main(["verify", saved]) == 0
    assert capsys.readouterr().out.startswith("valid: W=2 F=2, 4 units; ")


def test_a_saved_schedule_that_breaks_a_rule_is_a_finding(saved, tmp_path, capsys):
    """The file is of a schedule whose first FREE was moved up, past the operators that read what it frees."""
    with open(saved) as file:
        schedule = fxshard.Schedule.from_json(file.read())
    free = schedule.forward.frees[0]
    free.args[0].append(free)
    broken = tmp_path / "broken.json"
    broken.write_text(schedule.to_json())
    assert main(["verify", str(broken)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "used_only_while_gathered" in printed.err and "Traceback" not in printed.err


def test_a_pass_that_breaks_a_rule_is_a_finding(capsys):
    assert main(["verify", CHAIN, "--F", "2", "--pass", "tests.cli.models:EarlyFrees"]) == 1
    assert "after   early-frees, pass 8 of 9" in capsys.readouterr().err


# -- diff


def test_equal_schedules_are_equal_from_file_and_model(saved, capsys):
    for words in ([saved, saved], [saved, CHAIN, "--F", "2"], [CHAIN, CHAIN, "--F", "2", "--set", "rate_limit=1"]):
        assert main(["diff", *words]) == 0
        assert capsys.readouterr().err == ""


def test_options_of_one_side_make_a_difference(saved, capsys):
    assert main(["diff", saved, CHAIN, "--F", "2", "--b-set", "rate_limit=1"]) == 1
    a, b = (fxshard.trace(chain(), chain_inputs(), F=2, **options) for options in ({}, {"rate_limit": 1}))
    assert capsys.readouterr().out == f"{fxshard.diff(a, b)}\n"
    sides = ["--a-pass", "backward-prefetch{depth=2}", "--b-pass", "backward-prefetch{depth=3}"]
    assert main(["diff", CHAIN, CHAIN, "--F", "2", "--set", "rate_limit=None", *sides]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^- .*backward-prefetch\{depth=2\}", out, re.M) and re.search(
        r"^\+ .*prefetch\{depth=3\}", out, re.M
    )


def test_the_difference_is_drawn_where_it_was_asked_for(saved, tmp_path, capsys):
    words = ["diff", saved, CHAIN, "--F", "2", "--b-set", "rate_limit=1", "-o", str(tmp_path / "x.svg")]
    assert main(words) == 1
    a, b = (fxshard.trace(chain(), chain_inputs(), F=2, **options) for options in ({}, {"rate_limit": 1}))
    fxshard.diff(a, b).render(str(tmp_path / "expected.svg"))
    assert (tmp_path / "x.svg").read_text() == (tmp_path / "expected.svg").read_text()


def test_options_that_no_side_can_use_are_refused(saved, capsys):
    for words in (["--F", "2"], ["--b-set", "rate_limit=1"]):
        assert main(["diff", saved, saved, *words]) == 2
        assert "is a saved schedule, which is not traced again: leave out" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_traced(capsys):
    for path, expected in (
        ("x.png", "-o x.png: a difference is drawn as .svg"),
        ("no/x.svg", "-o no/x.svg: there is no"),
    ):
        assert main(["diff", "no_module:a", "no_module:b", "-o", path]) == 2
        assert capsys.readouterr().err.startswith(f"fxshard: error: {expected}")


# -- passes


def test_passes_are_listed_in_order_with_their_contracts(capsys):
    assert main(["passes"]) == 0
    *listed, last = capsys.readouterr().out.split("\n\n")
    entries = [entry.splitlines() for entry in listed]
    assert last == f"by default: {', '.join(p.name for p in passes.default_passes(Options()))}\n"
    default = [*passes.default_passes(Options()), passes.KeepResident(), passes.DeferReduces(), passes.TakeKept()]
    assert [entry[0] for entry in entries] == [p.name for p in default]
    for entry, p in zip(entries, default):
        rows = dict(line.split(None, 1) for line in entry[2:])
        assert rows["requires"].split(", ") == list(p.requires or ["-"])
        assert rows["provides"].split(", ") == list(p.provides or ["-"])
        assert all(f"{f.name}: {f.type} = {f.default!r}" in rows["options"] for f in dataclasses.fields(p))
    assert "  Bound the units gathered and not yet freed" in entries[[p.name for p in default].index("rate-limit")][1]


def test_a_pass_by_name_says_all(capsys):
    assert main(["passes", "rate-limit"]) == 0
    out = capsys.readouterr().out
    assert (passes.rate_limit.__doc__ or "").strip() in out
    assert "  options   limit: int | None = 2, limit_bytes: int | None = None\n" in out


def test_a_pass_of_ones_own_says_what_its_class_says(capsys):
    assert main(["passes", "tests.cli.models:NoOp"]) == 0
    assert capsys.readouterr().out == (
        "no-op\n  requires  gathers-inserted\n  provides  -\n  options   times: int = 1\n\nChange nothing.\n"
    )


def test_an_unknown_pass_is_refused(capsys):
    assert main(["passes", "rate-limt"]) == 2
    assert (
        "there is no pass 'rate-limt'; did you mean 'rate-limit'? (there are insert-gathers, "
        in capsys.readouterr().err
    )
    assert main(["passes", "tests.cli.models:Chain"]) == 2
    assert (
        "tests.cli.models:Chain is not a class of passes: derive it from fxshard.passes.Pass" in capsys.readouterr().err
    )
