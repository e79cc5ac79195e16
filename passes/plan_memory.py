"""Give every communication buffer a fixed slot of one arena.

Why      A steady step must not allocate; a caching allocator over several streams holds more than it needs.
Assumes  gathers-inserted, reduces-inserted, frees-inserted; the order is final.
Gives    memory-planned: `node.meta["slot"]` of each AG, CAST, LOAD, FLAT, RS and AR that needs memory, 16-byte aligned,
         by interval colouring; a slot names the node whose end frees its bytes for it; `schedule.memory` holds the totals.
         A STORE's slot is of a second arena, in host memory.
Keeps    Everything but the meta.
Costs    The arena's size, stated in `schedule.memory`.
Source   FSDP paper, section 3.4 (what the caching allocator does instead); register allocation by linear scan.

Lives: a gathered buffer from AG to FREE; a cast from CAST or LOAD to the WAIT of its gather; a gradient buffer from FLAT to
the end of its reduce; reduce output and staging from RS to ACC, or to the WAIT of its STORE, which then lives to ACC. What
lands in `.grad` (`Schedule.lands`) has no slot: it lies where it is to stay. The slot
of a LOAD that casts holds what it makes and, behind that, what came from the host. Residents have memory of their own.
Phases share the arena: every queue joins the compute queue at the end of a phase. A bucket has one slot, its members in
order and then the staging of a direct exchange, up to the last of their FREEs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.ir import FlatParameter, Phase, Remarks, Schedule, Slot, ops
from fxshard.ir.layout import aligned
from fxshard.ir.nodes import bytes_text, info
from fxshard.passes.base import Pass


@dataclass
class _Buffer:
    """`node` makes it, `end` is the last node that needs it; positions are in issue order."""

    node: fx.Node
    end: fx.Node
    num_bytes: int
    start_position: int
    end_position: int
    offset: int = 0


@dataclass(frozen=True)
class PlanMemory(Pass):
    name: ClassVar[str] = "plan-memory"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "reduces-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("memory-planned",)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        memory = schedule.memory
        memory.arena_bytes = memory.host_bytes = memory.peak_gathered_bytes = memory.peak_gradient_bytes = 0
        memory.resident_bytes = sum(schedule.flats[flat].full_bytes for flat in schedule.resident)
        for phase in schedule.phases:
            with phase.indexed():
                buffers = _lives(schedule, phase)
            memory.arena_bytes = max(memory.arena_bytes, _colour([b for b in buffers if not _is_on_host(b.node)]))
            memory.host_bytes = max(memory.host_bytes, _colour([b for b in buffers if _is_on_host(b.node)]))
            gathered = _peak([b for b in buffers if _is_gathered(b.node)])
            memory.peak_gathered_bytes = max(memory.peak_gathered_bytes, gathered + memory.resident_bytes)
            gradients = _peak(
                [b for b in buffers if info(b.node).kind in ("flatten_grads", "reduce_scatter", "all_reduce")]
            )
            memory.peak_gradient_bytes = max(memory.peak_gradient_bytes, gradients)
        remarks.passed(
            "(all)", f"arena {bytes_text(memory.arena_bytes)}, residents {bytes_text(memory.resident_bytes)}"
        )


def _is_gathered(node: fx.Node) -> bool:
    found = info(node)
    return found.kind == "all_gather" or (found.kind in ops.UNSHARDS_LOCALLY and found.queue == "compute")


def _is_on_host(node: fx.Node) -> bool:
    return info(node).kind == "store_grad"


def unshard_bytes(schedule: Schedule, node: fx.Node) -> tuple[int, int]:
    """Bytes of the slot of a CAST or LOAD: of what it makes, unless that is a resident, and of what a LOAD that casts brings
    from the host first (held * S,)."""
    flat = schedule.flats[info(node).flat or ""]
    casts = info(node).kind == "load_shard" and flat.param_dtype != flat.dtype
    loaded = schedule.held_shards * flat.shard_numel * flat.dtype.itemsize if casts else 0
    made = 0 if flat.F == 1 and flat.name in schedule.resident else info(node).num_bytes
    return aligned(made), aligned(loaded)


def reduce_bytes(schedule: Schedule, flat: FlatParameter) -> tuple[int, int]:
    """Bytes of a ReduceScatter's output (held * S,), unless it lands in `.grad`, and of its staging."""
    output = schedule.held_shards * flat.shard_numel * schedule.reduced_dtype(flat).itemsize
    staging = schedule.received_chunks(flat) * flat.shard_numel * flat.reduce_dtype.itemsize
    return 0 if schedule.lands(flat) else aligned(output), aligned(staging)


def all_reduce_bytes(schedule: Schedule, flat: FlatParameter) -> int:
    """Bytes of an AllReduce's staging: this rank's part of the shard from each other replica."""
    part = math.ceil(flat.shard_numel / schedule.replicas)
    return aligned((schedule.replicas - 1) * part * flat.reduce_dtype.itemsize) if schedule.direct_exchange else 0


