"""check that a schedule keeps every rule; exit status 1 and the rules if it breaks some"""

from __future__ import annotations

import argparse

from fxshard.cli import source
from fxshard.ir import Phase, Schedule
from fxshard.ir.verify import RULES, applying, verify

EPILOG = """\
examples:
  fxshard verify step.json
  fxshard verify examples.models:gpt_demo --F 4 --pass my_passes:LateFrees
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help=source.TARGET)
    source.add_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    schedule = source.schedule_of(parsed.target, source.Settings.of(parsed))
    verify(schedule)
    phases = "; ".join(map(_counted, schedule.phases))
    print(f"valid: W={schedule.W} F={schedule.F}, {len(schedule.units)} units; {phases}; {_rules(schedule)}")
    return 0


def _counted(phase: Phase) -> str:
    counts = {"AG": phase.all_gathers, "RS": phase.reduce_scatters, "AR": phase.all_reduces}
    found = " ".join(f"{len(nodes)} {label}" for label, nodes in counts.items() if nodes)
    return f"{phase.name} {found or 'without collectives'}"


def _rules(schedule: Schedule) -> str:
    apply = applying(schedule)
    left = [rule.__name__ for rule in RULES if rule not in apply]
    return f"{len(apply)} of {len(RULES)} rules apply and hold" + (f"; not yet: {', '.join(left)}" if left else "")
