"""From a schedule to what a picture of it shows: lanes of bars and marks, arrows, exposed time, memory curves.

Times are those of `fxshard.ir.clock`. A buffer counts as memory from where the compute queue stands when it is issued, or
from its start if that is earlier, to the node that ends its life, as in plan-memory; residents have memory of their own
through the whole step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar, cast

from torch import fx

from fxshard.ir import Phase, Schedule, Slot, clock, ops
from fxshard.ir.clock import Span, Task, Times
from fxshard.ir.costs import Costs
from fxshard.ir.nodes import describe, info

ROOT = "(root)"
"""The kind of what is in no other unit, one part or several."""


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
    occurrence: int = 0
    """How many of the same `identity` were issued before it."""
    whole: tuple[float, float] | None = None
    """When it really starts and ends, where a row shows a piece of it."""

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.phase, self.kind, self.name


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
    occurrence: int = 0

    @property
    def identity(self) -> tuple[str, str, str]:
        """WAITs for different queues are different things."""
        return self.phase, f"{self.kind} {self.source}".rstrip(), self.name


Item = TypeVar("Item", Bar, Mark)


@dataclass(frozen=True)
class Arrow:
    """`wait`: from the end of a collective to its WAIT. `limit`: from a FREE to the AllGather that waited for it."""

    phase: str
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
    """A step function: `points` are (time, bytes from then on), phase after phase in issue order; several may share a
    time. `ends` says how many there are by the end of each phase."""

    points: tuple[tuple[float, int], ...]
    ends: tuple[int, ...]

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
    """All that a picture of a schedule, or one row of it, shows; without a place on paper."""

    W: int
    F: int
    passes: tuple[str, ...]
    unit: str
    """Of time: `slots`, or as the schedule's costs say."""
    slot: float
    """The median unit's forward."""
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
    """Unit to unit kind, its name with `*` for numbers, in registration order; parts of the root are of the kind `ROOT`."""
    parts: dict[str, tuple[str, ...]]
    """What the parts of a split root are: the modules in each."""

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return self.spans[-1].end


