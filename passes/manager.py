"""Runs passes in order: contracts first, then each pass, timed, counted, and verified. Finds the one that breaks a check.

A pass neither prints nor times: what is printed, where a run stops, and what is written when it fails is said here.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxshard.errors import FxshardError, PassError, ScheduleError
from fxshard.ir import Remarks, Schedule
from fxshard.ir.json_form import schedule_from_document, schedule_to_document
from fxshard.ir.nodes import describe, info
from fxshard.ir.schedule import PassRecord
from fxshard.ir.verify import verify
from fxshard.passes.base import Pass


def check_contracts(passes: Sequence[Pass], established: Collection[str] = ()) -> None:
    """Raise PassError, naming every culprit, if some pass stands where its requirements are not met."""
    there = set(established)
    problems = []
    for position, p in enumerate(passes, 1):
        missing = [r for r in p.requires if r not in there]
        if missing:
            have = ", ".join(sorted(there)) or "nothing"
            problems.append(
                f"pass {position} '{p.name}' requires {', '.join(missing)}, which no earlier pass provides; there is {have}"
            )
        there.update(p.provides)
    if problems:
        raise PassError("; ".join(problems))


def run(
    passes: Sequence[Pass],
    schedule: Schedule,
    *,
    verify_each: bool = True,
    print_after: bool | Collection[str] = False,
    reproducer: bool = True,
) -> None:
    """Run `passes` on `schedule` in place; records and remarks are appended to it.

    verify_each: verify after each pass; if not, once, after the last. print_after: print the schedule after each pass, or
    after those named, if it changed it. reproducer: when a pass fails, or breaks the schedule, write the schedule as it
    was given to `run` and the passes up to that one to a file that `replay` runs again; the error names the file.

    Raises PassError if a pass fails or breaks its own promise, ScheduleError if it leaves an invalid schedule or asks for
    what is not allowed (an illegal move, a limit that cannot be kept); each names the pass and its place.
    """
    check_contracts(passes, schedule.established)
    original = schedule.copy() if reproducer else None
    try:
        for position, p in enumerate(passes, 1):
            place = f"{p}, pass {position} of {len(passes)}"
            planned = any("memory-planned" in q.provides for q in passes[:position])
            _run_one(p, schedule, place, verify_each or position == len(passes), verify_each)
            if planned and "memory-planned" not in schedule.established:
                raise PassError(
                    f"{place}, moved operations after plan-memory, whose plan does not hold now: put it before"
                )
            if print_after is True or (print_after and p.name in print_after):
                lines = [record.lines for record in schedule.history[-2:]]
                if len(lines) < 2 or _body(lines[0]) != _body(lines[1]):
                    print(f"after {p}\n{schedule}\n")
                else:
                    print(f"after {p}: no change\n")
    except FxshardError as error:
        if original is not None:
            error.add_note(f"  again   {_again(original, passes[:position])}")
        raise


def _body(lines: Sequence[str]) -> list[str]:
    """A schedule's lines without those that name the passes."""
    return [line for line in lines if not line.startswith("#")]


def _run_one(p: Pass, schedule: Schedule, place: str, checked: bool, each: bool) -> None:
    remarks = Remarks(p.name)
    before = _moves(schedule)
    schedule.editor = p.name
    started = time.perf_counter()
    try:
        p.apply(schedule, remarks)
    except FxshardError as error:
        kind = type(error) if type(error) in (ScheduleError, PassError) else PassError
        raise kind(f"{error}\n  in      {place}") from error
    except Exception as error:
        raise PassError(f"{place}, failed: {type(error).__name__}: {error}") from error
    finally:
        schedule.editor = "user"
    seconds = time.perf_counter() - started
    schedule.established.update(p.provides)
    if checked:
        try:
            verify(schedule)
        except ScheduleError as error:
            if not each:
                text = f"{error}\n  after   all passes, the last is {p.name}; verify_each=True tells which one broke it"
                raise ScheduleError(text) from error
            done = schedule.history[-1].text.partition("{")[0] if schedule.history else ""
            todo = f"fix {p.name}" + (f", or stop before it with stop_after={done!r}" if done else "")
            raise ScheduleError(
                f"{error}\n  after   {place}; the schedule was valid before it\n  to do   {todo}"
            ) from error
        except Exception as error:
            raise PassError(f"{place}, left what is no schedule: {type(error).__name__}: {error}") from error
    if promises := list(p.ensures(schedule)):
        raise PassError(f"{place}, does not keep its promise: {'; '.join(promises)}")
    missed = [f"{r.unit}: {r.text}" for r in remarks.items if r.kind == "missed"]
    if p.strict and missed:
        raise PassError(f"{place}, is strict and missed {len(missed)}: {'; '.join(missed)}")
    after = _moves(schedule)
    record = PassRecord(
        str(p),
        seconds,
        added=len(after.keys() - before.keys()),
        removed=len(before.keys() - after.keys()),
        moved=max(0, sum(after.values()) - sum(before.values())),  # what is erased takes its moves along
        lines=tuple(schedule.text().splitlines()),
    )
    schedule.history.append(record)
    schedule.remarks += remarks.items


def _moves(schedule: Schedule) -> dict[fx.Node, int]:
    """How often each node was moved so far."""
    return {n: len(info(n).moved_by) for phase in schedule.phases for n in phase.graph.nodes}


# -- reproducers


