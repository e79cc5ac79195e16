"""Keep chosen units gathered from forward to backward.

Why      The last units of forward are the first of backward: what is freed and gathered again in between costs a collective
         and saves memory for a moment only.
Assumes  gathers-inserted, frees-inserted.
Gives    residents-kept: see keep-root-resident.
Keeps    Values bit for bit.
Costs    Peak memory: the gathered bytes of the units kept, through the whole step.
Source   `reshard_after_forward` of torch.distributed.fsdp.fully_shard, a choice for each module there.

Units that backward does not read, and those kept already, are left alone.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import ClassVar

from fxshard.errors import ScheduleError
from fxshard.ir import FlatParameter, Remarks, Schedule
from fxshard.passes.base import Pass


@dataclass(frozen=True)
class KeepResident(Pass):
    name: ClassVar[str] = "keep-resident"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("residents-kept",)

    reshard: tuple[tuple[str, bool], ...] = ()
    """Patterns of unit names, and whether those are freed after forward; the last that fits counts, else they are."""

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        if schedule.backward is None:
            return
        for flat in schedule.flats.values():
            fitting = [freed for pattern, freed in self.reshard if fnmatch.fnmatchcase(flat.unit, pattern)]
            if not fitting or fitting[-1] or flat.name in schedule.resident:
                continue
            keep(schedule, flat, self.name, remarks)


def keep(schedule: Schedule, flat: FlatParameter, by: str, remarks: Remarks) -> None:
    """Keep a FlatParameter from forward to backward, or remark why not."""
    try:
        schedule.keep_resident(flat.name, by)
    except ScheduleError as reason:
        remarks.missed(flat.name, str(reason))
    else:
        remarks.passed(flat.name, f"kept from forward to backward, {flat.full_bytes} bytes")
