"""A schedule executed in virtual time: when every node starts and ends, and where compute waits for communication.

The host issues in order and never blocks; unless it runs ahead (`ahead`), nothing starts before compute has done all
that was issued before, as where the host itself computes (CPU). A queue runs in issue order; a node starts when its
queue is free, its inputs are ready and its slot is free. Collectives of the shard group (unshard and reduce) share one
communicator and so run one at a time in issue order. A phase starts when the one before it has ended.

One walk over the nodes; 96 blocks take a few tenths of a second, and less when the same costs are used again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import ops
from fxshard.ir.costs import Costs
from fxshard.ir.nodes import Slot, describe, info
from fxshard.ir.phase import Phase
from fxshard.ir.schedule import Schedule


@dataclass(frozen=True)
class Task:
    """What occupies a queue, or passes it in no time: a communication node, or operators that follow each other."""

    phase: str
    queue: str
    unit: str
    """Of operators, the unit whose code they are; '' for a communication node."""
    nodes: tuple[fx.Node, ...]
    start: float
    end: float
    issued: float
    """When the compute queue has done all that was issued before."""

    @property
    def node(self) -> fx.Node:
        return self.nodes[0]

    @property
    def kind(self) -> str:
        return info(self.nodes[0]).kind


@dataclass(frozen=True)
class Gap:
    """The compute queue idle because of `cause`: a collective, or the node that could not start earlier."""

    phase: str
    start: float
    end: float
    cause: fx.Node


@dataclass(frozen=True)
class Span:
    """A phase on the time axis; `exposed` of it the compute queue is idle."""

    phase: str
    start: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Times:
    """Tasks and gaps in issue order, phase after phase; all times in the unit of `costs`."""

    costs: Costs
    spans: tuple[Span, ...]
    tasks: tuple[Task, ...]
    gaps: tuple[Gap, ...]
    _begins: dict[fx.Graph, float]
    _nodes: dict[fx.Node, tuple[float, float]]

    def start(self, node: fx.Node) -> float:
        """When a node starts. One that no queue runs (placeholder, view of a parameter, output) is there once its inputs
        are, and its phase has begun. Raises KeyError for a node of a phase that was not run."""
        return self._interval(node)[0]

    def end(self, node: fx.Node) -> float:
        """When a node ends; see `start`."""
        return self._interval(node)[1]

    def _interval(self, node: fx.Node) -> tuple[float, float]:
        if node in self._nodes:
            return self._nodes[node]
        there = max(map(self.end, node.all_input_nodes), default=self._begins[node.graph])
        return there, there

    @property
    def exposed(self) -> dict[str, float]:
        """By phase, how long compute is idle."""
        return {span.phase: span.exposed for span in self.spans}

    @property
    def total(self) -> float:
        """When the last phase ends."""
        return self.spans[-1].end


def run(schedule: Schedule, costs: Costs | None = None, phase: Phase | None = None, *, ahead: bool = True) -> Times:
    """Execute `schedule`, or one `phase` of it from time 0, as its nodes are ordered now. Changes nothing.

    Works after any pass; what is not inserted yet takes no time. `costs` defaults to the schedule's, or unit slots made anew: a
    pass that compares orders makes them once. `ahead`: whether the host runs ahead of compute. Raises ScheduleError where a
    planned slot is freed by a node that comes later.
    """
    costs = costs or schedule.costs or Costs.unit_slots(schedule)
    queues: list[_Queues] = []
    for each in schedule.phases if phase is None else (phase,):
        queues.append(_Queues(each, costs, queues[-1].end if queues else 0.0, ahead))
    return Times(
        costs,
        tuple(q.span for q in queues),
        tuple(task for q in queues for task in q.tasks),
        tuple(gap for q in queues for gap in q.gaps),
        {q.phase.graph: q.begin for q in queues},
        {node: interval for q in queues for node, interval in q.nodes.items()},
    )


class _Queues:
    """The queues of one phase, run from `begin`."""

    def __init__(self, phase: Phase, costs: Costs, begin: float, ahead: bool):
        self.phase, self.begin, self.ahead = phase, begin, ahead
        self.free: dict[str, float] = defaultdict(lambda: begin)
        """When each queue, and each communicator, is free again."""
        self.nodes: dict[fx.Node, tuple[float, float]] = {}
        self.ends: dict[str, float] = {}
        """By name, as slots refer to nodes."""
        self.tasks: list[Task] = []
        self.gaps: list[Gap] = []
        for unit, nodes in phase.steps():
            self._run(unit, nodes, costs)

    @property
    def end(self) -> float:
        return max(self.free.values(), default=self.begin)

    @property
    def span(self) -> Span:
        return Span(self.phase.name, self.begin, self.end, sum(gap.end - gap.start for gap in self.gaps))

    def _run(self, unit: str, nodes: list[fx.Node], costs: Costs) -> None:
        """Run a communication node, or operators that follow each other, as early as may be."""
        node = nodes[0]
        kind, queue = info(node).kind, info(node).queue
        works = costs.works(nodes) if kind == "compute" else []
        occupied = [queue]
        duration = 0.0
        if kind == "compute":
            duration = costs.operators(works)
        elif kind in ops.COLLECTIVES:
            duration = costs.collective(self.phase.name, node)
            occupied.append(ops.COMMUNICATORS.get(queue, queue))
        issued = self.free["compute"]
        start = max([self.free[each] for each in occupied] + [self._ready(each) for each in nodes])
        if not self.ahead:
            start = max(start, issued)
        end = start + duration
        if queue == "compute" and start > issued:
            cause = node.args[0] if kind == "wait" else node
            self.gaps.append(Gap(self.phase.name, issued, start, cause))  # type: ignore[arg-type]
        self.free.update(dict.fromkeys(occupied, end))
        self.tasks.append(Task(self.phase.name, queue, unit, tuple(nodes), start, end, issued))
        work, done, begin = sum(works), 0.0, start
        for i, each in enumerate(nodes):  # operators share the time of their segment
            done += works[i] if works else 0.0
            after = min(end, start + duration * done / work) if work and each is not nodes[-1] else end
            self.nodes[each] = begin, after
            self.ends[each.name] = begin = after

    def _ready(self, node: fx.Node) -> float:
        """When the inputs of a node, and the slot it writes, are there."""
        held = [self.nodes[source][1] for source in node.all_input_nodes if source in self.nodes]
        slot: Slot | None = node.meta.get("slot")
        for name in slot.after if slot is not None else ():
            if name not in self.ends:
                raise ScheduleError(
                    f"{describe(node)} takes a slot that {name} frees only later: the memory plan is of another order"
                )
            held.append(self.ends[name])
        return max(held, default=self.begin)