def _again(original: Schedule, passes: Sequence[Pass]) -> str:
    """How to run the failing pass again: from a file with the schedule as it was given to `run`, and the passes up to it."""
    here = [p.name for p in passes if type(p).__module__ == "__main__" or "<locals>" in type(p).__qualname__]
    if here:
        return f"put {', '.join(here)} into a module, and a file to run this again from is written"
    try:
        document = {"schedule": schedule_to_document(original), "passes": [_described(p) for p in passes]}
        text = json.dumps(document)  # before there is a file
        handle, path = tempfile.mkstemp(prefix=f"fxshard-{passes[-1].name}-", suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except (ValueError, OSError) as error:
        return f"no file to run this again from could be written: {error}"
    return f"fxshard verify {path}"


def _described(p: Pass) -> str:
    from fxshard.passes.text import BY_NAME, full_text

    return str(p) if BY_NAME.get(p.name) is type(p) else full_text(p)


def is_reproducer(document: Any) -> bool:
    """Whether this JSON is what `run` writes when a pass fails."""
    return isinstance(document, dict) and set(document) == {"schedule", "passes"}


def replay(path: str) -> Schedule:
    """Run what `run` wrote when a pass failed: the same schedule, the same passes. Returns the schedule if none fails.

    `fxshard verify FILE` does the same. A pass that is not fxshard's own is imported by its module, which has to be
    importable here.
    """
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    if not is_reproducer(document):
        raise ValueError(f"{path} is no reproducer: it was not written for a pass that failed")
    return rerun(document)


def rerun(document: Mapping[str, Any]) -> Schedule:
    """`replay` of what was read already."""
    from fxshard.passes.text import parse

    schedule = schedule_from_document(document["schedule"])
    run([parse(text) for text in document["passes"]], schedule, reproducer=False)
    return schedule


# -- bisecting


@dataclass(frozen=True)
class Culprit:
    """The first pass with which a check fails and, where it moves operations, the first of its moves."""

    passed: str
    """Its text form."""
    position: int
    """From 1, in the passes as given."""
    move: int | None
    """Number of the move, from 1; None if no move of its makes the difference."""
    moved: str
    """What that move moved, and where to."""
    error: str
    """What the check raised, or 'the check returned False'."""

    def __str__(self) -> str:
        where = f"pass {self.position}, {self.passed}"
        move = f", move {self.move}: {self.moved}" if self.move is not None else ""
        return f"{where}{move}\n  {self.error}"


class _OutOfMoves(Exception):
    """Ends a pass when it has made the moves it may make."""


def bisect(passes: Sequence[Pass], schedule: Schedule, check: Callable[[Schedule], Any]) -> Culprit | None:
    """The first pass that makes `check` fail; None if it holds after all of them.

    schedule: as captured, before any pass (`fxshard.trace(..., passes=lambda default: [])`); it is left as it is. check: is
    given a complete schedule, and fails by raising or by returning False.

    Passes that a schedule cannot run without (those that provide a word of `fxshard.passes.NEEDED`) always run; of the
    others the first k do. A pass that itself fails, or breaks the schedule, counts as failing. The search halves, and so
    trusts that a check that fails goes on failing with more passes, or more moves.
    """
    from fxshard.passes import NEEDED

    optional = [i for i, p in enumerate(passes) if not any(word in NEEDED for word in p.provides)]

    def outcome(kept: int, moves: int | None = None) -> tuple[str | None, list[str]]:
        """What fails with the first `kept` optional passes, the last of which may make `moves` moves."""
        dropped = set(optional[kept:])
        last = optional[kept - 1] if kept else None
        trial = schedule.copy()
        made: list[str] = []
        try:
            for i, p in enumerate(passes):
                if i in dropped:
                    continue
                if i == last:
                    _watched(p, trial, moves, made)
                else:
                    run([p], trial, reproducer=False)
            return ("the check returned False" if check(trial) is False else None), made
        except Exception as error:
            return f"{type(error).__name__}: {error}", made

    error, _ = outcome(len(optional))
    if error is None:
        return None
    if (needed := outcome(0)[0]) is not None:
        position = next(i for i, p in enumerate(passes) if i not in optional)
        return Culprit("the passes that are always needed", position + 1, None, "", needed)
    low, high = 0, len(optional)  # holds with `low` of them, fails with `high`
    while high - low > 1:
        middle = (low + high) // 2
        failed = outcome(middle)[0]
        low, high, error = (low, middle, failed) if failed is not None else (middle, high, error)
    error, made = outcome(high)
    assert error is not None
    p, position = passes[optional[high - 1]], optional[high - 1] + 1
    if not made or outcome(high, 0)[0] is not None:
        return Culprit(str(p), position, None, "", error)
    few, many = 0, len(made)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if outcome(high, middle)[0] is not None else (middle, many)
    return Culprit(str(p), position, many, made[many - 1], error)


def _watched(p: Pass, schedule: Schedule, moves: int | None, made: list[str]) -> None:
    """Run a pass, noting its moves; after `moves` of them it is cut off, and establishes what it provides all the same."""

    def on_move(node: fx.Node, anchor: fx.Node) -> None:
        if moves is not None and len(made) == moves:
            raise _OutOfMoves
        made.append(f"{describe(node)} to before {describe(anchor)}")

    schedule.on_move = on_move
    try:
        p.apply(schedule, Remarks(p.name))
    except _OutOfMoves:
        pass
    finally:
        schedule.on_move = None
    schedule.established.update(p.provides)
    verify(schedule)
