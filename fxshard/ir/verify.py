"""The verifier: what a schedule must satisfy, each rule a function of its own.

It shares no code with the passes, only the questions that `ir` answers about a graph (who shares memory with whom, which
FlatParameters the rate limit counts). Each rule takes time in proportion to the nodes of a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import ops
from fxshard.ir.aliasing import alias_roots, has_effect, is_random, storage_users
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import Slot, describe, hint, info, user_line
from fxshard.ir.phase import Phase
from fxshard.ir.schedule import Schedule, operator_marks

Problem = tuple[fx.Node, str]
"""The node that breaks a rule, and how."""

SHOWN = 20
"""At most this many problems are told."""


def verify(schedule: Schedule) -> None:
    """Check every rule that applies; raise ScheduleError listing what is broken, the first twenty problems in full."""
    problems: list[tuple[Phase, Rule, fx.Node, str]] = []
    for phase in schedule.phases:
        with phase.frozen():
            found = [(rule, node, text) for rule in applying(schedule) for node, text in rule(schedule, phase)]
        problems += [(phase, *each) for each in dict.fromkeys(found)]
    if problems:
        more = len(problems) - SHOWN
        told = "\n".join(_message(*each) for each in problems[:SHOWN])
        raise ScheduleError(told + (f"\nand {more} problems more" if more > 0 else ""))


def applying(schedule: Schedule) -> list[Rule]:
    """The rules that what the passes have established so far makes meaningful."""
    return [rule for rule in RULES if NEEDS.get(rule) is None or NEEDS[rule] in schedule.established]


def _message(phase: Phase, rule: Callable[..., object], node: fx.Node, text: str) -> str:
    """The rule, what broke it, where that is in the user's code, who put it there, and the schedule around it."""
    from fxshard.ir.text import around

    found = info(node)
    line = user_line(node) or next(filter(None, map(user_line, node.users)), "")  # a view has none of its own
    where = f" ({line})" if line and line not in describe(node) else ""
    position = next(i for i, n in enumerate(phase.graph.nodes) if n is node)
    moved = f", moved by {', '.join(dict.fromkeys(found.moved_by))}" if found.moved_by else ""
    about = (rule.__doc__ or "").strip().split(".")[0].split("\n\n")[0]
    lines = [
        f"{rule.__name__}: {text}",
        f"  where   {phase.name}, op {position} {describe(node)}{where}",
        *([f"  unit    {found.flat or found.unit}"] if found.flat or found.unit else []),
        f"  by      {found.by}{moved}",
        f"  rule    {' '.join(about.split())}",
        *(f"  {'near' if i == 0 else '    '}    {near}" for i, near in enumerate(around(phase, node))),
    ]
    return "\n".join(lines)


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
            members, waited = sorted(info(node).members), sorted(info(w).flat or "" for w in waits)
            if members and (waited != members or len({*members}) < len(members)):
                text = f"is of {', '.join(map(repr, members))} and has waits for {', '.join(map(repr, waited))}"
                problems.append((node, f"{describe(node)} {text}, not one for each of different members"))
            elif not members and len(waits) != 1:
                problems.append((node, f"{describe(node)} has {len(waits)} waits, not one"))
            problems += [(u, f"{describe(u)} reads {describe(node)} without its WAIT") for u in others]
    return problems


