"""Issue each unit's forward AllGather ahead of the computation before it.

Why      A gather overlaps only what is issued after it. A CUDA host that runs ahead does this by itself; a slow host
         and a CPU runtime do not, and the schedule must say it.
Assumes  gathers-inserted, frees-inserted.
Gives    forward-overlap: AG(u+1) precedes the WAIT of u and so all computation of u.
Keeps    Values bit for bit; the set of operations; the order within each kind; every WAIT.
Costs    `depth` more units unsharded at a time.
Source   FSDP paper, sections 3.3.1 and 3.3.3 (overlap; forward prefetch for static graphs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule
from fxshard.options import check_depth
from fxshard.passes.base import Pass
from fxshard.passes.prefetch import prefetch


@dataclass(frozen=True)
class ForwardOverlap(Pass):
    name: ClassVar[str] = "forward-overlap"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("forward-overlap",)

    depth: int = 1
    """How many AllGathers ahead."""

    def __post_init__(self) -> None:
        check_depth("depth", self.depth)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        if self.depth:
            prefetch(schedule.forward, self.depth, remarks, self.name)
