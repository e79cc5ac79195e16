"""Rules about the nodes themselves: their order, queues and sources, and how long what is gathered lives."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxshard.ir import ops
from fxshard.ir.aliasing import alias_roots, storage_users
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import describe, info
from fxshard.ir.phase import Phase
from fxshard.ir.rules import Problem
from fxshard.ir.schedule import Schedule


def inputs_precede_uses(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Every node comes after all of its inputs."""
    return [
        (n, f"{describe(n)} comes before its input {describe(i)}")
        for n in phase.graph.nodes
        for i in n.all_input_nodes
        if not i < n
    ]


def one_wait_for_each_issue(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Every collective has exactly one WAIT, and only the WAIT reads what it returns; a STORE stands between them where
    gradients go to host memory."""
    problems = []
    for node in phase.nodes():
        if info(node).kind in ("all_gather", "reduce_scatter", "all_reduce", "presence", "store_grad"):
            stores = info(node).kind in ("reduce_scatter", "all_reduce") and schedule.offloaded
            waits = [u for u in node.users if info(u).kind == "wait" or (stores and info(u).kind == "store_grad")]
            others = [u for u in node.users if u not in waits]
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
            before = "load_shard" if schedule.offloaded else "cast_shard" if cast else None
            if found.kind == "all_gather" and before and isinstance(source, fx.Node) and info(source).kind != before:
                problems.append((node, f"{describe(node)} gathers '{flat}' without its {ops.LABELS[before]}"))
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
    if kind == "store_grad":
        return "replicate" if info(node.args[0]).kind == "all_reduce" else "reduce"  # type: ignore[arg-type]
    if kind in ops.UNSHARDS_LOCALLY:
        return "unshard" if any(info(user).kind == "all_gather" for user in node.users) else "compute"
    return ops.QUEUES.get(kind, "compute")


def views_are_of_their_own_parameter(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A view shows its parameter's place in the FlatParameter, of which it reads the gathered buffer."""
    problems = []
    for flat in schedule.flats.values():
        layout = {p.fqn: (offset, p.shape, p.stride) for p, offset in zip(flat.parameters, flat.offsets)}
        for view in phase.views(flat.name):
            source, fqn, *place = view.args
            if isinstance(source, fx.Node) and info(source).kind not in _held(flat, schedule.offloaded):
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
        for node in (n for kind in ops.UNSHARDS_LOCALLY for n in phase.nodes(kind, flat.name)):
            if node.args[2] != flat.param_dtype:
                problems.append((node, f"{describe(node)} casts to {node.args[2]}, not to {flat.param_dtype}"))
        for node in (*phase.nodes("flatten_grads", flat.name), *phase.nodes("keep_grads", flat.name)):
            if node.args[2:4] != (flat.offsets, flat.padded_numel):
                problems.append((node, f"{describe(node)} lays gradients at {node.args[2]}, not at {flat.offsets}"))
    return problems


def _held(flat: FlatParameter, offloaded: bool) -> tuple[str, ...]:
    """Kinds of what holds a FlatParameter whole."""
    if flat.F > 1:
        return ("wait", "resident")
    if offloaded:
        return ("load_shard", "resident")
    return ("shard",) if flat.param_dtype == flat.dtype else ("cast_shard", "resident")


def used_only_while_gathered(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No memory of a gathered buffer is read after its FREE, through any view; no FREE comes twice."""
    problems = []
    freed: dict[fx.Node, fx.Node] = {}
    for node in phase.nodes("free"):
        full = node.args[0]
        if not isinstance(full, fx.Node) or info(full).kind not in ("wait", *ops.UNSHARDS_LOCALLY, "resident"):
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
    kinds = ("all_gather", *ops.UNSHARDS_LOCALLY, "shard", "resident", "parameter")
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
    whole = [n for k in ops.UNSHARDS_LOCALLY for n in phase.nodes(k) if schedule.flats[info(n).flat or ""].F == 1]
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
            if not any(phase.nodes(kind, flat) for kind in ("all_gather", *ops.UNSHARDS_LOCALLY)):
                problems.append((phase.output, f"'{flat}' is resident and never gathered in forward"))
    return problems
