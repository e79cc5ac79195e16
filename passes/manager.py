"""Runs passes in order: contracts first, then each pass, timed, counted, and verified."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fxshard.errors import FxshardError, PassError, ScheduleError
from fxshard.ir import Remarks, Schedule
from fxshard.ir.schedule import PassRecord, info
from fxshard.ir.verify import verify
from fxshard.passes.base import Pass


def check_contracts(passes: Sequence[Pass]) -> None:
    """Raise PassError, naming every culprit, if some pass stands where its requirements are not met."""
    established: set[str] = set()
    problems = []
    for position, p in enumerate(passes, 1):
        missing = [r for r in p.requires if r not in established]
        if missing:
            there = ", ".join(sorted(established)) or "nothing"
            problems.append(
                f"pass {position} '{p.name}' requires {', '.join(missing)}, which no earlier pass provides; there is {there}"
            )
        established.update(p.provides)
    if problems:
        raise PassError("; ".join(problems))


def run(passes: Sequence[Pass], schedule: Schedule) -> None:
    """Run `passes` on `schedule` in place; records and remarks are appended to it.

    Raises PassError if a pass fails, ScheduleError if it leaves an invalid schedule or asks for what is not allowed (an
    illegal move, a limit that cannot be kept); each names the pass and its place.
    """
    check_contracts(passes)
    for position, p in enumerate(passes, 1):
        remarks = Remarks(p.name)
        before = _moves(schedule)
        count = sum(len(phase.graph.nodes) for phase in schedule.phases)
        started = time.perf_counter()
        try:
            p.apply(schedule, remarks)
        except FxshardError as error:
            raise type(error)(f"{error}\n  in      {p}, pass {position} of {len(passes)}") from error
        except Exception as error:
            raise PassError(
                f"pass {position} of {len(passes)}, '{p}', failed: {type(error).__name__}: {error}"
            ) from error
        seconds = time.perf_counter() - started
        schedule.established.update(p.provides)
        try:
            verify(schedule)
        except ScheduleError as error:
            raise ScheduleError(
                f"{error}\n  after   {p}, pass {position} of {len(passes)}; the schedule was valid before it"
            ) from error
        added = sum(len(phase.graph.nodes) for phase in schedule.phases) - count
        schedule.history.append(PassRecord(str(p), seconds, added, _moves(schedule) - before))
        schedule.remarks += remarks.items


def _moves(schedule: Schedule) -> int:
    return sum(len(info(n).moved_by) for phase in schedule.phases for n in phase.graph.nodes)
