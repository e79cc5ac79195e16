"""The verifier: what a schedule must satisfy, each rule a function of its own.

It shares no code with the passes, only the questions that `ir` answers about a graph (who shares memory with whom, which
FlatParameters the rate limit counts).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir.aliasing import alias_roots, storage_users
from fxshard.ir.schedule import Phase, Schedule, describe, info, user_line

Problem = tuple[fx.Node, str]


def verify(schedule: Schedule) -> None:
    """Check every rule that the passes so far have made meaningful; raise ScheduleError listing all that is broken."""
    problems = []
    for phase in schedule.phases:
        with phase.frozen():
            found = [(rule, node, text) for rule in RULES for node, text in rule(schedule, phase)]
        for rule, node, text in found:
            line = user_line(node) or next(filter(None, map(user_line, node.users)), "")  # a view has none of its own
            where = f" ({line})" if line and line not in describe(node) else ""
            position = list(phase.graph.nodes).index(node)
            problems.append(f"{rule.__name__}: {text}\n  where   {phase.name}, op {position} {describe(node)}{where}")
    if problems:
        raise ScheduleError("\n".join(problems))


def inputs_precede_uses(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Every node comes after all of its inputs."""
    return [
        (n, f"{describe(n)} comes before its input {describe(i)}")
        for n in phase.graph.nodes
        for i in n.all_input_nodes
        if not i < n
    ]


