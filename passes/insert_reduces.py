"""Reduce each gradient once a step: ReduceScatter in the shard group, AllReduce across replicas, mean over the batches.

Why      Each rank has the gradient of its own batch; training needs the mean.
Assumes  gathers-inserted; `schedule.gradients` names the gradient node of each trainable parameter.
Gives    reduces-inserted: FLAT -> RS -> WAIT -> [AR -> WAIT] -> ACC for each FlatParameter with gradients. FLAT
         stands right after the last of its gradients and divides by `schedule.divisor`, unless told the ranks that bring
         a batch (W, or 1 in a virtual world of one contributor); RS and AR sum. F = 1 has no RS, F = W no AR. Where
         gradients belong in host memory a STORE, on the queue of the last collective, brings them there.
Keeps    Gradients of inputs; every operator of the model.
Costs    One flat gradient buffer a FlatParameter from FLAT to its WAIT; all waits stand at the end of the phase.
Source   FSDP paper, sections 3.2 and 3.3; the divisor is applied once, explicitly.

Where outputs reach different parameters, a loss may leave some without gradient on some ranks: one small `presence`
reduction tells every rank which gradients exist anywhere, so that `.grad` is None exactly where it is None everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.ir import FlatParameter, Phase, Remarks, Schedule, ops
from fxshard.ir.nodes import describe, info
from fxshard.passes.base import Pass


@dataclass(frozen=True)
class InsertReduces(Pass):
    name: ClassVar[str] = "insert-reduces"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted",)
    provides: ClassVar[tuple[str, ...]] = ("reduces-inserted",)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        phase = schedule.backward
        if phase is None:
            return
        gradients, output, order = schedule.gradients, phase.output, []
        body = next(n for n in phase.graph.nodes if n.op != "placeholder")
        for flat in schedule.flats.values():
            grads = [gradients.get(fqn) for fqn in flat.fqns]
            if any(g is not None for g in grads):
                order.append((max(g for g in grads if g is not None), flat, grads))
            elif flat.requires_grad:
                remarks.missed(flat.name, "no output reaches it: no gradient to reduce")
        order.sort(key=lambda entry: entry[0])
        for ready, flat, grads in order:
            insert_reduce(schedule, flat, grads, ready if ready.op != "placeholder" else body.prev, self.name)
            remarks.passed(flat.name, f"reduced after {describe(ready)}")
        if schedule.needs_presence:
            insert_presence(schedule, [flat.name for _, flat, _ in order], self.name)
        parameters = {id(g) for g in gradients.values()}
        output.args = (
            tuple(
                None if position in schedule.parameter_outputs and id(value) in parameters else value
                for position, value in enumerate(phase.results)
            ),
        )


def insert_reduce(
    schedule: Schedule, flat: FlatParameter, grads: Sequence[fx.Node | None], after: fx.Node, by: str
) -> None:
    """FLAT of `grads` right after `after`, the collectives behind it; the last WAIT and ACC at the end of backward."""
    phase = schedule.backward
    assert phase is not None
    graph = phase.graph
    arguments = (list(grads), flat.name, flat.offsets, flat.padded_numel, schedule.divisor)
    with graph.inserting_after(after):
        buffer = phase.call(ops.flatten_grads, arguments, flat=flat, by=by, num_bytes=flat.grad_bytes)
    last, value = buffer, buffer
    shard_bytes = flat.grad_bytes // flat.F
    if flat.F > 1:
        with graph.inserting_after(last):
            last = value = phase.call(
                ops.reduce_scatter, (value, flat.name), flat=flat, by=by, num_bytes=flat.grad_bytes
            )
    if schedule.replicas > 1:
        if flat.F > 1:
            with graph.inserting_after(last):
                last = value = phase.call(
                    ops.wait, (value, flat.name), flat=flat, by=by, queue="replicate", name=f"scattered_{flat.name}"
                )
        with graph.inserting_after(last):
            last = value = phase.call(ops.all_reduce, (value, flat.name), flat=flat, by=by, num_bytes=shard_bytes)
    if schedule.offloaded:
        queue = "replicate" if schedule.replicas > 1 else "reduce"
        with graph.inserting_after(last):
            size = schedule.held_shards * flat.shard_numel * schedule.reduced_dtype(flat).itemsize
            value = phase.call(ops.store_grad, (value, flat.name), flat=flat, by=by, num_bytes=size, queue=queue)
    with graph.inserting_before(phase.output):
        if value is not buffer:
            value = phase.call(ops.wait, (value, flat.name), flat=flat, by=by, name=f"reduced_{flat.name}")
        phase.call(ops.accumulate_grad, (value, flat.name), flat=flat, by=by, num_bytes=shard_bytes)


def insert_presence(schedule: Schedule, flats: Sequence[str], by: str) -> None:
    """Ask at the start of backward which gradients of these FlatParameters exist on any rank, and tell each ACC."""
    phase = schedule.backward
    assert phase is not None
    flattens, ends = [[phase.one(kind, flat) for flat in flats] for kind in ("flatten_grads", "accumulate_grad")]
    gradients = [list(node.args[0]) for node in flattens if node is not None]  # type: ignore[arg-type]
    everything = [g for grads in gradients for g in grads]
    with phase.graph.inserting_before(next(n for n in phase.graph.nodes if n.op != "placeholder")):
        pending = phase.call(
            ops.presence, ([g is not None for g in everything],), flat=None, by=by, num_bytes=len(everything)
        )
        pending.meta["gradients"] = everything
    first = min(node for node in phase.nodes("accumulate_grad"))
    # Before what ends the first reduce, so that asking is over by then.
    with phase.graph.inserting_before(first.args[0] if info(first.args[0]).kind == "wait" else first):  # type: ignore[arg-type]
        present = phase.call(ops.wait, (pending, "presence"), flat=None, by=by, name="present")
    start = 0
    for grads, end in zip(gradients, ends):
        assert end is not None
        end.args = (*end.args[:2], present, start)
        start += len(grads)


def remove_presence(phase: Phase) -> None:
    """Undo `insert_presence`."""
    for node in phase.nodes("presence"):
        for wait in [*node.users]:
            for end in [*wait.users]:
                end.args = end.args[:2]
            phase.graph.erase_node(wait)
        phase.graph.erase_node(node)
