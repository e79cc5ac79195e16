"""Rules about memory: the rate limit, and slots of the arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxshard.ir import ops
from fxshard.ir.aliasing import storage_users
from fxshard.ir.nodes import Slot, describe, info
from fxshard.ir.phase import Phase
from fxshard.ir.rules import Problem
from fxshard.ir.schedule import Schedule


def within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """What is gathered, residents not counted, never exceeds the rate limit, in units or in bytes."""
    problems = []
    alive: dict[str, int] = {}
    for node in phase.graph.nodes:
        kind, flat = info(node).kind, info(node).flat or ""
        if kind == "all_gather" and (counted := [f for f in info(node).flats if schedule.counts(f)]):
            alive.update({f: schedule.flats[f].full_bytes for f in counted})
            names, size = ", ".join(map(repr, sorted(alive))), sum(alive.values())
            if over_count(schedule, alive):
                text = f"too many units in flight ({names}), the limit is rate_limit={schedule.rate_limit}"
                problems.append((node, text))
            if schedule.rate_limit_bytes is not None and size > schedule.rate_limit_bytes:
                text = f"{size} gathered bytes in flight ({names}), the limit is rate_limit_bytes={schedule.rate_limit_bytes}"
                problems.append((node, text))
        elif kind == "free":
            alive.pop(flat, None)
    return problems


def over_count(schedule: Schedule, alive: Iterable[str]) -> bool:
    """Whether these FlatParameters belong to more units than may be gathered at a time."""
    return schedule.rate_limit is not None and len({schedule.flats[f].unit for f in alive}) > schedule.rate_limit


def streams_within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A stream that runs as far ahead as the throttles before it let it keeps to the rate limit too."""
    problems = []
    position = {node: i for i, node in enumerate(phase.graph.nodes)}
    freed = {info(n).flat: position[n] for n in phase.nodes("free")}
    reached = -1
    issued: list[str] = []
    for node in phase.graph.nodes:
        kind = info(node).kind
        if kind == "throttle" and isinstance(node.args[0], fx.Node):
            reached = max(reached, position[node.args[0]])
        elif kind == "all_gather" and (counted := [f for f in info(node).flats if schedule.counts(f)]):
            issued += counted
            alive = [f for f in issued if freed.get(f, len(position)) > reached]
            size = sum(schedule.flats[f].full_bytes for f in alive)
            if over_count(schedule, alive) or (
                schedule.rate_limit_bytes is not None and size > schedule.rate_limit_bytes
            ):
                names = ", ".join(map(repr, alive))
                problems.append((node, f"nothing holds {describe(node)} back on its stream while {names} may be alive"))
    return problems


