"""From a schedule to what a picture of it shows: lanes of bars and marks, arrows, exposed time, memory curves.

Times are those of `fxshard.ir.clock`. A buffer counts as memory from where the compute queue stands when it is issued, or
from its start if that is earlier, to the node that ends its life, as in plan-memory; residents have memory of their own
through the whole step.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from torch import fx

from fxshard.ir import Phase, Schedule, Slot, clock, ops
from fxshard.ir.clock import Span, Task, Times
from fxshard.ir.schedule import describe, info

QUEUE_ORDER = ("unshard", "compute", "reduce", "replicate")
"""Lanes from top to bottom: what feeds compute above it, what compute feeds below it."""


@dataclass(frozen=True)
class Bar:
    """What occupies a queue: a compute segment, named after its unit, or a collective, after its FlatParameter."""

    phase: str
    queue: str
    kind: str
    name: str
    unit: str
    start: float
    end: float
    num_bytes: int = 0
    num_operators: int = 0
    passes: tuple[str, ...] = ()
    """The pass that put a collective there, then those that moved it."""


@dataclass(frozen=True)
class Mark:
    """What happens on a queue and takes no time."""

    phase: str
    queue: str
    kind: str
    name: str
    time: float
    source: str = ""
    """For a WAIT, the queue it waits for."""


@dataclass(frozen=True)
class Arrow:
    """`wait`: from the end of a collective to its WAIT. `limit`: from a FREE to the AllGather that waited for it."""

    kind: str
    name: str
    source: str
    source_time: float
    target: str
    target_time: float


@dataclass(frozen=True)
class Exposed:
    """The compute queue idle because of `cause`."""

    phase: str
    start: float
    end: float
    cause: str


@dataclass(frozen=True)
class Curve:
    """A step function: `points` are (time, bytes from then on), in issue order; several may share a time."""

    points: tuple[tuple[float, int], ...]

    @property
    def peak(self) -> tuple[float, int]:
        """When the most bytes are first held, and how many."""
        return max(self.points, key=lambda point: point[1])


@dataclass(frozen=True)
class Lane:
    """One queue; bars and marks in issue order."""

    queue: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Timeline:
    """All that a picture of a schedule shows, without a place on paper."""

    W: int
    F: int
    passes: tuple[str, ...]
    spans: tuple[Span, ...]
    lanes: tuple[Lane, ...]
    arrows: tuple[Arrow, ...]
    exposed: tuple[Exposed, ...]
    gathered: Curve
    """Bytes of gathered parameters, residents included."""
    gradients: Curve
    """Bytes of unsharded gradients and of what reducing them needs."""
    resident_bytes: int
    kinds: dict[str, str]
    """Unit to unit kind, its name with `*` for numbers, in registration order."""
    root_kinds: frozenset[str]

    @property
    def end(self) -> float:
        return self.spans[-1].end


def lay_out(schedule: Schedule) -> Timeline:
    """Lay a schedule out in time. Works after any pass; what is not inserted yet is not there."""
    times = clock.run(schedule)
    resident = sum(schedule.flats[flat].full_bytes for flat in schedule.resident)
    gathered, gradients = [(0.0, resident)], [(0.0, 0)]
    for phase, span in zip(schedule.phases, times.spans):
        lives = _Lives(schedule, phase, (task for task in times.tasks if task.phase == phase.name))
        for curve, name in ((gathered, "gathered"), (gradients, "gradients")):
            base = curve[0][1]
            curve += [(time, base + level) for time, level in lives.levels(name, span.end)]
    bars = [_bar(task) for task in times.tasks if task.kind in ops.COLLECTIVES or task.end > task.start]
    marks = [_mark(task) for task in times.tasks if task.kind not in (*ops.COLLECTIVES, "compute", "throttle")]
    found = {bar.queue for bar in bars} | {mark.queue for mark in marks} | {"compute"}
    queues = [q for q in QUEUE_ORDER if q in found] + sorted(found - set(QUEUE_ORDER))
    kinds = {unit: re.sub(r"\d+", "*", unit) for unit in schedule.units}
    return Timeline(
        schedule.W,
        schedule.F,
        tuple(record.text for record in schedule.history),
        times.spans,
        tuple(Lane(q, tuple(b for b in bars if b.queue == q), tuple(m for m in marks if m.queue == q)) for q in queues),
        tuple(_arrows(times)),
        tuple(Exposed(gap.phase, gap.start, gap.end, describe(gap.cause)) for gap in times.gaps),
        Curve(tuple(gathered)),
        Curve(tuple(gradients)),
        resident,
        kinds,
        frozenset(kinds[flat.unit] for flat in schedule.flats.values() if flat.is_root),
    )


def _bar(task: Task) -> Bar:
    found = info(task.node)
    if task.kind == "compute":
        return Bar(
            task.phase, task.queue, "compute", task.unit, task.unit, task.start, task.end, num_operators=len(task.nodes)
        )
    passes = tuple(dict.fromkeys((found.by, *found.moved_by)))
    name, unit = found.flat or "", found.unit or ""
    return Bar(task.phase, task.queue, task.kind, name, unit, task.start, task.end, found.num_bytes, passes=passes)


def _mark(task: Task) -> Mark:
    source = info(_awaited(task)).queue if task.kind == "wait" else ""
    return Mark(task.phase, task.queue, task.kind, info(task.node).flat or "", task.start, source)


def _awaited(task: Task) -> fx.Node:
    """The collective of a WAIT, the FREE of a LIMIT."""
    return cast(fx.Node, task.node.args[0])


def _arrows(times: Times) -> Iterator[Arrow]:
    limits: dict[str, float] = {}
    for task in times.tasks:
        name = info(task.node).flat or ""
        if task.kind == "wait":
            source = _awaited(task)
            yield Arrow("wait", name, info(source).queue, times.end(source), task.queue, task.start)
        elif task.kind == "throttle":
            limits[name] = times.end(_awaited(task))
        elif task.kind == "all_gather":
            freed = limits.pop(name, math.inf)
            if math.isclose(freed, task.start):
                yield Arrow("limit", name, "compute", freed, task.queue, task.start)


class _Lives:
    """Which bytes are held from which node to which, of gathered parameters and of gradients."""

    def __init__(self, schedule: Schedule, phase: Phase, tasks: Iterable[Task]):
        self.begins: dict[fx.Node, tuple[str, int]] = {}
        self.ends: dict[fx.Node, list[tuple[str, int]]] = defaultdict(list)
        self.changes: list[tuple[float, int, str, int]] = []
        """(time, number in issue order, curve, bytes more)."""
        one = {(info(n).kind, info(n).flat): n for n in phase.graph.nodes if info(n).flat is not None}
        for node in phase.graph.nodes:
            found = info(node)
            whole = found.kind == "cast_shard" and found.queue == "compute"  # at F = 1 the cast is the whole unshard
            if found.kind == "all_gather" or whole:
                if found.flat not in schedule.resident:
                    self._add(node, one.get(("free", found.flat)), "gathered")
            elif found.kind in ("flatten_grads", "reduce_scatter", "all_reduce"):
                end = one.get(("accumulate_grad", found.flat))
                if found.kind == "flatten_grads" and end is not None and schedule.F > 1:
                    end = cast(fx.Node, end.args[0])  # once reduced, only the shard is needed
                self._add(node, end, "gradients")
        for task in tasks:
            if task.node in self.begins:
                self.changes.append((min(task.issued, task.start), len(self.changes), *self.begins[task.node]))
            done = task.end if task.queue == "compute" else task.issued
            for curve, size in self.ends.get(task.node, ()):
                self.changes.append((done, len(self.changes), curve, size))

    def _add(self, node: fx.Node, end: fx.Node | None, curve: str) -> None:
        slot: Slot | None = node.meta.get("slot")
        planned = slot.num_bytes if slot is not None else 0
        made_here = info(node).kind not in ("reduce_scatter", "all_reduce")
        size = planned or (info(node).num_bytes if made_here else 0)
        self.begins[node] = curve, size
        if end is not None:
            self.ends[end].append((curve, -size))

    def levels(self, curve: str, end: float) -> list[tuple[float, int]]:
        """(time, bytes from then on) in order of time, at one time in issue order; nothing is held after `end`."""
        changes = sorted(change for change in self.changes if change[2] == curve)
        sizes = accumulate(size for *_, size in changes)
        return [*((time, level) for (time, *_), level in zip(changes, sizes)), (end, 0)]
