"""Shared by the two prefetching passes: issue each AllGather some units ahead of its use."""

from __future__ import annotations

from torch import fx

from fxshard.ir import Phase, Remarks
from fxshard.ir.schedule import describe, info


def prefetch(phase: Phase, depth: int, remarks: Remarks, by: str) -> None:
    """Move each AG before the WAIT (or, if resident, the first use) of the unit `depth` places before it in use order.

    What would come before the first unit comes at the start of the phase. Gathers keep their order among themselves. A
    gather whose shard or cast would come too late is remarked, not moved.
    """
    order = phase.flats_in_use_order()
    start = next(n for n in phase.graph.nodes if n.op != "placeholder")
    issued: fx.Node | None = None
    for position, flat in enumerate(order):
        gather = phase.one("all_gather", flat)
        if gather is None:
            remarks.missed(flat, "still gathered from forward" if phase.name == "backward" else "held whole")
            continue
        target = position - depth
        at_start = target < 0 or (target == 0 and phase.one("all_gather", order[0]) is None)
        anchor = start if at_start else _starts(phase, order[target])
        if issued is not None and not issued < anchor:
            anchor = issued.next
        if anchor < gather:
            if (blocker := phase.blocker(gather, anchor)) is not None:
                remarks.missed(flat, f"AG may not pass {describe(blocker)}")
            elif phase.move_before(gather, anchor, by):
                remarks.passed(flat, f"AG issued {'first' if at_start else f'before {describe(anchor)}'}")
        issued = gather


def _starts(phase: Phase, flat: str) -> fx.Node:
    """Where the computation of a unit begins: the wait for its gather, or the first operator that reads it."""
    full = phase.full(flat)
    assert full is not None
    if info(full).kind == "wait":
        return full
    first = phase.first_use(flat)
    assert first is not None
    return first