def gradients_within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Gradient buffers filled, whose reduce has not ended on the compute queue, never exceed the rate limit."""
    if schedule.rate_limit is None:
        return []
    problems = []
    waiting: set[str] = set()
    for node in phase.graph.nodes:
        kind, flat = info(node).kind, info(node).flat or ""
        if kind == "flatten_grads":
            waiting.add(flat)
            if len(waiting) > schedule.rate_limit:
                names = ", ".join(map(repr, sorted(waiting)))
                text = f"{len(waiting)} gradient buffers wait ({names}), the limit is rate_limit={schedule.rate_limit}"
                problems.append((node, text))
        elif kind in ("accumulate_grad", "keep_shard") or (
            kind == "wait" and info(node).queue == "compute" and _is_reduce(node.args[0])
        ):
            waiting.discard(flat)
    return problems


def _is_reduce(node: object) -> bool:
    return isinstance(node, fx.Node) and info(node).kind in ("reduce_scatter", "all_reduce", "store_grad")


def every_buffer_has_a_slot(schedule: Schedule, phase: Phase) -> list[Problem]:
    """What needs memory has a slot of at least its size, 16-byte aligned, inside the arena; a STORE in the one on the host."""
    problems = []
    for node in phase.graph.nodes:
        size = _bytes_needed(schedule, node)
        slot = node.meta.get("slot")
        if size and slot is None:
            problems.append((node, f"{describe(node)} needs {size} bytes and has no slot"))
        elif slot is not None and slot.num_bytes < size:
            problems.append((node, f"the slot of {describe(node)} has {slot.num_bytes} bytes, it needs {size}"))
        memory = schedule.memory
        arena_bytes = memory.host_bytes if info(node).kind == "store_grad" else memory.arena_bytes
        if slot is not None and (slot.offset % 16 or slot.offset < 0 or slot.offset + slot.num_bytes > arena_bytes):
            where = f"{slot.offset} to {slot.offset + slot.num_bytes}"
            problems.append((node, f"the slot of {describe(node)}, {where}, is not aligned or not inside the arena"))
    return problems


def _bytes_needed(schedule: Schedule, node: fx.Node) -> int:
    """Bytes of an arena a node needs: its result and, over direct exchange, what is received before it is summed."""
    if members := [schedule.flats[name] for name in info(node).members if info(node).kind == "all_gather"]:
        staged = sum(f.full_bytes for f in members) if schedule.direct_exchange else 0
        return sum(f.full_bytes for f in members if f.name not in schedule.resident) + staged
    kind, flat = info(node).kind, schedule.flats.get(info(node).flat or "")
    if flat is None:
        return 0
    S, wire = flat.shard_numel, flat.reduce_dtype.itemsize
    staged = wire if schedule.direct_exchange else 0
    if kind in ("all_gather", *ops.UNSHARDS_LOCALLY):
        gathered = kind == "all_gather" or flat.F == 1
        cast = kind == "load_shard" and flat.param_dtype != flat.dtype  # what came from the host lies beside it
        loaded = schedule.held_shards * S * flat.dtype.itemsize if cast else 0
        if gathered:
            return loaded + (0 if flat.name in schedule.resident else flat.full_bytes)
        return loaded + schedule.held_shards * S * flat.param_dtype.itemsize
    if kind == "flatten_grads":
        return 0 if flat.F == 1 and schedule.lands(flat) else flat.grad_bytes
    if kind == "reduce_scatter":
        made = 0 if schedule.lands(flat) else schedule.held_shards * S * schedule.reduced_dtype(flat).itemsize
        return made + schedule.received_chunks(flat) * S * wire
    if kind == "store_grad":
        return schedule.held_shards * S * schedule.reduced_dtype(flat).itemsize
    if kind == "all_reduce":
        return (schedule.replicas - 1) * -(-S // schedule.replicas) * staged
    return 0


@dataclass
class _Life:
    """A buffer of the arena from the node that makes it to the last that needs it, by positions in the phase."""

    node: fx.Node
    slot: Slot
    start: int
    end: int
    queue: str
    """Of the last that needs it: an event of another queue says nothing about it."""


def slots_do_not_overlap(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Two buffers alive at the same time never share bytes; a reused slot waits for the node that ended its last use."""
    position = {node: i for i, node in enumerate(phase.graph.nodes)}
    by_name = {node.name: node for node in position}
    arenas: dict[bool, list[tuple[int, int, _Life]]] = {False: [], True: []}
    """Who had which bytes last, in pieces that do not overlap; of the device's arena and of the host's."""
    problems = []
    for node in phase.graph.nodes:
        slot: Slot | None = node.meta.get("slot")
        if slot is None or not slot.num_bytes:
            continue
        last = _needed_until(phase, node)
        life = _Life(node, slot, position[node], position[last], info(last).queue)
        begin, stop = slot.offset, slot.offset + slot.num_bytes
        events = [n for name in slot.after if (n := by_name.get(name)) is not None]
        waited = [(info(n).queue, position[n]) for n in events if info(n).kind in ops.LABELS and n < node]
        told: set[fx.Node] = set()
        kept = [(begin, stop, life)]
        on_host = info(node).kind == "store_grad"
        for low, high, other in arenas[on_host]:
            if low < stop and begin < high:
                if other.end >= life.start and other.node not in told:
                    problems.append(
                        (node, f"{describe(node)} is put over {describe(other.node)}, which is still needed")
                    )
                elif other.node not in told and not any(q == other.queue and at >= other.end for q, at in waited):
                    text = f"{describe(node)} reuses the slot of {describe(other.node)} without waiting for its end"
                    problems.append((node, text))
                told.add(other.node)
                kept += [(x, y, other) for x, y in ((low, begin), (stop, high)) if low <= x < y <= high]
            else:
                kept.append((low, high, other))
        arenas[on_host] = kept
    return problems


def _needed_until(phase: Phase, node: fx.Node) -> fx.Node:
    """The last node that needs the buffer `node` makes, derived from what reads it."""
    kind, flat = info(node).kind, info(node).flats[0]
    in_place = phase.flats[flat].F == 1  # an AllReduce without a ReduceScatter works inside the gradient buffer
    if kind == "all_gather" and not info(node).members:
        return max([*phase.nodes("free", flat), *storage_users(node)])
    if kind == "all_gather":
        # A resident member of a bucket, which has no FREE, has memory of its own: its WAIT ends what it needs of the slot.
        frees = [f for wait in node.users for f in phase.nodes("free", info(wait).flat)]
        return max([node, *node.users, *frees, *(u for f in frees for u in storage_users(f.args[0]))])  # type: ignore[arg-type]
    if kind in ops.UNSHARDS_LOCALLY:
        users = list(storage_users(node))  # the first WAIT of a bucket's members ends the whole exchange
        return max([node, *users] + [min(u.users, default=u) for u in users if info(u).kind == "all_gather"])
    chain, last = [node], node
    while chain:
        current = chain.pop()
        last = max(last, current)
        if info(current).kind in ("flatten_grads", "reduce_scatter", "all_reduce", "store_grad", "wait"):
            stored = info(current.args[0]).kind == "store_grad" if info(current).kind == "wait" else False  # type: ignore[arg-type]
            if stored and kind != "store_grad":
                continue  # what is on the host needs the device's memory no more
            same = [u for u in current.users if info(u).kind != "free"]
            ended = info(current).kind == "wait" and info(current).queue == "compute" and not in_place
            if kind == "flatten_grads" and ended:
                continue
            chain += same
    return last


LIMITS = (within_the_limit, streams_within_the_limit, gradients_within_the_limit)
"""The rules of the rate limit."""
