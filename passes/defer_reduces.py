"""Put off the communication of gradients: a backward of several whose gradients add up before they are reduced.

Why      Micro-batches whose gradients only have to add up need one reduce for all of them.
Assumes  reduces-inserted.
Gives    reduces-deferred. keep="unsharded": FLAT, RS, AR and ACC of each FlatParameter become one KEEP, which adds its whole
         gradients, divided, to what is kept. keep="sharded": RS stays and one KEEP stands for AR and ACC; without replicas
         nothing is put off, without shards (F = 1) it is the same as unsharded.
Keeps    Every operator and every AllGather.
Costs    unsharded: a whole gradient in the accumulation dtype for every FlatParameter; sharded: a shard of each.
Source   FSDP paper, section 3.3.4 (gradient accumulation with and without communication); FSDP1's `no_sync`, FSDP2's
         `set_requires_gradient_sync` and `set_requires_all_reduce`.

`take-kept` makes the backward that ends it. Not handled: what a schedule does not gather cannot be kept sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.ir import Accumulation, Phase, Remarks, Schedule, ops
from fxshard.ir.nodes import info
from fxshard.options import check_choice
from fxshard.passes.base import Pass
from fxshard.passes.insert_reduces import remove_presence

KEEPS = ("unsharded", "sharded")


@dataclass(frozen=True)
class DeferReduces(Pass):
    name: ClassVar[str] = "defer-reduces"
    requires: ClassVar[tuple[str, ...]] = ("reduces-inserted",)
    provides: ClassVar[tuple[str, ...]] = ("reduces-deferred",)

    keep: str = "unsharded"
    """What stays behind: 'unsharded', every rank's whole gradients, or 'sharded', the sums of the shard groups."""

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, KEEPS)

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        phase = schedule.backward
        if phase is None:
            return
        if self.keep == "sharded" and schedule.F > 1 and schedule.replicas == 1:
            remarks.missed("(all)", "no replicas: what a shard group sums is the gradient")
            return
        keep = self.keep if schedule.F > 1 else "unsharded"
        schedule.unplan()
        kept_bytes = 0
        for flatten in phase.nodes("flatten_grads"):
            flat = schedule.flats[info(flatten).flat or ""]
            end = phase.landing(flat.name)
            assert end is not None
            size = flat.accumulate_dtype.itemsize * (flat.padded_numel if keep == "unsharded" else flat.shard_numel)
            kept_bytes += size
            if keep == "unsharded":
                with phase.graph.inserting_before(flatten):
                    phase.call(ops.keep_grads, tuple(flatten.args[:5]), flat=flat, by=self.name, num_bytes=size)
                _erase(phase, end)
                remarks.passed(flat.name, "kept unsharded, not reduced")
                continue
            reduced = phase.one("reduce_scatter", flat.name)
            assert reduced is not None
            with phase.graph.inserting_before(end):
                wait = phase.call(
                    ops.wait, (reduced, flat.name), flat=flat, by=self.name, name=f"scattered_{flat.name}"
                )
                phase.call(ops.keep_shard, (wait, flat.name), flat=flat, by=self.name, num_bytes=size)
            _erase(phase, end, reduced)
            remarks.passed(flat.name, "its sum of the shard group kept, not reduced across replicas")
        remove_presence(phase)
        schedule.accumulation = Accumulation(keep, schedule.accumulation.kept, schedule.accumulation.kept_shards)
        schedule.memory.kept_bytes = kept_bytes


def _erase(phase: Phase, end: fx.Node, start: fx.Node | None = None) -> None:
    """Remove a reduce from its end back to what comes after `start`, or to its FLAT."""
    doomed, node = [end], end.args[0]
    while isinstance(node, fx.Node) and node is not start:
        doomed.append(node)
        node = node.args[0]
    for each in doomed:
        phase.graph.erase_node(each)
