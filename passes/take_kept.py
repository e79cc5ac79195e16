"""Add what earlier backwards kept to this one's gradients, so that its reduces end the accumulation.

Why      Gradients of micro-batches under `no_sync` wait for one backward that reduces them all.
Assumes  reduces-inserted.
Gives    kept-taken: FLAT of each of `flats` adds the whole gradients kept of it, AR of each of `shards` the kept sum of
         the shard group. What was kept of a FlatParameter that this backward does not reduce is reduced at its end. ANY
         asks every rank which gradients exist, the kept ones among them: `.grad` is None where it is None everywhere.
Keeps    The order of what is there.
Costs    One small reduction more, where ANY is not there yet.
Source   As `defer-reduces`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fxshard.errors import ScheduleError
from fxshard.ir import Remarks, Schedule
from fxshard.ir.nodes import info
from fxshard.passes.base import Pass
from fxshard.passes.insert_reduces import insert_presence, insert_reduce, remove_presence


@dataclass(frozen=True)
class TakeKept(Pass):
    name: ClassVar[str] = "take-kept"
    requires: ClassVar[tuple[str, ...]] = ("reduces-inserted",)
    provides: ClassVar[tuple[str, ...]] = ("kept-taken",)

    flats: tuple[str, ...] = ()
    """FlatParameters whose whole gradients were kept."""
    shards: tuple[str, ...] = ()
    """FlatParameters of whose gradients the sums of the shard group were kept."""

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        phase = schedule.backward
        if phase is None or not (self.flats or self.shards):
            return
        known = list(schedule.flats)
        for names, allowed in ((self.flats, known), (self.shards, known if schedule.replicas > 1 else [])):
            if unknown := [name for name in names if name not in allowed]:
                raise ScheduleError(
                    f"nothing can have been kept of {', '.join(map(repr, unknown))}; "
                    f"of this schedule's FlatParameters it can of {', '.join(map(repr, allowed)) or 'none'}"
                )
        schedule.unplan()
        if not schedule.accumulation.keep:
            self._complete(schedule, remarks)
        for kind, names in (("flatten_grads", self.flats), ("all_reduce", self.shards)):
            for name in names:
                node = phase.one(kind, name)
                if node is None:
                    raise ScheduleError(f"'{name}' is not reduced by a backward that {schedule.accumulation}")
                node.args = (*node.args[: 5 if kind == "flatten_grads" else 2], True)
                remarks.passed(name, "what was kept is added")
        schedule.accumulation = replace(
            schedule.accumulation, kept=frozenset(self.flats), kept_shards=frozenset(self.shards)
        )

    def _complete(self, schedule: Schedule, remarks: Remarks) -> None:
        """Reduce what this backward has no gradient of, at its end; ask which gradients exist."""
        phase = schedule.backward
        assert phase is not None
        for name in sorted({*self.flats, *self.shards}, key=list(schedule.flats).index):
            if phase.one("flatten_grads", name) is None:
                flat = schedule.flats[name]
                insert_reduce(schedule, flat, [None] * len(flat.parameters), phase.output.prev, self.name)
                remarks.passed(name, "reduced at the end: this backward has no gradient of it")
        remove_presence(phase)
        reduced = [info(node).flat or "" for node in phase.nodes("flatten_grads")]
        insert_presence(schedule, reduced, self.name)
        schedule.needs_presence = True
