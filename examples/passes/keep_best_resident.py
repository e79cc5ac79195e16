"""Keep the units whose gathers cost most for their bytes gathered from forward to backward, within a budget.

Why      With memory to spare, the choice need not be between all units gathered twice and all kept. A unit that is kept
         saves the whole of its backward gather: latency / bytes + 1 / bandwidth for each byte of budget.
Assumes  gathers-inserted, frees-inserted; it runs before prefetching, which then sees only the gathers that are left.
Gives    residents-kept, as keep-root-resident gives it, for units of at most `budget_bytes` together; those of
         keep-root-resident come on top.
Keeps    Values bit for bit; the order of the gathers that are left.
Costs    Peak memory: the kept units' gathered bytes, at most `budget_bytes`, through the whole step. Beside them as many
         units are in flight as before; without the kept ones between, two large ones may be in flight together.
Source   ZeRO++'s hpZ and `reshard_after_forward` of torch.distributed.fsdp.fully_shard make this choice for the whole
         model, or by hand; the greedy choice by value per byte is Dantzig's for the knapsack problem.

The order of choice needs no cost model, so that all ranks choose alike: bandwidth adds the same to every byte and latency
more to a byte of a smaller unit, so smaller units come first, whatever the link. Before them comes the unit backward
reads first, if it is gathered at all: no gradient work lies before its gather, so all of it is exposed. Among equals
the first in backward goes first: it was used last in forward, so it is kept for the shortest time. A unit that does not
fit is passed over. How far the gradient work before a gather hides it is not weighed: it depends on the batch, which
may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule
from fxshard.ir.nodes import bytes_text, info
from fxshard.passes import Pass


@dataclass(frozen=True)
class KeepBestResident(Pass):
    name: ClassVar[str] = "keep-best-resident"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("residents-kept",)

    budget_bytes: int
    """Most gathered bytes to keep from forward to backward, beside what is kept already; 0 keeps nothing."""

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise ValueError(f"KeepBestResident(budget_bytes={self.budget_bytes!r}): a number of bytes was expected")

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        backward = schedule.backward
        if backward is None:
            return
        again = [flat for flat in backward.flats_in_use_order() if backward.one("all_gather", flat) is not None]
        if not again:
            remarks.missed("(all)", "backward gathers nothing again")
            return
        first = backward.flats_in_use_order()[0]
        left = self.budget_bytes
        for flat in sorted(again, key=lambda f: (f != first, schedule.flats[f].full_bytes)):
            size = schedule.flats[flat].full_bytes
            if size > left:
                remarks.missed(flat, f"{bytes_text(size)} do not fit in the {bytes_text(left)} left of the budget")
                continue
            schedule.keep_resident(flat, self.name)
            left -= size
            remarks.passed(flat, f"kept from forward to backward, {bytes_text(size)} of the budget")

    def ensures(self, schedule: Schedule) -> Iterable[str]:
        kept = schedule.backward.nodes("resident") if schedule.backward is not None else []
        size = sum(info(node).num_bytes for node in kept if info(node).by == self.name)
        if size > self.budget_bytes:
            yield f"{bytes_text(size)} are kept, the budget is {bytes_text(self.budget_bytes)}"
