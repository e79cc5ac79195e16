"""From a schedule to what a picture of it shows: lanes of bars and marks, arrows, exposed time, memory curves.

Time is in unit slots, not measured, since a schedule knows bytes and no costs:

    compute      in proportion to the bytes its operators read and write; the median unit's forward is 1 slot
    collectives  in proportion to their bytes; those of a phase add up to 0.8 of its compute
    the rest     (WAIT, FREE, FLAT, CAST, ACC, LIMIT) takes no time

The host issues in order and never blocks. A queue runs in issue order; a node starts when its queue is free, its inputs
are ready and its slot is free. Collectives of the shard group (unshard and reduce) share one communicator and so run
one at a time in issue order. A phase starts when the one before it has ended.

A buffer counts as memory from where the compute queue stands when it is issued, or from its start if that is earlier, to
the node that ends its life, as in plan-memory; residents have memory of their own through the whole step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

from torch import fx

from fxshard.ir import Phase, Schedule, Slot, ops
from fxshard.ir.aliasing import aliased_inputs, mutated_inputs
from fxshard.ir.schedule import describe, info, tensor_bytes

QUEUE_ORDER = ("unshard", "compute", "reduce", "replicate")
"""Lanes from top to bottom: what feeds compute above it, what compute feeds below it."""

COMMUNICATORS = {"unshard": "shard group", "reduce": "shard group", "replicate": "replicate group"}

COMMUNICATION_SHARE = 0.8
"""All collectives of a phase, in units of its compute."""

SHORTEST = 0.02
"""The least slots a compute segment or a collective takes, so that it can be seen."""


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
class Span:
    """A phase on the time axis; `exposed` slots of it the compute queue is idle."""

    phase: str
    start: float
    end: float
    exposed: float


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
    """Lay a schedule out in unit slots. Works after any pass; what is not inserted yet is not there."""
    slots = _slots_per_byte(schedule)
    resident = sum(schedule.flats[flat].full_bytes for flat in schedule.resident)
    gathered, gradients = [(0.0, resident)], [(0.0, 0)]
    runs: list[_Run] = []
    for phase in schedule.phases:
        run = _Run(schedule, phase, runs[-1].end if runs else 0.0, slots)
        runs.append(run)
        for curve, levels in ((gathered, run.gathered), (gradients, run.gradients)):
            base = curve[0][1]
            curve += [(time, base + level) for time, level in levels]
    bars = [bar for run in runs for bar in run.bars]
    marks = [mark for run in runs for mark in run.marks]
    found = {bar.queue for bar in bars} | {mark.queue for mark in marks} | {"compute"}
    queues = [q for q in QUEUE_ORDER if q in found] + sorted(found - set(QUEUE_ORDER))
    kinds = {unit: re.sub(r"\d+", "*", unit) for unit in schedule.units}
    return Timeline(
        schedule.W,
        schedule.F,
        tuple(record.text for record in schedule.history),
        tuple(run.span for run in runs),
        tuple(Lane(q, tuple(b for b in bars if b.queue == q), tuple(m for m in marks if m.queue == q)) for q in queues),
        tuple(arrow for run in runs for arrow in run.arrows),
        tuple(gap for run in runs for gap in run.exposed),
        Curve(tuple(gathered)),
        Curve(tuple(gradients)),
        resident,
        kinds,
        frozenset(kinds[flat.unit] for flat in schedule.flats.values() if flat.is_root),
    )


class _Run:
    """One phase executed in virtual time."""

    def __init__(self, schedule: Schedule, phase: Phase, start: float, slots_per_byte: float):
        self.phase, self.start = phase, start
        self.bars: list[Bar] = []
        self.marks: list[Mark] = []
        self.arrows: list[Arrow] = []
        self.exposed: list[Exposed] = []
        self.clocks: dict[str, float] = defaultdict(lambda: start)
        """When each queue, and each communicator, is free again."""
        self.ends: dict[str, float] = {}
        """When each node has ended, by name; one that is not here was there from the start."""
        self.limits: dict[str, float] = {}
        """When the FREE is reached that the next AllGather of a FlatParameter is held to."""
        steps = [_Step(unit, nodes, slots_per_byte) for unit, nodes in phase.steps()]
        compute = sum(step.slots for step in steps if step.kind == "compute")
        moved = sum(info(step.node).num_bytes for step in steps if step.kind in ops.COLLECTIVES)
        self.per_byte = COMMUNICATION_SHARE * compute / moved if moved else 0.0
        lives = _Lives(schedule, phase)
        for step in steps:
            issued = self.clocks["compute"]
            if step.kind == "compute":
                begin = self._segment(step)
            elif step.kind in ops.COLLECTIVES:
                begin = self._collective(step.node)
            else:
                begin = self._instant(step.node)
            lives.passed(step.node, min(issued, begin), self.clocks["compute"])
        self.end = max(self.clocks.values())
        self.gathered, self.gradients = (lives.levels(curve, self.end) for curve in ("gathered", "gradients"))

    @property
    def span(self) -> Span:
        return Span(self.phase.name, self.start, self.end, sum(gap.end - gap.start for gap in self.exposed))

    def _segment(self, step: _Step) -> float:
        begin, end = self._enter("compute", step.nodes, step.slots)
        bar = Bar(self.phase.name, "compute", "compute", step.unit, step.unit, begin, end)
        self.bars.append(replace(bar, num_operators=len(step.nodes)))
        return begin

    def _collective(self, node: fx.Node) -> float:
        found = info(node)
        name = found.flat or ""
        begin, end = self._enter(found.queue, [node], max(SHORTEST, self.per_byte * found.num_bytes))
        bar = Bar(self.phase.name, found.queue, found.kind, name, found.unit or "", begin, end)
        passes = tuple(dict.fromkeys((found.by, *found.moved_by)))
        self.bars.append(replace(bar, num_bytes=found.num_bytes, passes=passes))
        freed = self.limits.pop(name, None) if found.kind == "all_gather" else None
        if freed is not None and math.isclose(freed, begin):
            self.arrows.append(Arrow("limit", name, "compute", freed, found.queue, begin))
        return begin

    def _instant(self, node: fx.Node) -> float:
        found = info(node)
        name = found.flat or ""
        _, time = self._enter(found.queue, [node], 0.0)
        if found.kind == "throttle":
            self.limits[name] = self._ended(node.args[0])
            return time
        source = info(node.args[0]).queue if found.kind == "wait" else ""  # type: ignore[arg-type]
        self.marks.append(Mark(self.phase.name, found.queue, found.kind, name, time, source))
        if source:
            self.arrows.append(Arrow("wait", name, source, self._ended(node.args[0]), found.queue, time))
        return time

    def _ended(self, node: Any) -> float:
        return self.ends.get(node.name, self.start)

    def _enter(self, queue: str, nodes: list[fx.Node], slots: float) -> tuple[float, float]:
        """Run nodes on a queue as early as it may be; returns when they start and end."""
        free = self.clocks[queue]
        held = [free]
        communicator = COMMUNICATORS.get(queue) if slots else None
        if communicator is not None:
            held.append(self.clocks[communicator])
        for node in nodes:
            held += [self._ended(source) for source in node.all_input_nodes]
            slot: Slot | None = node.meta.get("slot")
            held += [self.ends[name] for name in (slot.after if slot is not None else ())]
        begin = max(held)
        end = begin + slots
        if queue == "compute" and begin > free:
            cause = nodes[0].args[0] if info(nodes[0]).kind == "wait" else nodes[0]
            self.exposed.append(Exposed(self.phase.name, free, begin, describe(cause)))  # type: ignore[arg-type]
        self.clocks[queue] = end
        if communicator is not None:
            self.clocks[communicator] = end
        self.ends.update((node.name, end) for node in nodes)
        return begin, end


class _Lives:
    """Which bytes are held from which node to which, of gathered parameters and of gradients."""

    def __init__(self, schedule: Schedule, phase: Phase):
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

    def _add(self, node: fx.Node, end: fx.Node | None, curve: str) -> None:
        slot: Slot | None = node.meta.get("slot")
        planned = slot.num_bytes if slot is not None else 0
        made_here = info(node).kind not in ("reduce_scatter", "all_reduce")
        size = planned or (info(node).num_bytes if made_here else 0)
        self.begins[node] = curve, size
        if end is not None:
            self.ends[end].append((curve, -size))

    def passed(self, node: fx.Node, begin: float, end: float) -> None:
        """Take the next node in issue order: what it makes is held from `begin`, what it ends is held to `end`."""
        if node in self.begins:
            self.changes.append((begin, len(self.changes), *self.begins[node]))
        for curve, size in self.ends.get(node, ()):
            self.changes.append((end, len(self.changes), curve, size))

    def levels(self, curve: str, end: float) -> list[tuple[float, int]]:
        """(time, bytes from then on) in order of time, at one time in issue order; nothing is held after `end`."""
        changes = sorted(change for change in self.changes if change[2] == curve)
        sizes = accumulate(size for *_, size in changes)
        return [*((time, level) for (time, *_), level in zip(changes, sizes)), (end, 0)]


class _Step:
    """A communication node, or a segment of operators with the slots it takes."""

    def __init__(self, unit: str, nodes: list[fx.Node], slots_per_byte: float):
        self.unit, self.nodes, self.node, self.kind = unit, nodes, nodes[0], info(nodes[0]).kind
        work = sum(map(touched_bytes, nodes)) if self.kind == "compute" else 0
        self.slots = max(SHORTEST, slots_per_byte * work)


def _slots_per_byte(schedule: Schedule) -> float:
    """So that the forward of the median unit takes one slot; where nothing is gathered yet, the whole forward."""
    work: dict[str, int] = defaultdict(int)
    for unit, nodes in schedule.forward.steps():
        if info(nodes[0]).kind == "compute":
            work[unit] += sum(map(touched_bytes, nodes))
    median = statistics.median([work[unit] for unit in work if unit] or work.values() or [0])
    return 1 / median if median else 0.0


def touched_bytes(node: fx.Node) -> int:
    """Bytes an operator reads and writes, by the shapes it was captured with; 0 for a view."""
    if aliased_inputs(node) and not mutated_inputs(node):
        return 0
    return tensor_bytes(node) + sum(map(tensor_bytes, node.all_input_nodes))
