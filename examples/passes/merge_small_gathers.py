"""Merge the AllGathers of small units that follow each other, up to a size in bytes.

Why      A message costs time whatever it carries: sixteen gathers of a kilobyte take almost sixteen times as long as one
         of sixteen.
Assumes  gathers-inserted, frees-inserted.
Gives    small-gathers-merged: in both phases each run of gathers of at most `small_bytes`, with no larger one between, is
         cut into buckets of at most `bucket_bytes` and `members`, in the order of issue. Inside a bucket: registration
         order.
Keeps    Values bit for bit; every WAIT and FREE; the order of larger gathers.
Costs    A bucket's members are all gathered from the first one's AG on, and its memory is reused behind the last one's
         FREE; a direct exchange (gloo) takes as many bytes again for staging.
Source   PyTorch DDP's gradient buckets (`bucket_cap_mb`), turned to gathers.

The rate limit counts the unit of every member. Before rate-limit and the prefetching passes, `members` must be within the
limit, and half of it leaves room for the next bucket to come while one is in use. After rate-limit only what no throttle
separates is merged, which breaks no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import Phase, Remarks, Schedule
from fxshard.ir.nodes import bytes_text, describe, info
from fxshard.passes import Pass


@dataclass(frozen=True)
class MergeSmallGathers(Pass):
    name: ClassVar[str] = "merge-small-gathers"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted", "frees-inserted")
    provides: ClassVar[tuple[str, ...]] = ("small-gathers-merged",)

    bucket_bytes: int = 1 << 20
    """Most gathered bytes of a bucket."""
    small_bytes: int = 1 << 18
    """A larger gather stays alone."""
    members: int | None = None
    """Most FlatParameters of a bucket; None = as many as fit."""

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        for phase in schedule.phases:
            bucket: fx.Node | None = None
            for gather in phase.all_gathers:
                if info(gather).num_bytes > self.small_bytes:
                    remarks.missed(info(gather).label, f"{bytes_text(info(gather).num_bytes)} is not small")
                    bucket = None
                elif bucket is None or not self._fits(bucket, gather):
                    bucket = gather
                else:
                    bucket = self._merge(phase, bucket, gather, remarks)

    def _fits(self, bucket: fx.Node, gather: fx.Node) -> bool:
        count = len(info(bucket).flats) + len(info(gather).flats)
        size = info(bucket).num_bytes + info(gather).num_bytes
        return size <= self.bucket_bytes and (self.members is None or count <= self.members)

    def _merge(self, phase: Phase, bucket: fx.Node, gather: fx.Node, remarks: Remarks) -> fx.Node:
        """The bucket with `gather` in it, or, where the schedule forbids that, `gather`: it begins the next one."""
        label, before = info(gather).label, describe(bucket)
        try:
            bucket = phase.merge_gathers([bucket, gather], self.name)
        except ScheduleError as error:
            remarks.missed(label, str(error))
            return gather
        remarks.passed(label, f"gathered with {before} in {phase.name}")
        return bucket
