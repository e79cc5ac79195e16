"""Reduce each gradient once a step: ReduceScatter in the shard group, AllReduce across replicas, mean over the batches.

Why      Each rank has the gradient of its own batch; training needs the mean.
Assumes  gathers-inserted; `schedule.gradients` names the gradient node of each trainable parameter.
Gives    reduces-inserted: FLAT -> RS -> WAIT -> [AR -> WAIT] -> ACC for each FlatParameter with gradients. FLAT
         stands right after the last of its gradients and divides by `schedule.num_batches`, the ranks that bring a batch
         (W, or 1 in a virtual world of one contributor); RS and AR sum. F = 1 has no RS, F = W no AR.
Keeps    Gradients of inputs; every operator of the model.
Costs    One flat gradient buffer a FlatParameter from FLAT to its WAIT; all waits stand at the end of the phase.
Source   FSDP paper, sections 3.2 and 3.3; the divisor is applied once, explicitly.

Where outputs reach different parameters, a loss may leave some without gradient on some ranks: one small `presence`
reduction tells every rank which gradients exist anywhere, so that `.grad` is None exactly where it is None everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule, ops
from fxshard.ir.nodes import describe
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
        graph, gradients = phase.graph, schedule.gradients
        output = phase.output
        body = next(n for n in graph.nodes if n.op != "placeholder")
        present, order = None, []
        for flat in schedule.flats.values():
            grads = [gradients.get(fqn) for fqn in flat.fqns]
            if any(g is not None for g in grads):
                order.append((max(g for g in grads if g is not None), flat, grads))
            elif flat.requires_grad:
                remarks.missed(flat.name, "no output reaches it: no gradient to reduce")
        order.sort(key=lambda entry: entry[0])
        if schedule.needs_presence:
            everything = [g for _, _, grads in order for g in grads]
            with graph.inserting_before(body):
                pending = phase.call(
                    ops.presence,
                    ([g is not None for g in everything],),
                    flat=None,
                    by=self.name,
                    num_bytes=len(everything),
                )
                pending.meta["gradients"] = everything
            with graph.inserting_before(output):
                present = phase.call(ops.wait, (pending, "presence"), flat=None, by=self.name, name="present")
        start = 0
        for ready, flat, grads in order:
            with graph.inserting_after(ready if ready.op != "placeholder" else body.prev):
                buffer = phase.call(
                    ops.flatten_grads,
                    (grads, flat.name, flat.offsets, flat.padded_numel, schedule.num_batches),
                    flat=flat, by=self.name, num_bytes=flat.grad_bytes,
                )  # fmt: skip
            last, value = buffer, buffer
            shard_bytes = flat.grad_bytes // flat.F
            if flat.F > 1:
                with graph.inserting_after(last):
                    last = value = phase.call(
                        ops.reduce_scatter, (value, flat.name), flat=flat, by=self.name, num_bytes=flat.grad_bytes
                    )
            if schedule.replicas > 1:
                if flat.F > 1:
                    with graph.inserting_after(last):
                        last = value = phase.call(
                            ops.wait, (value, flat.name), flat=flat, by=self.name, queue="replicate",
                            name=f"scattered_{flat.name}",
                        )  # fmt: skip
                with graph.inserting_after(last):
                    last = value = phase.call(
                        ops.all_reduce, (value, flat.name), flat=flat, by=self.name, num_bytes=shard_bytes
                    )
            with graph.inserting_before(output):
                if value is not buffer:
                    value = phase.call(
                        ops.wait, (value, flat.name), flat=flat, by=self.name, name=f"reduced_{flat.name}"
                    )
                arguments = (value, flat.name) if present is None else (value, flat.name, present, start)
                phase.call(ops.accumulate_grad, arguments, flat=flat, by=self.name, num_bytes=shard_bytes)
            start += len(grads)
            remarks.passed(flat.name, f"reduced after {describe(ready)}")
        parameters = {id(g) for g in gradients.values()}
        output.args = (
            tuple(
                None if position in schedule.parameter_outputs and id(value) in parameters else value
                for position, value in enumerate(phase.results)
            ),
        )
