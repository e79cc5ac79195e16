"""Gather each unit before its first use, once a phase, however often it is used.

Why      The captured phases read whole parameters; each rank holds 1/F of them.
Assumes  Parameters are placeholders of kind `parameter`, stamped with their FlatParameter.
Gives    gathers-inserted: shard -> [CAST] -> AG -> WAIT -> views, before the first use. F = 1: views of the
         shard, or of its cast. Where shards are in host memory LOAD, which casts too, stands for CAST.
Keeps    Values bit for bit; every operator of the model and its order.
Costs    One full buffer a FlatParameter, alive to the end of the phase until insert-frees.
Source   FSDP paper, section 3.2.

The gather stands right before its WAIT: nothing is hidden yet. Ties are one parameter, so ten reads make one gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.ir import FlatParameter, NodeInfo, Phase, Remarks, Schedule, ops
from fxshard.ir.nodes import INFO, identifier, info
from fxshard.passes.base import Pass


@dataclass(frozen=True)
class InsertGathers(Pass):
    name: ClassVar[str] = "insert-gathers"
    provides: ClassVar[tuple[str, ...]] = ("gathers-inserted",)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        for phase in schedule.phases:
            parameters = _parameters(phase)
            for flat_name in _first_used(parameters):
                flat = schedule.flats[flat_name]
                _insert(schedule, phase, flat, parameters[flat_name], self.name)
                remarks.passed(
                    flat_name, f"gathered before its first use in {phase.name}" if flat.F > 1 else "held whole"
                )


def _parameters(phase: Phase) -> dict[str, list[fx.Node]]:
    """The parameters by FlatParameter."""
    found: dict[str, list[fx.Node]] = {}
    for node in phase.nodes("parameter"):
        found.setdefault(info(node).flat or "", []).append(node)
    return found


def _first_used(parameters: dict[str, list[fx.Node]]) -> list[str]:
    """FlatParameters by the first operator that reads one of their parameters."""
    uses = {flat: [use for node in nodes for use in node.users] for flat, nodes in parameters.items()}
    first = {flat: min(users) for flat, users in uses.items() if users}
    return sorted(first, key=lambda flat: first[flat])


def _insert(schedule: Schedule, phase: Phase, flat: FlatParameter, parameters: list[fx.Node], by: str) -> None:
    graph = phase.graph
    holders = [node for node in parameters if node.users]
    use = min(user for node in holders for user in node.users)
    body = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(body):
        name = identifier(f"shard_{flat.name}")
        full = graph.create_node("placeholder", name, name=name)
    full.meta[INFO] = NodeInfo("shard", flat.name, flat.unit, by=by)
    specs = {p.fqn: (p, offset) for p, offset in zip(flat.parameters, flat.offsets)}
    with graph.inserting_before(use):
        if schedule.offloaded or flat.param_dtype != flat.dtype:
            # One rank a group: it is the whole unshard and the compute stream does it. Else it precedes the gather.
            kind = ops.load_shard if schedule.offloaded else ops.cast_shard
            size = schedule.held_shards * flat.shard_numel * flat.param_dtype.itemsize
            queue = "unshard" if flat.F > 1 else "compute"
            full = phase.call(kind, (full, flat.name, flat.param_dtype), flat=flat, by=by, num_bytes=size, queue=queue)
        if flat.F > 1:
            full = phase.call(ops.all_gather, (full, flat.name), flat=flat, by=by, num_bytes=flat.full_bytes)
            full = phase.call(
                ops.wait, (full, flat.name), flat=flat, by=by, num_bytes=flat.full_bytes, name=f"full_{flat.name}"
            )
        for node in holders:
            fqn = info(node).fqn
            assert fqn is not None
            spec, offset = specs[fqn]
            view = phase.call(
                ops.param_view, (full, fqn, offset, spec.shape, spec.stride), flat=flat, by=by, fqn=fqn, name=f"p_{fqn}"
            )
            view.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(view)
    for node in parameters:
        if phase.name == "backward":
            graph.erase_node(node)
        else:
            node.meta[INFO] = NodeInfo("argument")  # the caller still passes it; nothing reads it
