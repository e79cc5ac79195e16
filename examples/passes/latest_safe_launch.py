"""Launch each AllGather as late as it is still hidden.

Why      Prefetching issues a gather a fixed number of units ahead, far enough for the slowest. Most are there long before
         they are read, and what lies gathered and unread is only memory.
Assumes  gathers-inserted, frees-inserted; it runs after prefetching and before rate-limit and plan-memory.
Gives    Each gather is issued right after the last FREE from which `fxshard.ir.clock` says that no phase is exposed for
         longer than before, with collectives as fast as stated and with all of them slower by `margin`.
Keeps    Values bit for bit; the set of operations; the order of gathers, of reduces, and every WAIT.
Costs    Host time when the schedule is made: for each gather some runs of the clock over its phase. Gathered bytes in
         flight only go down.
Source   ALAP scheduling of high-level synthesis; how far ahead is enough is what forward_prefetch_limit of DeepSpeed and
         the depth of torch.distributed.fsdp's set_modules_to_forward_prefetch ask the user.

Only a FREE gives memory back, so the points right after one are all that need to be tried, the latest first. The clock
runs with a host that does not run ahead: a CPU host does not, and a stream is held to the same points by the slots of the
memory plan, which the freed buffer and the next one share.

Times come from the shapes that were captured. All ranks must decide alike: where the first batch is not of one shape on
all ranks they may not, and compile then refuses with an AgreementError before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxshard.ir import Phase, Remarks, Schedule, clock
from fxshard.ir.costs import COLLECTIVE_QUEUES, Costs, Link
from fxshard.ir.nodes import describe, info
from fxshard.passes import Pass


@dataclass(frozen=True)
class LatestSafeLaunch(Pass):
    name: ClassVar[str] = "latest-safe-launch"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("latest-safe-launch",)

    margin: float = 0.25
    """It must hold as well if every collective takes this share longer; 0 trusts the times."""
    rates: tuple[float, float, float] | None = None
    """Bytes per second that operators read and write, seconds of latency and bytes per second of a collective, as of
    `Costs.linear`; None takes `schedule.costs`, or unit slots."""

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"LatestSafeLaunch(margin={self.margin!r}): a share of a collective's time was expected")

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        costs = self.costs(schedule)
        if not any(phase.all_gathers for phase in schedule.phases):
            remarks.missed("(all)", "nothing is gathered")
        for phase in schedule.phases:
            trial, copied = phase.copy()  # moves that are taken back leave no trace
            exposed = [_exposed(schedule, trial, c) for c in costs]
            limit = phase.output
            for gather in reversed(phase.all_gathers):
                flat, before = info(gather).flat or "", copied[gather].next
                limit = min(limit, *gather.users)
                frees = [free for free in reversed(phase.frees) if gather < free < limit]
                for free in frees:
                    trial.move_after(copied[gather], copied[free])
                    if all(_exposed(schedule, trial, c) <= e * (1 + 1e-9) for c, e in zip(costs, exposed)):
                        phase.move_after(gather, free, self.name)
                        remarks.passed(flat, f"AG launched after {describe(free)} in {phase.name}")
                        break
                else:
                    trial.move_before(copied[gather], before)
                    why = f"would be exposed after {describe(frees[-1])}" if frees else "has no FREE to wait for"
                    remarks.missed(flat, f"AG in {phase.name} {why}")
                limit = gather

    def costs(self, schedule: Schedule) -> list[Costs]:
        """The times to decide by: as stated, and with slower collectives. Cutting a segment in two costs nothing."""
        if self.rates is not None:
            compute, latency, rate = self.rates
            stated = Costs.linear(compute, dict.fromkeys(COLLECTIVE_QUEUES, (latency, rate)))
        else:
            stated = replace(schedule.costs or Costs.unit_slots(schedule), shortest=0.0)
        longer = 1 + self.margin
        slower = {q: Link(longer * link.latency, longer * link.per_byte) for q, link in stated.links.items()}
        return [stated, replace(stated, links=slower)]


def _exposed(schedule: Schedule, phase: Phase, costs: Costs) -> float:
    return clock.run(schedule, costs, phase, ahead=False).exposed[phase.name]
