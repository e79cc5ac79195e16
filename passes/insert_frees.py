"""Free each gathered buffer right after its last use in each phase.

Why      A gathered buffer is F times its shard; alive for longer than it is read it is only memory.
Assumes  gathers-inserted.
Gives    frees-inserted: one FREE a gathered FlatParameter and phase, after the last operator that reads its memory,
         through any chain of views and aliases.
Keeps    Values bit for bit; every other node and its order.
Costs    Nothing.
Source   FSDP paper, section 3.2 (reshard).

A cast at F = 1 makes a full buffer as a gather does and is freed the same way. The shard itself is never freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule, ops
from fxshard.ir.aliasing import storage_users
from fxshard.ir.nodes import describe, info
from fxshard.passes.base import Pass


@dataclass(frozen=True)
class InsertFrees(Pass):
    name: ClassVar[str] = "insert-frees"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted",)
    provides: ClassVar[tuple[str, ...]] = ("frees-inserted",)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        for phase in schedule.phases:
            with phase.indexed():
                for flat_name in phase.flats_in_use_order():
                    full = phase.full(flat_name)
                    if full is None or info(full).kind == "shard":
                        continue
                    last = max(storage_users(full))
                    with phase.graph.inserting_after(last):
                        phase.call(ops.free, (full, flat_name), flat=schedule.flats[flat_name], by=self.name)
                    remarks.passed(flat_name, f"freed after {describe(last)} in {phase.name}")