def one_wait_for_each_issue(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Every collective has exactly one WAIT, and only the WAIT reads what it returns."""
    problems = []
    for node in phase.nodes():
        if info(node).kind in ("all_gather", "reduce_scatter", "all_reduce", "presence"):
            waits = [u for u in node.users if info(u).kind == "wait"]
            others = [u for u in node.users if info(u).kind != "wait"]
            if len(waits) != 1:
                problems.append((node, f"{describe(node)} has {len(waits)} waits, not one"))
            problems += [(u, f"{describe(u)} reads {describe(node)} without its WAIT") for u in others]
    return problems


def views_are_of_their_own_parameter(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A view shows its parameter's place in the FlatParameter, of which it reads the gathered buffer."""
    problems = []
    for flat in schedule.flats.values():
        layout = {p.fqn: (offset, p.shape, p.stride) for p, offset in zip(flat.parameters, flat.offsets)}
        for view in phase.views(flat.name):
            source, fqn, *place = view.args
            if tuple(place) != layout.get(str(fqn)):
                problems.append((view, f"{describe(view)} is at {tuple(place)}, not at {layout.get(str(fqn))}"))
            while isinstance(source, fx.Node) and source.op != "placeholder":
                source = source.args[0]
            if not isinstance(source, fx.Node) or info(source).flat != flat.name:
                problems.append((view, f"{describe(view)} reads {source}, not what is gathered of '{flat.name}'"))
        for node in phase.nodes("flatten_grads", flat.name):
            if node.args[2:] != (flat.offsets, flat.padded_numel):
                problems.append((node, f"{describe(node)} lays gradients at {node.args[2:]}, not at {flat.offsets}"))
    return problems


def used_only_while_gathered(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No memory of a gathered buffer is read after its FREE, through any view; no FREE comes twice."""
    problems = []
    freed: dict[fx.Node, fx.Node] = {}
    for node in phase.nodes("free"):
        full = node.args[0]
        assert isinstance(full, fx.Node)
        if full in freed:
            problems.append((node, f"'{info(node).flat}' is freed twice"))
        freed[full] = node
        for user in storage_users(full):
            if node < user and user is not node:
                problems.append((user, f"{describe(user)} reads '{info(node).flat}' after its FREE"))
    return problems


def nothing_leaves_gathered(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No output and no value saved for backward shares memory with a gathered buffer or a shard."""
    kinds = ("all_gather", "cast_shard", "shard", "resident", "parameter")
    problems = []
    for value in phase.results:
        if isinstance(value, fx.Node):
            for root in alias_roots(value):
                if info(root).kind in kinds:
                    problems.append(
                        (value, f"{describe(value)} leaves {phase.name} and shares memory with '{info(root).flat}'")
                    )
    return problems


def freed_or_resident(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Every gathered buffer is freed in its phase, unless it is resident and this is forward."""
    if "frees-inserted" not in schedule.established:
        return []
    problems = []
    whole = [n for n in phase.nodes("cast_shard") if schedule.flats[info(n).flat or ""].F == 1]
    for node in [*phase.nodes("all_gather"), *whole]:
        flat = info(node).flat or ""
        kept = flat in schedule.resident and phase.name == "forward"
        if not kept and not phase.nodes("free", flat):
            problems.append((node, f"'{flat}' is gathered and never freed"))
    for node in phase.nodes("resident"):
        if not phase.nodes("free", info(node).flat):
            problems.append((node, f"'{info(node).flat}' stays gathered after backward: it is never freed"))
    return problems


def reduced_exactly_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Each gradient enters one FLAT, one RS if F > 1, one AR if replicas > 1, one ACC, and leaves no other way."""
    if "reduces-inserted" not in schedule.established or phase.name != "backward":
        return []
    problems: list[Problem] = []
    entered: dict[str, int] = {}
    for node in phase.nodes("flatten_grads"):
        flat = schedule.flats[info(node).flat or ""]
        for fqn, gradient in zip(flat.fqns, node.args[0]):  # type: ignore[arg-type]
            if gradient is None:
                continue
            if gradient is not schedule.gradients.get(fqn):
                problems.append(
                    (node, f"what is reduced as the gradient of '{fqn}' is {describe(gradient)}, another value")
                )
            entered[fqn] = entered.get(fqn, 0) + 1
        value: fx.Node = node
        for kind, needed in (("reduce_scatter", flat.F > 1), ("all_reduce", schedule.replicas > 1)):
            found = phase.nodes(kind, flat.name)
            if len(found) != int(needed):
                problems.append((node, f"'{flat.name}' has {len(found)} {kind}, not {int(needed)}"))
                continue
            if needed:
                if found[0].args[0] is not value:
                    problems.append((found[0], f"{kind} of '{flat.name}' does not read what comes before it"))
                value = next(iter(found[0].users), found[0])
        accumulated = phase.nodes("accumulate_grad", flat.name)
        if len(accumulated) != 1 or accumulated[0].args[0] is not value:
            problems.append((node, f"the reduced gradient of '{flat.name}' does not reach .grad exactly once"))
    names = {id(g): fqn for fqn, g in schedule.gradients.items()}
    for position in schedule.parameter_outputs:
        result = phase.results[position]
        if isinstance(result, fx.Node):
            problems.append(
                (result, f"the gradient of '{names.get(id(result), result.name)}' also leaves as an output")
            )
    for fqn in schedule.gradients:
        if entered.get(fqn, 0) != 1:
            problems.append((phase.output, f"the gradient of '{fqn}' is reduced {entered.get(fqn, 0)} times, not once"))
    return problems


def within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Gathered buffers in flight, residents not counted, never exceed the rate limit, in number or in bytes."""
    if "rate-limited" not in schedule.established:
        return []
    problems = []
    alive: dict[str, int] = {}
    for node in phase.graph.nodes:
        kind, flat = info(node).kind, info(node).flat or ""
        if kind == "all_gather" and schedule.counts(flat):
            alive[flat] = schedule.flats[flat].full_bytes
            names, size = ", ".join(map(repr, sorted(alive))), sum(alive.values())
            if schedule.rate_limit is not None and len(alive) > schedule.rate_limit:
                text = (
                    f"{len(alive)} gathered buffers in flight ({names}), the limit is rate_limit={schedule.rate_limit}"
                )
                problems.append((node, text))
            if schedule.rate_limit_bytes is not None and size > schedule.rate_limit_bytes:
                text = f"{size} gathered bytes in flight ({names}), the limit is rate_limit_bytes={schedule.rate_limit_bytes}"
                problems.append((node, text))
        elif kind == "free":
            alive.pop(flat, None)
    return problems


def streams_within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A stream that runs as far ahead as the throttles before it let it keeps to the rate limit too."""
    if "rate-limited" not in schedule.established:
        return []
    problems = []
    position = {node: i for i, node in enumerate(phase.graph.nodes)}
    freed = {info(n).flat: position[n] for n in phase.nodes("free")}
    reached = -1
    issued: list[str] = []
    for node in phase.graph.nodes:
        kind, flat = info(node).kind, info(node).flat or ""
        if kind == "throttle" and isinstance(node.args[0], fx.Node):
            reached = max(reached, position[node.args[0]])
        elif kind == "all_gather" and schedule.counts(flat):
            issued.append(flat)
            alive = [f for f in issued if freed.get(f, len(position)) > reached]
            size = sum(schedule.flats[f].full_bytes for f in alive)
            over_count = schedule.rate_limit is not None and len(alive) > schedule.rate_limit
            if over_count or (schedule.rate_limit_bytes is not None and size > schedule.rate_limit_bytes):
                names = ", ".join(map(repr, alive))
                problems.append((node, f"nothing holds {describe(node)} back on its stream while {names} may be alive"))
    return problems


def gradients_within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Gradient buffers filled, whose reduce has not ended on the compute queue, never exceed the rate limit."""
    if "rate-limited" not in schedule.established or schedule.rate_limit is None:
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
        elif kind == "accumulate_grad" or (
            kind == "wait" and info(node).queue == "compute" and _is_reduce(node.args[0])
        ):
            waiting.discard(flat)
    return problems


def _is_reduce(node: object) -> bool:
    return isinstance(node, fx.Node) and info(node).kind in ("reduce_scatter", "all_reduce")


def every_buffer_has_a_slot(schedule: Schedule, phase: Phase) -> list[Problem]:
    """What needs memory has a slot of at least its size, 16-byte aligned, inside the arena."""
    if "memory-planned" not in schedule.established:
        return []
    problems = []
    for node in phase.graph.nodes:
        size = _bytes_needed(schedule, node)
        slot = node.meta.get("slot")
        if size and slot is None:
            problems.append((node, f"{describe(node)} needs {size} bytes and has no slot"))
        elif slot is not None and slot.num_bytes < size:
            problems.append((node, f"the slot of {describe(node)} has {slot.num_bytes} bytes, it needs {size}"))
        if slot is not None and (slot.offset % 16 or slot.offset + slot.num_bytes > schedule.memory.arena_bytes):
            where = f"{slot.offset} to {slot.offset + slot.num_bytes}"
            problems.append((node, f"the slot of {describe(node)}, {where}, is not aligned or not inside the arena"))
    return problems


def _bytes_needed(schedule: Schedule, node: fx.Node) -> int:
    """Bytes of the arena a node needs: its result and, over direct exchange, what is received before it is summed."""
    kind, flat = info(node).kind, schedule.flats.get(info(node).flat or "")
    if flat is None:
        return 0
    S, wire = flat.shard_numel, flat.reduce_dtype.itemsize
    staged = wire if schedule.direct_exchange else 0
    if kind in ("all_gather", "cast_shard"):
        gathered = kind == "all_gather" or flat.F == 1
        if gathered and flat.name in schedule.resident:
            return 0
        return flat.full_bytes if gathered else schedule.held_shards * S * flat.param_dtype.itemsize
    if kind == "flatten_grads":
        return flat.grad_bytes
    if kind == "reduce_scatter":
        return schedule.held_shards * S * schedule.reduced_dtype(flat).itemsize + (flat.F - 1) * S * staged
    if kind == "all_reduce":
        return (schedule.replicas - 1) * -(-S // schedule.replicas) * staged
    return 0


def slots_do_not_overlap(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Two buffers alive at the same time never share bytes; a reused slot waits for the node that ended its last
    use."""
    if "memory-planned" not in schedule.established:
        return []
    position = {node: i for i, node in enumerate(phase.graph.nodes)}
    lives = []
    for node in phase.graph.nodes:
        if (slot := node.meta.get("slot")) is not None and slot.num_bytes:
            lives.append((node, slot, position[node], position[_needed_until(phase, node)]))
    by_name = {node.name: i for node, i in position.items()}
    problems = []
    for i, (a, slot_a, start_a, end_a) in enumerate(lives):
        for b, slot_b, start_b, _ in lives[i + 1 :]:
            share = (
                slot_a.offset < slot_b.offset + slot_b.num_bytes and slot_b.offset < slot_a.offset + slot_a.num_bytes
            )
            if share and start_a <= start_b <= end_a:
                problems.append((b, f"{describe(b)} is put over {describe(a)}, which is still needed"))
            elif share and not any(by_name.get(name, -1) >= end_a for name in slot_b.after):
                problems.append((b, f"{describe(b)} reuses the slot of {describe(a)} without waiting for its end"))
    return problems


def _needed_until(phase: Phase, node: fx.Node) -> fx.Node:
    """The last node that needs the buffer `node` makes, derived from what reads it."""
    kind, flat = info(node).kind, info(node).flat or ""
    in_place = phase.flats[flat].F == 1  # an AllReduce without a ReduceScatter works inside the gradient buffer
    if kind == "all_gather":
        return max([*phase.nodes("free", flat), *storage_users(node)])
    if kind == "cast_shard":
        users = list(storage_users(node))
        return max(users + [w for u in users for w in u.users if info(u).kind == "all_gather"])
    chain, last = [node], node
    while chain:
        current = chain.pop()
        last = max(last, current)
        if info(current).kind in ("flatten_grads", "reduce_scatter", "all_reduce") or info(current).kind == "wait":
            same = [u for u in current.users if info(u).kind != "free"]
            ended = info(current).kind == "wait" and info(current).queue == "compute" and not in_place
            if kind == "flatten_grads" and ended:
                continue
            chain += same
    return last


RULES: tuple[Callable[[Schedule, Phase], list[Problem]], ...] = (
    inputs_precede_uses,
    one_wait_for_each_issue,
    views_are_of_their_own_parameter,
    used_only_while_gathered,
    nothing_leaves_gathered,
    freed_or_resident,
    reduced_exactly_once,
    within_the_limit,
    streams_within_the_limit,
    gradients_within_the_limit,
    every_buffer_has_a_slot,
    slots_do_not_overlap,
)
