"""Issue each unit's backward AllGather ahead of the gradient work before it.

Why      Collectives of one communicator run in issue order. Left alone, RS(u) is issued before AG(u-1), so the
         gradient of u-1 waits for both: both are exposed.
Assumes  gathers-inserted, frees-inserted.
Gives    backward-prefetch: AG(u-1) precedes the gradient of u, and so RS(u). The order is the true order of use in the
         backward graph, so an encoder-decoder is right too.
Keeps    Values bit for bit; the set of operations; the order within each kind; every WAIT.
Costs    `depth` more units unsharded at a time.
Source   FSDP paper, section 3.3.2; torch.distributed.fsdp.BackwardPrefetch.BACKWARD_PRE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule
from fxshard.options import check_depth
from fxshard.passes.base import Pass
from fxshard.passes.prefetch import prefetch


@dataclass(frozen=True)
class BackwardPrefetch(Pass):
    name: ClassVar[str] = "backward-prefetch"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("backward-prefetch",)

    depth: int = 1
    """How many AllGathers ahead."""

    def __post_init__(self) -> None:
        check_depth("depth", self.depth)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        if schedule.backward is not None and self.depth:
            prefetch(schedule.backward, self.depth, remarks, self.name)