def bucket_bytes(schedule: Schedule, bucket: fx.Node) -> int:
    """Bytes of a bucket's members, each 16-byte aligned, residents not counted, and of its staging: all ranks' shards."""
    flats = [schedule.flats[name] for name in info(bucket).members]
    staging = sum(flat.full_bytes for flat in flats) if schedule.direct_exchange else 0
    return sum(aligned(flat.full_bytes) for flat in flats if flat.name not in schedule.resident) + staging


def _released(schedule: Schedule, phase: Phase, wait: fx.Node) -> fx.Node:
    """Where the member of a bucket that `wait` is for no longer needs the bucket's slot."""
    flat = info(wait).flat or ""
    return wait if flat in schedule.resident else phase.one("free", flat) or phase.output


def _lives(schedule: Schedule, phase: Phase) -> list[_Buffer]:
    position = {node: i for i, node in enumerate(phase.graph.nodes)}
    buffers = []

    def add(node: fx.Node, end: fx.Node, num_bytes: int) -> None:
        if num_bytes:
            buffers.append(_Buffer(node, end, aligned(num_bytes), position[node], position[end]))

    for node in phase.graph.nodes:
        found = info(node)
        if found.kind == "all_gather" and found.members:
            add(node, max(_released(schedule, phase, wait) for wait in node.users), bucket_bytes(schedule, node))
            continue
        if found.flat is None or found.flat not in schedule.flats:
            continue
        flat = schedule.flats[found.flat]
        if found.kind == "all_gather" and found.flat not in schedule.resident:
            add(node, phase.one("free", found.flat) or phase.output, flat.full_bytes)
        elif found.kind in ops.UNSHARDS_LOCALLY:
            if flat.F > 1:
                gather = next(iter(node.users))
                add(node, min(gather.users), sum(unshard_bytes(schedule, node)))
            else:
                add(node, phase.one("free", found.flat) or phase.output, sum(unshard_bytes(schedule, node)))
        elif found.kind in ("flatten_grads", "reduce_scatter", "all_reduce"):
            end = phase.landing(found.flat)
            assert end is not None
            value: fx.Node = end.args[0]  # type: ignore[assignment]
            stored = info(value).kind == "wait" and info(value.args[0]).kind == "store_grad"  # type: ignore[arg-type]
            if stored:
                end = value  # the rest is on the host
            if found.kind == "flatten_grads":
                made = 0 if flat.F == 1 and schedule.lands(flat) else flat.grad_bytes
                # With a collective, the wait: what it read is no longer needed.
                add(node, value if info(value).kind == "wait" and flat.F > 1 else end, made)
            elif found.kind == "reduce_scatter":
                add(node, end, sum(reduce_bytes(schedule, flat)))
            else:
                add(node, end, all_reduce_bytes(schedule, flat))
        elif found.kind == "store_grad":
            end = phase.landing(found.flat)
            assert end is not None
            add(node, end, found.num_bytes)
    return buffers


def _colour(buffers: list[_Buffer]) -> int:
    """First fit in order of start; returns the bytes used. Stamps the slots.

    `ended` says of every byte which of the buffers that had it and ended did so last, as intervals that do not overlap.
    """
    alive: list[_Buffer] = []
    ended: list[tuple[int, int, _Buffer]] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: (b.start_position, -b.num_bytes)):
        gone = sorted((b for b in alive if b.end_position < buffer.start_position), key=lambda b: b.end_position)
        for other in gone:
            ended = _covered(ended, other)
        alive = sorted((b for b in alive if b.end_position >= buffer.start_position), key=lambda b: b.offset)
        offset = 0
        for other in alive:
            if offset + buffer.num_bytes <= other.offset:
                break
            offset = max(offset, other.offset + other.num_bytes)
        buffer.offset = offset
        before = [b for start, stop, b in ended if start < offset + buffer.num_bytes and offset < stop]
        latest = max(before, key=lambda b: b.end_position, default=None)
        after = (latest.end.name,) if latest is not None else ()
        buffer.node.meta["slot"] = Slot(offset, buffer.num_bytes, after)
        alive.append(buffer)
        total = max(total, offset + buffer.num_bytes)
    return total


def _covered(intervals: list[tuple[int, int, _Buffer]], buffer: _Buffer) -> list[tuple[int, int, _Buffer]]:
    """The intervals with those bytes that a buffer had given to it."""
    begin, end = buffer.offset, buffer.offset + buffer.num_bytes
    rest = [
        piece
        for start, stop, owner in intervals
        for piece in ((start, min(stop, begin), owner), (max(start, end), stop, owner))
        if piece[0] < piece[1]
    ]
    return [*rest, (begin, end, buffer)]


def _peak(buffers: list[_Buffer]) -> int:
    """Most bytes alive at once; a buffer is alive from its node up to and including its end."""
    alive = peak = 0
    changes = [(b.start_position, 0, b.num_bytes) for b in buffers] + [
        (b.end_position, 1, -b.num_bytes) for b in buffers
    ]
    for _, _, num_bytes in sorted(changes):
        alive += num_bytes
        peak = max(peak, alive)
    return peak
