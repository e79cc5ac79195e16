"""Schedules of the smallest model after some passes, as text that does not hang on torch's operators."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import fxshard
from fxshard.ir import Schedule
from fxshard.ir.schedule import Remark
from fxshard.passes import Pass
from tests.capture.compare import Chain, batches


def after(
    count: int, make: Callable = Chain, W: int | None = None, extra: tuple[Pass, ...] = (), **options
) -> Schedule:
    """The schedule of three units (F = 2 unless told) after the first `count` default passes and `extra` ones."""
    F = options.pop("F", 2)
    return fxshard.trace(make(), (batches(1)[0],), F=F, W=W, passes=lambda p: [*p[:count], *extra], **options)


def text(schedule: Schedule, phase: str) -> str:
    """One phase without its titles and operator counts; lines of operators that only differ in their count are one."""
    lines = schedule.text().splitlines()
    names = [p.name for p in schedule.phases]
    start = lines.index(phase) + 2
    end = next(i for i in range(start, len(lines)) if lines[i] in names or lines[i].startswith("memory"))
    kept: list[str] = []
    for line in lines[start:end]:
        line = re.sub(r"\s+\d+ ops?$", "", line[2:])
        if not kept or kept[-1] != line:
            kept.append(line)
    return "\n".join(kept)


def golden(expected: str) -> str:
    return textwrap.dedent(expected).strip("\n").rstrip()


def part(lines: list[str]) -> str:
    """Some lines of a phase, as far left as they go together."""
    return textwrap.dedent("\n".join(lines))


def remarks(schedule: Schedule, by: str, kind: str | None = None) -> list[Remark]:
    return [r for r in schedule.remarks if r.by == by and kind in (None, r.kind)]


def node_names(schedule: Schedule) -> list[list[str]]:
    return [[n.name for n in phase.graph.nodes] for phase in schedule.phases]
