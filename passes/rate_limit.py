"""Bound the units gathered and not yet freed, and the gradient buffers waiting for their reduce.

Why      A host that runs ahead issues every gather it meets; memory then grows with the model, not with the bound. A
         limit on gathers alone leaves the gradient buffers (in a report a peak of 7.2 GB became 10.3).
Assumes  gathers-inserted, frees-inserted, reduces-inserted.
Gives    rate-limited: buffers of at most `limit` units gathered (residents not counted; a unit of several
         FlatParameters, a frozen or a quantised part, is one) and at most `limit_bytes` of them at any point of the issue
         order, and `throttle` edges that hold a stream to the same bound; at most `limit` gradient buffers between FLAT
         and the end of their reduce.
Keeps    Values bit for bit; the order of counted gathers among themselves, and of reduces.
Costs    Overlap, where the limit is tighter than what prefetching asked for.
Source   FSDP paper, section 3.4.2 (two in flight is the least that still overlaps).

A limit below what the graph needs at once (an operator that reads two units) is an error naming the units.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import Phase, Remarks, Schedule, ops
from fxshard.ir.nodes import describe, info
from fxshard.options import check_limit
from fxshard.passes.base import Pass


@dataclass(frozen=True)
class RateLimit(Pass):
    name: ClassVar[str] = "rate-limit"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted", "reduces-inserted")
    provides: ClassVar[tuple[str, ...]] = ("rate-limited",)

    limit: int | None = 2
    """Units in flight, and gradient buffers waiting; None = no bound."""
    limit_bytes: int | None = None
    """Bytes of gathered buffers in flight; None = no bound."""

    def __post_init__(self) -> None:
        check_limit("limit", self.limit)
        check_limit("limit_bytes", self.limit_bytes)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        for phase in schedule.phases:
            with phase.indexed():
                self._limit_gathers(schedule, phase, remarks)
                if self.limit is not None or self.limit_bytes is not None:
                    self._throttle(schedule, phase)
                if self.limit is not None:
                    self._limit_gradients(phase, remarks)
        schedule.rate_limit, schedule.rate_limit_bytes = self.limit, self.limit_bytes

    def _limit_gathers(self, schedule: Schedule, phase: Phase, remarks: Remarks) -> None:
        alive: dict[str, int] = {}
        held_back: deque[fx.Node] = deque()

        for node in list(phase.graph.nodes):
            kind, flat = info(node).kind, info(node).flat or ""
            if kind == "all_gather" and (brought := counted(schedule, node)):
                if not held_back and self._fits(schedule, alive, brought):
                    alive.update(brought)
                else:
                    held_back.append(node)
            elif kind == "wait" and node.args[0] in held_back:
                while node.args[0] in held_back:
                    gather = held_back.popleft()
                    brought = counted(schedule, gather)
                    if not self._fits(schedule, alive, brought):
                        self._refuse(schedule, phase, alive, brought)
                    phase.move_before(gather, node, self.name)
                    alive.update(brought)
                    remarks.passed(info(gather).flat or "", f"AG held back to {describe(node)}")
            elif kind == "free" and flat in alive:
                del alive[flat]
                after = node
                while held_back and self._fits(schedule, alive, counted(schedule, held_back[0])):
                    gather = held_back.popleft()
                    phase.move_before(gather, after.next, self.name)
                    alive.update(counted(schedule, gather))
                    after = gather
                    remarks.passed(info(gather).flat or "", f"AG held back to {describe(node)}")

    def _refuse(self, schedule: Schedule, phase: Phase, alive: dict[str, int], brought: dict[str, int]) -> None:
        units = units_of(schedule, [*alive, *brought])
        needed = len(units)
        sizes = sum([*alive.values(), *brought.values()])
        over_count = self.limit is not None and needed > self.limit
        what = (
            f"rate_limit={self.limit} is below the {needed} units"
            if over_count
            else f"rate_limit_bytes={self.limit_bytes} is below the {sizes} bytes"
        )
        flat, use = min(((f, phase.first_use(f)) for f in brought), key=lambda pair: pair[1] or phase.output)
        where = f", where {describe(use)} reads '{flat}'" if use is not None else ""
        raise ScheduleError(
            f"{what} that {phase.name} needs at once: {', '.join(map(repr, units))}{where}. "
            f"Raise it to at least {needed if over_count else sizes}, or put these parameters into one unit"
        )

    def _throttle(self, schedule: Schedule, phase: Phase) -> None:
        """Each AG waits for the first FREE after which it fits: the stream obeys the bound, not only the issue order."""
        issued: dict[str, int] = {}
        frees: list[fx.Node] = []
        for node in list(phase.graph.nodes):
            kind, flat = info(node).kind, info(node).flat or ""
            if kind == "free" and flat in issued:
                frees.append(node)
            elif kind == "all_gather" and (brought := counted(schedule, node)):
                freed = self._first_fit(schedule, issued, frees, brought)
                issued.update(brought)
                if freed:
                    self._throttle_one(schedule, phase, node, frees[freed - 1])
            elif kind == "all_gather" and frees and not schedule.resident.issuperset(info(node).flats):
                # Not counted, and still not to run further ahead than the issue order says.
                self._throttle_one(schedule, phase, node, frees[-1])

    def _throttle_one(self, schedule: Schedule, phase: Phase, gather: fx.Node, free: fx.Node) -> None:
        flats = [schedule.flats[flat] for flat in info(gather).flats]
        with phase.graph.inserting_before(gather):
            phase.call(ops.throttle, (free, gather.args[1]), flat=flats, by=self.name)

    def _fits(self, schedule: Schedule, there: dict[str, int], brought: dict[str, int]) -> bool:
        """Whether what an AG brings is within both bounds beside what is there already."""
        alive = there | brought
        return self._within(len(units_of(schedule, alive)), sum(alive.values()))

    def _within(self, num_units: int, num_bytes: int) -> bool:
        fits = self.limit is None or num_units <= self.limit
        return fits and (self.limit_bytes is None or num_bytes <= self.limit_bytes)

    def _first_fit(
        self, schedule: Schedule, issued: dict[str, int], frees: Sequence[fx.Node], brought: dict[str, int]
    ) -> int:
        """After how many of `frees`, of what was issued, an AG is within both bounds."""
        alive = issued | brought
        units, num_bytes = Counter(schedule.flats[flat].unit for flat in alive), sum(alive.values())
        for k, free in enumerate(frees):
            if self._within(len(units), num_bytes):
                return k
            flat = info(free).flat or ""
            if flat in alive and flat not in brought:
                num_bytes -= alive.pop(flat)
                units[schedule.flats[flat].unit] -= 1
                units += Counter()  # without those of which nothing is left
        assert self._within(len(units), num_bytes), "the issue order is within the bound"
        return len(frees)

    def _limit_gradients(self, phase: Phase, remarks: Remarks) -> None:
        """Before gradient buffer k is filled, the reduce of buffer k - limit has ended and reached `.grad`."""
        assert self.limit is not None
        waiting: deque[str] = deque()
        for node in phase.nodes("flatten_grads"):
            flat = info(node).flat or ""
            if len(waiting) == self.limit:
                oldest = waiting.popleft()
                for member in _completion(phase, oldest):
                    if node < member:
                        phase.move_before(member, node, self.name)
                remarks.passed(oldest, f"its reduce ends before {describe(node)}")
            waiting.append(flat)


def counted(schedule: Schedule, gather: fx.Node) -> dict[str, int]:
    """The gathered buffers an AG brings that the limit counts, and their bytes; a bucket brings one a member."""
    return {flat: schedule.flats[flat].full_bytes for flat in info(gather).flats if schedule.counts(flat)}


def units_of(schedule: Schedule, flats: Iterable[str]) -> list[str]:
    """The units of these FlatParameters, each once."""
    return list(dict.fromkeys(schedule.flats[flat].unit for flat in flats))


def _completion(phase: Phase, flat: str) -> list[fx.Node]:
    """The compute-queue WAIT of a reduce and what hands the gradient out; nothing where no collective is needed."""
    landing = phase.landing(flat)
    assert landing is not None
    extra = [n for n in landing.all_input_nodes if info(n).kind == "wait"]
    return [*sorted(extra), landing]
