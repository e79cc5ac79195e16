"""The command line: `fxshard COMMAND`, or `python -m fxshard COMMAND`. See `docs/cli.md`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from fxshard import __version__
from fxshard.cli import diff, doctor, passes, show, verify
from fxshard.cli.syntax import Parser, UsageError
from fxshard.errors import FxshardError, PassError, ScheduleError

__all__ = ["main"]

COMMANDS = (show, verify, diff, passes, doctor)
OK, FINDING, USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141

DESCRIPTION = """\
PyTorch FSDP as a compiler: trace, verify, compare and draw the communication schedule of a training step,
without devices, and without memory for the model.
"""

EPILOG = """\
examples:
  fxshard show examples.models:gpt_demo --F 4
  fxshard verify step.json
  fxshard diff step.json examples.models:gpt_demo --F 4 --b-set rate_limit=1
  fxshard doctor

exit status: 0 ok; 1 a schedule breaks a rule, schedules differ, the installation is broken; 2 wrong usage
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status; errors go to stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        try:
            status = _run(arguments)
        except SystemExit as end:  # --help and --version
            status = end.code if isinstance(end.code, int) else OK
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read has what it wanted. What is still buffered must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    try:
        parsed = _parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            status: int = parsed.run(parsed)
        return status
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"fxshard: error: {_message(error)}", file=sys.stderr)
        return FINDING if isinstance(error, (ScheduleError, PassError)) else USAGE


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`: the place is a line of ours or of a library, which helps nobody here."""
    print(f"fxshard: warning: {str(message).strip()}", file=sys.stderr)


def _message(error: Exception) -> str:
    """Messages of ours as they are; of anything else the first line and how to see the rest."""
    text = str(error).strip()
    if isinstance(error, (UsageError, FxshardError)):
        return "\n".join([text, *getattr(error, "__notes__", ())])
    lines = text.splitlines() or ["no message"]
    if isinstance(error, (TypeError, ValueError, OSError)):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]} (--debug shows the traceback)"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fxshard",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"fxshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        summary = (command.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=summary, epilog=command.EPILOG)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
