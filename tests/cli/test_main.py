"""The command itself: help, version, processes, exit statuses, and what is said where."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fxshard
from fxshard import cli

ROOT = Path(__file__).parent.parent.parent
TEXTS = {"docs": (ROOT / "docs" / "cli.md").read_text(), "main": cli.EPILOG}
TEXTS |= {command.__name__: command.EPILOG for command in cli.COMMANDS}
LINES = [(where, line) for where, text in TEXTS.items() for line in re.findall(r"^ *(?:\$ )?(fxshard .*)$", text, re.M)]


def run(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxshard", *words]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize(("where", "line"), LINES, ids=[f"{where}:{line}" for where, line in LINES])
def test_the_examples_are_commands(where, line):
    """Nothing is run; their flags and places are right."""
    words = shlex.split(line.partition(">")[0].partition("|")[0], comments=True)
    assert cli._parser().parse_args(words[1:]).run


def test_every_command_has_examples_and_says_what_it_is(capsys):
    assert cli.main(["--help"]) == 0
    everything = capsys.readouterr().out
    for command in cli.COMMANDS:
        name = command.__name__.rpartition(".")[2]
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"fxshard {name}" in text.partition("examples:")[2]
        assert re.search(rf"^    {name} +\w", everything, re.M)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fxshard {fxshard.__version__}\n"


def test_a_process_prints_the_schedule_and_ends_with_0():
    done = run("show", "tests.cli.models:chain", "--F", "2", "--level", "units")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("schedule  W=2  F=2  replicas=1\n")


def test_a_process_ends_with_2_and_one_line_for_wrong_usage(capsys):
    done = run("shwo")
    assert (done.returncode, done.stdout) == (2, "")
    errors = [done.stderr]
    for words in ([], ["show"], ["show", "tests.cli.models:chain", "--F", "2", "--lev", "all"]):
        assert cli.main(words) == 2
        errors.append(capsys.readouterr().err)
    assert all(re.fullmatch(r"fxshard: error: .* \(see fxshard( show)? --help\)\n", error) for error in errors)


def test_the_console_script_is_the_same_command(tmp_path):
    """As an installation makes it: its own folder comes first on sys.path, and the current one is not there."""
    script = tmp_path / "fxshard"
    script.write_text("import sys\nfrom fxshard.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "show", "tests.cli.models:chain", "--F", "2", "--level", "units"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"fxshard": "fxshard.cli:main"}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["passes"], marks=pytest.mark.full),
        ["--help"],
        ["show", "tests.cli.models:chain", "--F", "2", "--format", "svg"],
    ],
)
def test_a_closed_pipe_is_quiet(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, "")


def test_only_debug_shows_a_traceback(capsys):
    words = ["show", "tests.cli.models:fails", "--F", "2"]
    assert cli.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main([*words, "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "raise RuntimeError" in error and "\nfxshard: error: calling" in error


def test_an_error_of_nobodys_is_named_by_its_class(capsys, monkeypatch):
    def fail(schedule: fxshard.Schedule, path: str, every_unit: bool) -> None:
        raise ZeroDivisionError("while drawing\nmore")

    monkeypatch.setattr(fxshard.Schedule, "renderer", staticmethod(fail))
    assert cli.main(["show", "tests.cli.models:chain", "--F", "2", "--format", "svg"]) == 2
    expected = "fxshard: error: ZeroDivisionError: while drawing (--debug shows the traceback)\n"
    assert capsys.readouterr().err == expected


def test_a_warning_is_one_line_without_a_place(capsys):
    assert cli.main(["show", "tests.cli.models:one_linear", "--F", "2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "fxshard: warning: units='auto' found no repeated blocks in Linear: all parameters are one unit"
    )


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fxshard, "trace", interrupt)
    assert cli.main(["show", "tests.cli.models:chain", "--F", "2"]) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "")