def reads_its_own_flat_parameter(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A communication node works on one FlatParameter: what it names is what it was stamped with and what it reads."""
    problems = []
    for node in phase.graph.nodes:
        found = info(node)
        if found.kind in ops.KINDS.values() and ops.KINDS.get(node.target) != found.kind:
            problems.append((node, f"{describe(node)} is stamped '{found.kind}' and is a call of {node.target}"))
        if found.kind not in ops.LABELS or found.kind in ("throttle", "presence") or found.flat is None:
            continue
        named, sources = node.args[1], node.args[0] if found.members else (node.args[0],)
        if named != (found.members or found.flat):
            problems.append((node, f"{describe(node)} was made for '{found.flat}' and names '{named}'"))
        for source, flat in zip(sources, found.flats):
            if isinstance(source, fx.Node) and flat not in info(source).flats:
                problems.append((node, f"{describe(node)} reads {describe(source)}, of '{info(source).flat}'"))
            layout = schedule.flats.get(flat)
            cast = layout is not None and layout.param_dtype != layout.dtype
            if found.kind == "all_gather" and cast and isinstance(source, fx.Node) and info(source).kind == "shard":
                problems.append((node, f"{describe(node)} gathers '{flat}' without its CAST"))
    return problems


def on_its_queue_and_group(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A collective runs on the queue of its group: AllGather and ReduceScatter in the shard group, AllReduce among replicas."""
    problems = []
    for kind, size in (("all_gather", None), ("reduce_scatter", None), ("all_reduce", schedule.replicas)):
        for node in phase.nodes(kind):
            flats = [schedule.flats.get(flat) for flat in info(node).flats]
            if info(node).queue != ops.QUEUES[kind]:
                group = ops.GROUPS[kind]
                text = f"{describe(node)} is on queue '{info(node).queue}', not on '{ops.QUEUES[kind]}' of the {group}"
                problems.append((node, text))
            if not flats or any(flat is None or (size or flat.F) == 1 for flat in flats):
                problems.append(
                    (node, f"{describe(node)} is a collective of the {ops.GROUPS[kind]}, which is one rank")
                )
    for node in phase.graph.nodes:
        kind, queue = info(node).kind, info(node).queue
        if node.op == "call_function" and kind not in ops.COLLECTIVES and queue != (wanted := _queue(node)):
            problems.append((node, f"{describe(node)} is on queue '{queue}', not on '{wanted}'"))
    return problems


def _queue(node: fx.Node) -> str:
    """Where a node that is no collective runs: a WAIT on compute, unless an AllReduce goes on from it; a cast on compute
    where it is the whole unshard."""
    kind = info(node).kind
    if kind == "wait":
        chained = any(info(user).kind == "all_reduce" for user in node.users)
        return "replicate" if chained else "compute"
    if kind == "cast_shard":
        return "unshard" if any(info(user).kind == "all_gather" for user in node.users) else "compute"
    return ops.QUEUES.get(kind, "compute")


def views_are_of_their_own_parameter(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A view shows its parameter's place in the FlatParameter, of which it reads the gathered buffer."""
    problems = []
    for flat in schedule.flats.values():
        layout = {p.fqn: (offset, p.shape, p.stride) for p, offset in zip(flat.parameters, flat.offsets)}
        for view in phase.views(flat.name):
            source, fqn, *place = view.args
            if isinstance(source, fx.Node) and info(source).kind not in _held(flat):
                problems.append((view, f"{describe(view)} reads {describe(source)}, which is not gathered"))
            if tuple(place) != layout.get(str(fqn)):
                problems.append((view, f"{describe(view)} is at {tuple(place)}, not at {layout.get(str(fqn))}"))
            while isinstance(source, fx.Node) and source.op != "placeholder":
                reader, source = source, source.args[0]
                if isinstance(source, fx.Node) and info(source).members:
                    sent: Any = source.args[0]
                    source = dict(zip(info(source).members, sent)).get(info(reader).flat or "")
            if not isinstance(source, fx.Node) or info(source).flat != flat.name:
                problems.append((view, f"{describe(view)} reads {source}, not what is gathered of '{flat.name}'"))
        for node in phase.nodes("cast_shard", flat.name):
            if node.args[2] != flat.param_dtype:
                problems.append((node, f"{describe(node)} casts to {node.args[2]}, not to {flat.param_dtype}"))
        for node in phase.nodes("flatten_grads", flat.name):
            if node.args[2:4] != (flat.offsets, flat.padded_numel):
                problems.append((node, f"{describe(node)} lays gradients at {node.args[2]}, not at {flat.offsets}"))
    return problems


def _held(flat: FlatParameter) -> tuple[str, ...]:
    """Kinds of what holds a FlatParameter whole."""
    if flat.F > 1:
        return ("wait", "resident")
    return ("shard",) if flat.param_dtype == flat.dtype else ("cast_shard", "resident")


def used_only_while_gathered(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No memory of a gathered buffer is read after its FREE, through any view; no FREE comes twice."""
    problems = []
    freed: dict[fx.Node, fx.Node] = {}
    for node in phase.nodes("free"):
        full = node.args[0]
        if not isinstance(full, fx.Node) or info(full).kind not in ("wait", "cast_shard", "resident"):
            problems.append((node, f"{describe(node)} frees {full}, which is no gathered buffer"))
            continue
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
    problems = []
    whole = [n for n in phase.nodes("cast_shard") if schedule.flats[info(n).flat or ""].F == 1]
    for node in [*phase.nodes("all_gather"), *whole]:
        for flat in info(node).flats:
            kept = flat in schedule.resident and phase.name == "forward"
            if not kept and not phase.nodes("free", flat):
                problems.append((node, f"'{flat}' is gathered and never freed"))
    for node in phase.nodes("resident"):
        flat = info(node).flat or ""
        if not phase.nodes("free", flat):
            problems.append((node, f"'{flat}' stays gathered after backward: it is never freed"))
        if flat not in schedule.resident:
            problems.append((node, f"backward takes '{flat}' as gathered, and it is no resident"))
    if phase.name == "forward":
        for flat in sorted(schedule.resident):
            problems += [(n, f"'{flat}' is resident and freed in forward") for n in phase.nodes("free", flat)]
            if not phase.nodes("all_gather", flat) and not phase.nodes("cast_shard", flat):
                problems.append((phase.output, f"'{flat}' is resident and never gathered in forward"))
    return problems


def reduced_exactly_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Each gradient enters one FLAT, one RS if F > 1, one AR if replicas > 1, one ACC, and leaves no other way."""
    if phase.name != "backward":
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
        problems += [(n, text) for n in accumulated if (text := _wrong_flags(schedule, n, list(node.args[0])))]  # type: ignore[arg-type]
        if len(accumulated) != 1 or accumulated[0].args[0] is not value:
            problems.append((node, f"the reduced gradient of '{flat.name}' does not reach .grad exactly once"))
    asked = [
        n.meta["gradients"]
        for n in phase.nodes("presence")
        if n.args[0] == [g is not None for g in n.meta["gradients"]]
    ]
    if schedule.needs_presence != (len(asked) == 1) or len(phase.nodes("presence")) != len(asked):
        text = "outputs reach different parameters" if schedule.needs_presence else "outputs reach the same parameters"
        problems.append((phase.output, f"{text}, and {len(asked)} right ANY ask which gradients exist"))
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


def _wrong_flags(schedule: Schedule, accumulate: fx.Node, gradients: list[object]) -> str:
    """What is wrong with where ACC looks up which of its gradients exist on any rank; '' if nothing."""
    if not schedule.needs_presence:
        return ""
    if len(accumulate.args) < 4:
        return f"{describe(accumulate)} does not ask which gradients exist on any rank"
    present: Any = accumulate.args[2]
    start: Any = accumulate.args[3]
    listed = present.args[0].meta["gradients"][start : start + len(gradients)]
    return "" if listed == gradients else f"{describe(accumulate)} asks about other gradients than its own"


def divided_exactly_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """FLAT divides a gradient by the number of ranks that bring a batch. That no operator does, too, is another rule's."""
    return [
        (
            node,
            f"{describe(node)} divides by {node.args[4]}, not by the {schedule.num_batches} ranks that bring a batch",
        )
        for node in phase.nodes("flatten_grads")
        if node.args[4] != schedule.num_batches
    ]


def padding_stays_outside(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No gradient and no view reaches into padding or into another parameter's place."""
    problems = []
    ends = {p.fqn: o + p.numel for f in schedule.flats.values() for p, o in zip(f.parameters, f.offsets)}
    for view in phase.nodes("param_view"):
        place: Any = view.args
        _, fqn, offset, shape, stride = place
        end = offset + (1 + sum((n - 1) * step for n, step in zip(shape, stride)) if 0 not in shape else 0)
        if end > ends.get(str(fqn), 0):
            problems.append((view, f"{describe(view)} reaches to element {end}, its parameter to {ends.get(str(fqn))}"))
    for node in phase.nodes("flatten_grads"):
        flat = schedule.flats[info(node).flat or ""]
        for fqn, following in zip(flat.fqns, [*flat.offsets[1:], flat.padded_numel]):
            if ends[fqn] > following:
                text = f"'{fqn}' reaches to element {ends[fqn]} of '{flat.name}', over what begins at {following}"
                problems.append((node, text))
        for p, gradient in zip(flat.parameters, node.args[0]):  # type: ignore[arg-type]
            value = gradient.meta.get("val") if isinstance(gradient, fx.Node) else None
            if isinstance(value, torch.Tensor) and tuple(map(hint, value.shape)) != p.shape:
                shape = list(map(hint, value.shape))
                problems.append((node, f"the gradient of '{p.fqn}' has shape {shape}, the parameter {list(p.shape)}"))
    return problems


def effects_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Random operators and writes to buffers run once each, in the order in which they were captured."""
    wanted = schedule.origin[phase.name].effects
    there = [n for n in phase.graph.nodes if has_effect(n)]
    names = [n.name for n in there]
    if tuple(names) == wanted:
        return []
    problems: list[Problem] = []
    known, seen = set(wanted), set()
    for node in there:
        what = "random" if is_random(node) else "a write"
        if node.name not in known:
            problems.append((node, f"{describe(node)} is {what} and was not there when {phase.name} was captured"))
        seen.add(node.name)
    lost = [name for name in wanted if name not in seen]
    problems += [
        (phase.output, f"'{name}', random or a write, was captured in {phase.name} and is lost") for name in lost
    ]
    kept = [name for name in wanted if name in seen]
    for node, name in zip([n for n in there if n.name in known], kept):
        if node.name != name:
            problems.append((node, f"{describe(node)} runs where '{name}' ran when {phase.name} was captured"))
            break
    return problems


def operators_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """The model's operators are those that were captured, each with its own inputs; only their order may be another."""
    wanted = schedule.origin[phase.name].operators
    there = operator_marks(phase)
    problems: list[Problem] = []
    for node, mark in there.items():
        if (was := wanted.get(node.name)) is None:
            problems.append((node, f"{describe(node)} was not there when {phase.name} was captured"))
        elif was != mark:
            problems.append(
                (
                    node,
                    f"{describe(node)} is not what it was when {phase.name} was captured: other inputs, or another operator",
                )
            )
    names = {node.name for node in there}
    problems += [(phase.output, f"operator '{name}' of {phase.name} is lost") for name in wanted if name not in names]
    return problems


def results_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A phase returns what it was captured with: outputs, buffers' new values, saved values, gradients of inputs."""
    wanted, there = schedule.origin[phase.name].results, phase.results
    if len(there) != len(wanted):
        return [(phase.output, f"{phase.name} returns {len(there)} values, not the {len(wanted)} it was captured with")]
    problems: list[Problem] = []
    for position, (value, name) in enumerate(zip(there, wanted)):
        found = value.name if isinstance(value, fx.Node) else None
        handed_over = phase.name == "backward" and position in schedule.parameter_outputs and found is None
        if found != name and not handed_over:
            node = value if isinstance(value, fx.Node) else phase.output
            problems.append(
                (node, f"{phase.name} returns {found or 'nothing'} where it returned '{name}', value {position}")
            )
    return problems


def order_is_agreed_on(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Where ranks have agreed on the communication, it is in that order: same collectives, units, bytes and groups."""
    if schedule.agreed is None:
        return []
    wanted = [line for line in schedule.agreed if line.startswith(f"{phase.name} ")]
    return _first_difference(schedule, phase, wanted, "was agreed on")


def same_on_all_ranks(schedules: Sequence[Schedule]) -> None:
    """Every rank issues the same collectives in the same order: `schedules`, one a rank.

    Raises ScheduleError naming the first rank that differs from rank 0, the node, and what rank 0 issues there.
    """
    for rank, schedule in enumerate(schedules):
        if len(schedule.phases) != len(schedules[0].phases):
            raise ScheduleError(
                f"same_on_all_ranks: rank {rank} has {len(schedule.phases)} phases, rank 0 another number"
            )
        for phase in schedule.phases:
            wanted = [line for line in schedules[0].skeleton() if line.startswith(f"{phase.name} ")]
            for node, text in _first_difference(schedule, phase, wanted, "is issued on rank 0"):
                raise ScheduleError(_message(phase, same_on_all_ranks, node, f"rank {rank}: {text}"))


def _first_difference(schedule: Schedule, phase: Phase, wanted: Sequence[str], said: str) -> list[Problem]:
    nodes = [n for n in phase.graph.nodes if info(n).kind in ops.GROUPS]
    lines = schedule.skeleton(phase.name)
    for node, line, other in zip(nodes, lines, wanted):
        if line != other:
            return [(node, f"'{line}' is issued where '{other}' {said}")]
    if len(lines) != len(wanted):
        node = nodes[len(wanted)] if len(lines) > len(wanted) else phase.output
        return [
            (
                node,
                f"{len(lines)} collectives are issued in {phase.name}, where {len(wanted)} {said.removeprefix('is ')}",
            )
        ]
    return []


def within_the_limit(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Gathered buffers in flight, residents not counted, never exceed the rate limit, in number or in bytes."""
    problems = []
    alive: dict[str, int] = {}
    for node in phase.graph.nodes:
        kind, flat = info(node).kind, info(node).flat or ""
        if kind == "all_gather" and (counted := [f for f in info(node).flats if schedule.counts(f)]):
            alive.update({f: schedule.flats[f].full_bytes for f in counted})
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
            over_count = schedule.rate_limit is not None and len(alive) > schedule.rate_limit
            if over_count or (schedule.rate_limit_bytes is not None and size > schedule.rate_limit_bytes):
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
        elif kind == "accumulate_grad" or (
            kind == "wait" and info(node).queue == "compute" and _is_reduce(node.args[0])
        ):
            waiting.discard(flat)
    return problems


def _is_reduce(node: object) -> bool:
    return isinstance(node, fx.Node) and info(node).kind in ("reduce_scatter", "all_reduce")


def every_buffer_has_a_slot(schedule: Schedule, phase: Phase) -> list[Problem]:
    """What needs memory has a slot of at least its size, 16-byte aligned, inside the arena."""
    problems = []
    for node in phase.graph.nodes:
        size = _bytes_needed(schedule, node)
        slot = node.meta.get("slot")
        if size and slot is None:
            problems.append((node, f"{describe(node)} needs {size} bytes and has no slot"))
        elif slot is not None and slot.num_bytes < size:
            problems.append((node, f"the slot of {describe(node)} has {slot.num_bytes} bytes, it needs {size}"))
        if slot is not None and (
            slot.offset % 16 or slot.offset < 0 or slot.offset + slot.num_bytes > schedule.memory.arena_bytes
        ):
            where = f"{slot.offset} to {slot.offset + slot.num_bytes}"
            problems.append((node, f"the slot of {describe(node)}, {where}, is not aligned or not inside the arena"))
    return problems


def _bytes_needed(schedule: Schedule, node: fx.Node) -> int:
    """Bytes of the arena a node needs: its result and, over direct exchange, what is received before it is summed."""
    if members := [schedule.flats[name] for name in info(node).members if info(node).kind == "all_gather"]:
        staged = sum(f.full_bytes for f in members) if schedule.direct_exchange else 0
        return sum(f.full_bytes for f in members if f.name not in schedule.resident) + staged
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
    owners: list[tuple[int, int, _Life]] = []
    """Who had which bytes last, in pieces that do not overlap."""
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
        for low, high, other in owners:
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
        owners = kept
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
    if kind == "cast_shard":
        users = list(storage_users(node))  # the first WAIT of a bucket's members ends the whole exchange
        return max([node, *users] + [min(u.users, default=u) for u in users if info(u).kind == "all_gather"])
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


Rule = Callable[[Schedule, Phase], list[Problem]]

LIMITS = (within_the_limit, streams_within_the_limit, gradients_within_the_limit)
"""The rules of the rate limit."""

RULES: tuple[Rule, ...] = (
    inputs_precede_uses,
    one_wait_for_each_issue,
    reads_its_own_flat_parameter,
    on_its_queue_and_group,
    views_are_of_their_own_parameter,
    used_only_while_gathered,
    nothing_leaves_gathered,
    freed_or_resident,
    reduced_exactly_once,
    divided_exactly_once,
    padding_stays_outside,
    operators_as_captured,
    effects_as_captured,
    results_as_captured,
    order_is_agreed_on,
    *LIMITS,
    every_buffer_has_a_slot,
    slots_do_not_overlap,
)

NEEDS: dict[Rule, str] = {
    freed_or_resident: "frees-inserted",
    reduced_exactly_once: "reduces-inserted",
    **dict.fromkeys(LIMITS, "rate-limited"),
    every_buffer_has_a_slot: "memory-planned",
    slots_do_not_overlap: "memory-planned",
}
"""What has to be established for a rule to apply; the others always do."""
