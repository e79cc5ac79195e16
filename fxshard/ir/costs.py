"""How long the operations of a schedule take: operators by their work, collectives `latency + bytes * per_byte`.

A schedule knows bytes and no times, so unless they are given time is in unit slots:

    compute      in proportion to the bytes its operators read and write; the median unit's forward is 1 slot
    collectives  in proportion to their bytes; those of a phase add up to 0.8 of its compute
    the rest     (WAIT, FREE, FLAT, CAST, ACC, LIMIT) takes no time

Costs are made once and serve every order of the same operations, so that orders can be compared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from fxshard.ir import ops
from fxshard.ir.aliasing import aliased_inputs, mutated_inputs
from fxshard.ir.nodes import info, tensor_bytes

if TYPE_CHECKING:
    from fxshard.ir.schedule import Schedule

COMMUNICATION_SHARE = 0.8
"""In unit slots: all collectives of a phase, in units of its compute."""

SHORTEST = 0.02
"""In unit slots: the least a compute segment or a collective takes, so that it can be seen."""

COLLECTIVE_QUEUES = tuple(ops.QUEUES[kind] for kind in ops.COLLECTIVES)


def touched_bytes(node: fx.Node) -> int:
    """Bytes an operator reads and writes, by the shapes it was captured with; 0 for a view."""
    if aliased_inputs(node) and not mutated_inputs(node):
        return 0
    return tensor_bytes(node) + sum(map(tensor_bytes, node.all_input_nodes))


@dataclass(frozen=True)
class Link:
    """What the collectives of a queue go over; bytes as the schedule's text states them."""

    latency: float = 0.0
    per_byte: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Times of operators and collectives, in `unit` (`slots`, `ms`); every other node takes none."""

    unit: str
    per_work: float
    """Time of one unit of work."""
    links: Mapping[str, Link]
    """By queue, or by `phase/queue` where phases differ; without one a collective takes `shortest`."""
    work: Callable[[fx.Node], float] = touched_bytes
    """The work of an operator."""
    shortest: float = 0.0
    """The least time of a segment of operators, and of a collective. A segment cut in two may take longer by it: set it
    to 0 to compare orders."""
    _known: dict[fx.Node, float] = field(default_factory=dict, repr=False, compare=False)
    """Work does not depend on the order and is asked for again after every move."""

    @staticmethod
    def unit_slots(schedule: Schedule) -> Costs:
        """Costs by bytes alone, for this schedule and what passes that only move make of it."""
        known: dict[fx.Node, float] = {}
        per_unit: dict[str, float] = defaultdict(float)
        bare = Costs("slots", 1.0, {}, _known=known)
        for unit, nodes in schedule.forward.steps():
            if info(nodes[0]).kind == "compute":
                per_unit[unit] += sum(bare.works(nodes))
        # Where nothing is gathered yet, all of forward is one slot.
        median = statistics.median([per_unit[unit] for unit in per_unit if unit] or per_unit.values() or [0.0])
        costs = Costs("slots", 1 / median if median else 0.0, {}, shortest=SHORTEST, _known=known)
        links: dict[str, Link] = {}
        for phase in schedule.phases:
            compute, moved = 0.0, 0
            for _, nodes in phase.steps():
                if info(nodes[0]).kind == "compute":
                    compute += costs.operators(costs.works(nodes))
                elif info(nodes[0]).kind in ops.COLLECTIVES:
                    moved += info(nodes[0]).num_bytes
            link = Link(per_byte=COMMUNICATION_SHARE * compute / moved if moved else 0.0)
            links |= {f"{phase.name}/{queue}": link for queue in COLLECTIVE_QUEUES}
        return Costs("slots", costs.per_work, links, shortest=SHORTEST, _known=known)

    @staticmethod
    def linear(compute: float | Callable[[fx.Node], float], links: Mapping[str, tuple[float, float]]) -> Costs:
        """Costs in `ms` from known rates.

        `compute`: the bytes per second that operators read and write, or a function that gives the seconds of each.
        `links`: for each queue with collectives its latency in seconds and its bytes per second, of the collective as
        the schedule's text states it: a unit of 1 GiB gathered in 10 ms is 100 GiB/s, whatever the number of ranks.
        Raises ValueError for a queue that is none of `unshard`, `reduce`, `replicate`, and for a rate that is not positive.
        """
        if unknown := sorted(set(links) - set(COLLECTIVE_QUEUES)):
            raise ValueError(f"links has {', '.join(map(repr, unknown))}: allowed are {', '.join(COLLECTIVE_QUEUES)}")
        rates = [rate for _, rate in links.values()] + ([] if callable(compute) else [compute])
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"bytes per second must be positive, not {min(rates)}")
        made = {queue: Link(1e3 * latency, 1e3 / rate) for queue, (latency, rate) in links.items()}
        return Costs("ms", 1e3, made, compute) if callable(compute) else Costs("ms", 1e3 / compute, made)

    def works(self, nodes: Sequence[fx.Node]) -> list[float]:
        """The work of each operator."""
        for node in nodes:
            if node not in self._known:
                self._known[node] = self.work(node)
        return [self._known[node] for node in nodes]

    def operators(self, works: Sequence[float]) -> float:
        """The time of operators that follow each other, by their work."""
        return max(self.shortest, self.per_work * sum(works))

    def collective(self, phase: str, node: fx.Node) -> float:
        """The time of a collective, from its start on an idle link."""
        found = info(node)
        link = self.links.get(f"{phase}/{found.queue}") or self.links.get(found.queue) or Link()
        return max(self.shortest, link.latency + link.per_byte * found.num_bytes)
