"""Keep the root gathered from forward to backward.

Why      The root's last parameters are used last in forward and first in backward: freeing and gathering them again in
         between is exposed and frees nothing for long.
Assumes  gathers-inserted, frees-inserted.
Gives    residents-kept: a resident FlatParameter has one AG a step (none at F = 1), no FREE in forward, and a
         `resident` input in backward whose FREE ends its residency.
Keeps    Values bit for bit.
Costs    Peak memory: the root's gathered bytes through the whole step (all units' with `everything`).
Source   FSDP paper, section 3.3.1; `reshard_after_forward` of torch.distributed.fsdp.fully_shard.

The runtime holds one buffer for all calls, whose contents are the same until the parameters change. A FlatParameter that
backward does not read (an embedding) is not kept. A forward-only schedule keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule
from fxshard.passes.base import Pass
from fxshard.passes.keep_resident import keep


@dataclass(frozen=True)
class KeepRootResident(Pass):
    name: ClassVar[str] = "keep-root-resident"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("residents-kept",)

    everything: bool = False
    """Keep every unit, not only the root (no reshard after forward)."""

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        if schedule.backward is None:
            return
        for flat in schedule.flats.values():
            if flat.is_root or self.everything:
                keep(schedule, flat, self.name, remarks)
