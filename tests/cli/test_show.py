"""`fxshard show`: what it writes is the traced schedule, however the model and its inputs are named."""

import re

import pytest
import torch

import fxshard
from examples import models as examples
from fxshard import passes, viz
from fxshard.cli import main, output
from tests.cli import models

HERE = "tests.cli.models"


def traced(model: torch.nn.Module, inputs, F: int = 2, **options) -> fxshard.Schedule:
    return fxshard.trace(model, inputs, F, **options)


@pytest.fixture
def shown(capsys):
    """Run `fxshard show` with these words and return what it prints; nothing else is printed."""

    def show(*words: str) -> str:
        assert main(["show", *words]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return show


@pytest.fixture
def refused(capsys):
    """Run `fxshard show` with these words and return its one line of error."""

    def show(*words: str) -> str:
        assert main(["show", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("fxshard: error: ")
        return line.removeprefix("fxshard: error: ")

    return show


CHAIN = traced(models.chain(), torch.zeros(4, 8)).text()


@pytest.mark.parametrize(
    "words",
    [
        (f"{HERE}:chain",),
        (f"{HERE}:with_inputs",),
        (f"{HERE}:ready", "--inputs", f"{HERE}:chain_inputs"),
        (f"{HERE}:without_inputs", "--inputs", f"{HERE}:chain_inputs"),
        (f"{HERE}:Owner.make", "--inputs", f"{HERE}:chain_inputs"),
        (f"{HERE}:chain{{width=8}}", "--world", "2"),
    ],
)
def test_every_way_to_name_a_model_and_its_inputs_gives_the_traced_schedule(shown, words):
    assert shown(*words, "--F", "2") == f"{CHAIN}\n"


def test_the_inputs_asked_for_win_over_those_beside_the_factory(shown):
    wide = traced(models.chain(16), torch.zeros(2, 16))
    assert shown(f"{HERE}:chain{{width=16}}", "--inputs", f"{HERE}:wide_inputs", "--F", "2") == f"{wide.text()}\n"


def test_factories_with_a_device_argument_need_none(shown):
    expected = traced(examples.encoder_decoder_small("meta"), examples.encoder_decoder_small_inputs(2, "meta"), 4, W=8)
    words = ("examples.models:encoder_decoder_small", "--batch", "2", "--F", "4", "--world", "8")
    assert shown(*words, "--level", "all") == f"{expected.text('all')}\n"


def test_nothing_is_allocated(shown):
    assert "4 TiB" not in shown(f"{HERE}:on_meta", "--F", "4", "--level", "units")


def test_levels(shown):
    schedule = traced(models.chain(), torch.zeros(4, 8))
    for level in ("units", "communication", "all"):
        assert shown(f"{HERE}:chain", "--F", "2", "--level", level) == f"{schedule.text(level)}\n"


# -- options and passes


def test_options_are_those_of_compile(shown):
    expected = traced(
        models.chain(), torch.zeros(4, 8), rate_limit=1, units=["blocks.*"], keep_root_resident=False,
        mixed_precision=fxshard.MixedPrecision(
            param=torch.bfloat16, reduce=torch.float32, cast_forward_inputs=False, full_precision="head"
        ),
    )  # fmt: skip
    sets = ["rate_limit=1", "units=['blocks.*']", "keep_root_resident=False"]
    sets += ["mixed_precision.param=bfloat16", "mixed_precision.reduce=torch.float32"]
    sets += ["mixed_precision.cast_forward_inputs=False", "mixed_precision.full_precision=head"]
    words = [word for text in sets for word in ("--set", text)]
    assert shown(f"{HERE}:chain", "--F", "2", *words) == f"{expected.text()}\n"


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("units=torch.nn:Linear", torch.nn.Linear),
        ("units=fxshard:BytesOfFirstUse{num_bytes=300}", fxshard.BytesOfFirstUse(300)),
        ("units=blocks.*", "blocks.*"),
    ],
)
def test_units_by_class_by_bytes_and_by_pattern(shown, text, units):
    expected = traced(models.chain(), torch.zeros(4, 8), units=units)
    assert shown(f"{HERE}:chain", "--F", "2", "--set", text) == f"{expected.text()}\n"


def test_a_pass_stands_for_the_default_one_of_its_name(shown):
    def deeper(default: list[passes.Pass]) -> list[passes.Pass]:
        return [passes.BackwardPrefetch(2) if p.name == "backward-prefetch" else p for p in default]

    expected = traced(models.chain(), torch.zeros(4, 8), passes=deeper, rate_limit=None)
    words = ("--pass", "backward-prefetch{depth=2}", "--set", "rate_limit=None")
    found = shown(f"{HERE}:chain", "--F", "2", *words)
    assert found == f"{expected.text()}\n"
    assert "backward-prefetch{depth=2}" in found and "depth=1" in found  # forward-overlap's


def test_a_pass_of_ones_own_goes_before_plan_memory(shown):
    expected = traced(models.chain(), torch.zeros(4, 8), passes=[models.NoOp(3), models.NoOp()])
    words = ("--pass", f"{HERE}:NoOp{{times=3}}", "--pass", f"{HERE}:NoOp")
    found = shown(f"{HERE}:chain", "--F", "2", *words)
    assert found == f"{expected.text()}\n"
    assert "# no-op{times=3}\n# no-op{times=1}\n# plan-memory" in found


def test_a_pass_that_breaks_the_schedule_is_a_finding(capsys):
    assert main(["show", f"{HERE}:chain", "--F", "2", "--pass", f"{HERE}:EarlyFrees"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fxshard: error: used_only_while_gathered:")
    assert "early-frees, pass 8 of 9; the schedule was valid before it" in printed.err


# -- formats


def test_a_picture_is_the_one_that_render_draws(shown, tmp_path):
    def drawn(stem: str, suffix: str) -> bytes:  # without the seconds that passes took
        return re.sub(rb'"seconds":[^,}]+', b"", (tmp_path / f"{stem}{suffix}").read_bytes())

    for suffix in (".svg", ".html", ".perfetto.json", ".trace.json", ".dot", ".png"):  # others need Graphviz
        traced(models.chain(), torch.zeros(4, 8)).render(str(tmp_path / f"expected{suffix}"))
        assert shown(f"{HERE}:chain", "--F", "2", "-o", str(tmp_path / f"x{suffix}")) == ""
        assert drawn("x", suffix) == drawn("expected", suffix)


def test_a_picture_without_a_file_goes_to_stdout(shown, tmp_path):
    traced(models.chain(), torch.zeros(4, 8)).render(str(tmp_path / "x.svg"))
    assert shown(f"{HERE}:chain", "--F", "2", "--format", "svg") == (tmp_path / "x.svg").read_text()


def test_the_format_follows_the_suffix_and_format_serves_a_file_without_one(shown, tmp_path):
    shown(f"{HERE}:chain", "--F", "2", "-o", str(tmp_path / "x.txt"))
    shown(f"{HERE}:chain", "--F", "2", "--format", "text", "-o", str(tmp_path / "listing"))
    assert (tmp_path / "x.txt").read_text() == (tmp_path / "listing").read_text() == f"{CHAIN}\n"


def test_a_saved_schedule_is_shown_as_it_was_traced(shown, tmp_path):
    saved = tmp_path / "step.json"
    shown(f"{HERE}:chain", "--F", "2", "-o", str(saved))
    assert shown(str(saved)) == f"{CHAIN}\n"
    assert shown(f"{HERE}:chain", "--F", "2", "--format", "json") == saved.read_text()


def test_every_format_has_a_name_and_a_suffix_of_its_own():
    formats = output.formats()
    assert len(set(formats.values())) == len(formats) == 2 + len(viz.FORMATS)
    assert all(output.choose(None, f"a.b{suffix}") == name for name, suffix in formats.items())


# -- errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (f"{HERE}:without_inputs", "--F", "2"),
            "no example inputs for tests.cli.models:without_inputs: define without_inputs_",
        ),
        ((f"{HERE}:no_model", "--F", "2"), "tests.cli.models:no_model returned str; an nn.Module was expected"),
        ((f"{HERE}:HERE", "--F", "2"), "module 'tests.cli.models' has no 'HERE'"),
        ((f"{HERE}:chian", "--F", "2"), "module 'tests.cli.models' has no 'chian'; did you mean 'chain'?"),
        ((f"{HERE}:Owner.mak", "--F", "2"), "module 'tests.cli.models' has no 'Owner.mak'; did you mean 'make'?"),
        ((f"{HERE}:dataclass", "--F", "2"), "tests.cli.models:dataclass returned function"),
        (
            (f"{HERE}:fails", "--F", "2"),
            "calling tests.cli.models:fails failed: RuntimeError: no such weights (--debug",
        ),
        ((f"{HERE}:chain{{size=3}}", "--F", "2"), "calling tests.cli.models:chain{size=3} failed: TypeError"),
        ((f"{HERE}:chain{{3}}", "--F", "2"), "'tests.cli.models:chain{3}': {option=value, ...} was expected"),
        ((f"{HERE}:chain{{width=8", "--F", "2"), "'tests.cli.models:chain{width=8': NAME or NAME{option=value, ...}"),
        ((f"{HERE}:chain{{width=}}", "--F", "2"), "'tests.cli.models:chain{width=}': "),
        (
            (f"{HERE}:chain", "--F", "2", "--length", "9"),
            "tests.cli.models:chain_inputs takes no 'length': leave out --length",
        ),
        (
            (f"{HERE}:with_inputs", "--F", "2", "--batch", "9"),
            "tests.cli.models:with_inputs makes its inputs itself: leave out",
        ),
        (
            ("no_such_module:chain", "--F", "2"),
            "there is no module 'no_such_module': it has to be installed, or to lie in",
        ),
        (("tests.cli.missing:chain", "--F", "2"), "there is no module 'tests.cli.missing'"),
        (("chain", "--F", "2"), "'chain': MODULE:NAME was expected, such as examples.models:gpt_demo"),
        (
            ("tests/cli/models.py:chain", "--F", "2"),
            "'tests/cli/models.py:chain': a module was expected, not a file; from",
        ),
        (
            (f"{HERE}:chain",),
            "--F is missing: how many ranks share one copy of the parameters of tests.cli.models:chain",
        ),
        (
            (f"{HERE}:chain", "--F", "3", "--world", "8"),
            "F=3 does not divide the world size W=8; allowed are 1, 2, 4, 8",
        ),
        ((f"{HERE}:chain", "--F", "two"), "argument --F: invalid int value: 'two' (see fxshard show --help)"),
        (
            (f"{HERE}:chain", "--F", "2", "--batch", "0"),
            "argument --batch: 0 is not a positive number (see fxshard show",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "rate_limt=1"),
            "fxshard.trace got unknown option 'rate_limt'. Did you mean",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "rate_limit"),
            "'rate_limit': NAME=VALUE was expected, such as rate_limit=1",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "rate_limit=0"),
            "rate_limit=0: a positive number or None (no limit) was",
        ),
        ((f"{HERE}:chain", "--F", "2", "--set", "rate_limit.x=0"), "'rate_limit.x=0': 'rate_limit' has no parts; only"),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "mixed_precision.param=int8"),
            "MixedPrecision(param=torch.int8): a floating",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "mixed_precision.p=float16"),
            "mixed_precision has no 'p': allowed are param,",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "--set", "units=torch.nn:Lnear"),
            "module 'torch.nn' has no 'Lnear'; did you mean",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "-o", "x.gif"),
            "-o x.gif: the suffix says no format; allowed are .txt, .json, .svg",
        ),
        (
            (f"{HERE}:chain", "--F", "2", "-o", "x.svg", "--format", "text"),
            "-o x.svg: the suffix says svg and --format text;",
        ),
        ((f"{HERE}:chain", "--F", "2", "-o", "no/such/x.svg"), "-o no/such/x.svg: there is no folder 'no/such'"),
        (
            (f"{HERE}:chain", "--F", "2", "-o", "x.svg", "--level", "all"),
            "--level is of the text, not of svg: leave it out",
        ),
        (("no_such.json",), "there is no file 'no_such.json'"),
        (
            ("x.json", "--F", "2", "--set", "a=1"),
            "x.json is a saved schedule, which is not traced again: leave out --F, --set",
        ),
    ],
)
def test_errors_are_one_line_with_a_way_out(refused, words, expected):
    assert refused(*words).startswith(expected)


