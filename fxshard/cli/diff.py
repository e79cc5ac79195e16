"""compare two schedules; exit status 0 if they are equal, 1 if they differ"""

from __future__ import annotations

import argparse

import fxshard
from fxshard.cli import output, source
from fxshard.cli.syntax import UsageError

PICTURES = (".svg",)
"""What `ScheduleDiff.render` draws."""

EPILOG = """\
examples:
  fxshard diff before.json after.json
  fxshard diff step.json examples.models:gpt_demo --F 4
  fxshard diff examples.models:gpt_demo examples.models:gpt_demo --F 4 --b-set rate_limit=1 -o diff.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for side in "AB":
        parser.add_argument(side, help=source.TARGET if side == "A" else "likewise")
    source.add_arguments(parser)
    group = parser.add_argument_group("of one side alone")
    for side in "ab":
        source.add_options(group, side)
    parser.add_argument("-o", "--output", metavar="FILE", help="draw the differences into a file, such as diff.svg")


def run(parsed: argparse.Namespace) -> int:
    if parsed.output is not None:
        output.check_folder(parsed.output)
        if not parsed.output.lower().endswith(PICTURES):
            raise UsageError(f"-o {parsed.output}: a difference is drawn as {', '.join(PICTURES)}")
    common = source.Settings.of(parsed)
    both_saved = source.is_saved(parsed.A) and source.is_saved(parsed.B)
    schedules = []
    for side, target in (("a", parsed.A), ("b", parsed.B)):
        shared = common if both_saved or not source.is_saved(target) else source.Settings()
        schedules.append(source.schedule_of(target, shared.and_of(parsed, side)))
    difference = fxshard.diff(*schedules)
    print(difference)
    if parsed.output is not None:
        difference.render(parsed.output)
    return 1 if difference else 0