def lay_out(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Lay a schedule out in time, by `costs` or its own. Works after any pass; what is not inserted yet is not there."""
    times = clock.run(schedule, costs)
    resident = sum(schedule.flats[flat].full_bytes for flat in schedule.resident)
    curves: dict[str, list[tuple[float, int]]] = {"gathered": [(0.0, resident)], "gradients": [(0.0, 0)]}
    ends: dict[str, list[int]] = defaultdict(list)
    bars: list[Bar] = []
    for phase, span in zip(schedule.phases, times.spans):
        tasks = [task for task in times.tasks if task.phase == phase.name]
        lives = _Lives(schedule, phase, tasks)
        for name, points in curves.items():
            points += [(time, points[0][1] + level) for time, level in lives.levels(name, span.end)]
            ends[name].append(len(points))
        bars += [_bar(t) for t in tasks if t.kind in ops.COLLECTIVES or (t.kind == "compute" and t.end > t.start)]
    marks = _numbered(_mark(t) for t in times.tasks if t.kind not in (*ops.COLLECTIVES, "compute", "throttle"))
    bars = _numbered(bars)
    found = {bar.queue for bar in bars} | {mark.queue for mark in marks} | {"compute"}
    queues = [q for q in ops.QUEUE_ORDER if q in found] + sorted(found - set(ops.QUEUE_ORDER))
    roots = {flat.unit for flat in schedule.flats.values() if flat.is_root}
    kinds = {unit: ROOT if unit in roots else re.sub(r"\d+", "*", unit) for unit in schedule.units}
    modules: dict[str, dict[str, None]] = defaultdict(dict)
    for flat in schedule.flats.values():
        if len(roots) > 1 and flat.is_root:
            modules[flat.unit] |= dict.fromkeys(fqn.rpartition(".")[0] or fqn for fqn in flat.fqns)
    forward: dict[str, float] = defaultdict(float)
    for bar in bars:
        if bar.kind == "compute" and bar.phase == times.spans[0].phase:
            forward[bar.unit] += bar.end - bar.start
    return Timeline(
        schedule.W,
        schedule.F,
        tuple(record.text for record in schedule.history),
        times.costs.unit,
        statistics.median(forward.values()) if forward else times.total,
        times.spans,
        tuple(Lane(q, tuple(b for b in bars if b.queue == q), tuple(m for m in marks if m.queue == q)) for q in queues),
        tuple(_arrows(times)),
        tuple(Exposed(gap.phase, gap.start, gap.end, describe(gap.cause)) for gap in times.gaps),
        Curve(tuple(curves["gathered"]), tuple(ends["gathered"])),
        Curve(tuple(curves["gradients"]), tuple(ends["gradients"])),
        resident,
        kinds,
        {unit: tuple(names) for unit, names in modules.items()},
    )


def _numbered(items: Iterable[Item]) -> list[Item]:
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for item in items:
        found.append(replace(item, occurrence=seen[item.identity]) if seen[item.identity] else item)
        seen[item.identity] += 1
    return found


def _bar(task: Task) -> Bar:
    found = info(task.node)
    bar = Bar(task.phase, task.queue, task.kind, task.unit, task.unit, task.start, task.end)
    if task.kind == "compute":
        return replace(bar, num_operators=len(task.nodes))
    passes = tuple(dict.fromkeys((found.by, *found.moved_by)))
    return replace(bar, name=found.label, unit=found.unit or "", num_bytes=found.num_bytes, passes=passes)


def _mark(task: Task) -> Mark:
    source = info(_awaited(task)).queue if task.kind == "wait" else ""
    return Mark(task.phase, task.queue, task.kind, info(task.node).label, task.start, source)


def _awaited(task: Task) -> fx.Node:
    """The collective of a WAIT, the FREE of a LIMIT."""
    return cast(fx.Node, task.node.args[0])


def _arrows(times: Times) -> Iterator[Arrow]:
    limits: dict[str, float] = {}
    for task in times.tasks:
        name = info(task.node).label
        if task.kind == "wait":
            source = _awaited(task)
            yield Arrow(task.phase, "wait", name, info(source).queue, times.end(source), task.queue, task.start)
        elif task.kind == "throttle":
            limits[name] = times.end(_awaited(task))
        elif task.kind == "all_gather":
            freed = limits.pop(name, math.inf)
            if math.isclose(freed, task.start):
                yield Arrow(task.phase, "limit", name, "compute", freed, task.queue, task.start)


def cut_in_rows(timeline: Timeline, longest: float, most: int) -> list[tuple[float, float]]:
    """Start and end of each row: the whole step if it is at most `longest`, else phases by themselves, cut in equal parts
    where compute of a unit starts; in more than `most` rows only what is longer than `most` of `longest`.
    """
    if timeline.end <= longest:
        return [(0.0, timeline.end)]
    compute = next(lane for lane in timeline.lanes if lane.queue == "compute")
    rows = []
    for span, count in zip(timeline.spans, rows_of(timeline.spans, longest, most)):
        bars = [bar for bar in compute.bars if bar.phase == span.phase]
        starts = [bar.start for before, bar in pairwise(bars) if bar.unit != before.unit]
        cuts = [span.start]
        for i in range(1, count):
            even = span.start + (span.end - span.start) * i / count
            cuts.append(min((s for s in starts if s > cuts[-1]), key=lambda s: abs(s - even), default=span.end))
        rows += [row for row in pairwise([*cuts, span.end]) if row[0] < row[1]]
    return rows


def rows_of(spans: Sequence[Span], longest: float, most: int) -> list[int]:
    """Rows for each phase, none over `longest`, or `most` in all with the longest row as short as may be."""
    needed = [math.ceil((span.end - span.start) / longest) for span in spans]
    counts = [1] * len(spans)
    while sum(counts) < min(sum(needed), max(most, len(spans))):
        lengths = [(span.end - span.start) / count for span, count in zip(spans, counts)]
        counts[lengths.index(max(lengths))] += 1
    return counts


def clipped(timeline: Timeline, start: float, end: float) -> Timeline:
    """What happens from `start` to `end`, for one row. Bars and exposed time are cut; an arrow that is there in part stays
    whole. What takes no time and happens at the border of two rows of a phase is in the first."""
    spans = {s.phase: s for s in timeline.spans if s.start < end and s.end > start}
    places = [i for i, span in enumerate(timeline.spans) if span.phase in spans]
    phases = range(places[0], places[-1] + 1)

    def holds(phase: str, time: float) -> bool:
        return phase in spans and (start < time <= end or time == start == spans[phase].start)

    def cut(bar: Bar) -> Bar:
        if start <= bar.start and bar.end <= end:
            return bar
        return replace(bar, start=max(bar.start, start), end=min(bar.end, end), whole=(bar.start, bar.end))

    def meets(first: float, last: float, phase: str) -> bool:
        return (first < end and last > start) if first < last else holds(phase, first)

    return replace(
        timeline,
        spans=tuple(replace(s, start=max(s.start, start), end=min(s.end, end)) for s in spans.values()),
        lanes=tuple(
            Lane(
                lane.queue,
                tuple(cut(bar) for bar in lane.bars if meets(bar.start, bar.end, bar.phase)),
                tuple(mark for mark in lane.marks if holds(mark.phase, mark.time)),
            )
            for lane in timeline.lanes
        ),
        arrows=tuple(a for a in timeline.arrows if meets(a.source_time, a.target_time, a.phase)),
        exposed=tuple(
            replace(gap, start=max(gap.start, start), end=min(gap.end, end))
            for gap in timeline.exposed
            if gap.start < end and gap.end > start
        ),
        gathered=_clipped_curve(timeline.gathered, phases, start, end),
        gradients=_clipped_curve(timeline.gradients, phases, start, end),
    )


def _clipped_curve(curve: Curve, phases: range, start: float, end: float) -> Curve:
    """The points of these phases from `start` to `end`, after one at `start` with what is held then."""
    first = curve.ends[phases.start - 1] if phases.start else 0
    points = curve.points[first : curve.ends[phases.stop - 1]]
    held = curve.points[max(first - 1, 0)]
    if start > held[0]:
        held = [held, *(point for point in points if point[0] <= start)][-1]
        points = tuple(point for point in points if point[0] > start)
    kept = ((start, held[1]), *(point for point in points if point[0] <= end))
    return Curve(kept, (len(kept),))


class _Lives:
    """Which bytes are held from which node to which, of gathered parameters and of gradients."""

    def __init__(self, schedule: Schedule, phase: Phase, tasks: Iterable[Task]):
        self.begins: dict[fx.Node, tuple[str, int]] = {}
        self.ends: dict[fx.Node, list[tuple[str, int]]] = defaultdict(list)
        self.changes: list[tuple[float, int, str, int]] = []
        """(time, number in issue order, curve, bytes more)."""
        one = {(info(n).kind, flat): n for n in phase.graph.nodes for flat in info(n).flats}
        for node in phase.graph.nodes:
            found = info(node)
            # At F = 1 a cast or load is the whole unshard.
            whole = found.kind in ops.UNSHARDS_LOCALLY and found.queue == "compute"
            if found.kind == "all_gather" or whole:
                if kept := [flat for flat in found.flats if flat not in schedule.resident]:
                    frees = [one[("free", flat)] for flat in kept if ("free", flat) in one]
                    self._add(node, max(frees, default=None), "gathered")
            elif found.kind in ("flatten_grads", "reduce_scatter", "all_reduce"):
                end = one.get(("accumulate_grad", found.flat or "")) or one.get(("keep_shard", found.flat or ""))
                if end is not None and (schedule.offloaded or (found.kind == "flatten_grads" and schedule.F > 1)):
                    end = cast(fx.Node, end.args[0])  # once reduced, only the shard is needed, or its copy on the host
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
        # A FLAT without a slot is made where `.grad` will be.
        made_here = info(node).kind not in ("flatten_grads", "reduce_scatter", "all_reduce")
        size = planned or (info(node).num_bytes if made_here else 0)
        self.begins[node] = curve, size
        if end is not None:
            self.ends[end].append((curve, -size))

    def levels(self, curve: str, end: float) -> list[tuple[float, int]]:
        """(time, bytes from then on) in order of time, at one time in issue order; nothing is held after `end`."""
        changes = sorted(change for change in self.changes if change[2] == curve)
        sizes = accumulate(size for *_, size in changes)
        return [*((time, level) for (time, *_), level in zip(changes, sizes)), (end, 0)]
