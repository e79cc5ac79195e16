"""Shared by the two prefetching passes: issue each AllGather some units ahead of its use."""

from __future__ import annotations

from torch import fx

from fxshard.ir import Phase, Remarks
from fxshard.ir.nodes import describe


def prefetch(phase: Phase, depth: int, remarks: Remarks, by: str) -> None:
    """Move each AG before the WAIT of the unit `depth` places before it, in the order in which gathered units are used.

    What would come before the first of them comes at the start of the phase. A unit that is not gathered (a resident) is
    no place: its work is hidden under too. Gathers keep their order among themselves. A gather whose shard or cast would
    come too late is remarked, not moved.
    """
    with phase.indexed():
        start = next(n for n in phase.graph.nodes if n.op != "placeholder")
        waits: list[fx.Node] = []
        issued: fx.Node | None = None
        for flat in phase.flats_in_use_order():
            gather, full = phase.one("all_gather", flat), phase.full(flat)
            if gather is None or full is None:
                whole = phase.flats[flat].F == 1 or phase.name != "backward"
                remarks.missed(flat, "held whole" if whole else "still gathered from forward")
                continue
            at_start = len(waits) < depth
            anchor = start if at_start else waits[-depth]
            waits.append(full)
            if issued is not None and not issued < anchor:
                anchor = issued.next
            if anchor < gather:
                if (blocker := phase.blocker(gather, anchor)) is not None:
                    remarks.missed(flat, f"AG may not pass {describe(blocker)}")
                elif phase.move_before(gather, anchor, by):
                    remarks.passed(flat, f"AG issued {'first' if at_start else f'before {describe(anchor)}'}")
            issued = gather