def test_what_is_wrong_inside_the_named_module_is_said(refused, tmp_path, monkeypatch):
    (tmp_path / "lacks_something.py").write_text("import what_it_lacks\n")
    (tmp_path / "is_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)  # which also shows that the current directory is searched
    assert refused("lacks_something:f", "--F", "2") == (
        "importing 'lacks_something' failed: ModuleNotFoundError: No module named 'what_it_lacks'"
    )
    assert refused("is_broken:f", "--F", "2") == "importing 'is_broken' failed: ZeroDivisionError: division by zero"


def test_a_file_that_holds_no_schedule_is_refused(refused, tmp_path):
    for text in ("", "{}", "[1]", '{"model_type": "llama"}'):
        (tmp_path / "x.json").write_text(text)
        assert "x.json' holds no schedule as `fxshard show -o" in refused(str(tmp_path / "x.json"))


def test_a_model_that_cannot_be_captured_is_said_with_its_line(capsys):
    assert main(["show", f"{HERE}:uncapturable", "--F", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fxshard: error: forward of Uncapturable could not be captured whole")
    assert "models.py" in error and "in branching" in error and "Traceback" not in error


@pytest.mark.full
def test_gpt_175b(shown):
    text = shown("examples.models:gpt_175b", "--F", "128", "--world", "128")
    assert text.startswith("schedule  W=128  F=128  replicas=1\n")
    assert text.count("  AG     blocks.") == 2 * 96 and text.count("  RS     blocks.") == 96
