"""The layout of a schedule in time, compared with what the schedule's own nodes say."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
import torch
from torch import fx, nn

import fxshard
from fxshard.ir import Phase, Schedule, ops
from fxshard.ir.costs import COMMUNICATION_SHARE, SHORTEST
from fxshard.viz.lanes import MARKS, TITLES
from fxshard.viz.timeline import Bar, Timeline, lay_out
from tests.viz.cases import CASES, traced

PLANNED = [name for name in CASES if name not in ("no-plan", "gathers-only", "no-passes")]
every_case = pytest.mark.parametrize("name", CASES)


def kind_of(node: fx.Node) -> str:
    found = node.meta.get("fxshard")
    return found.kind if found is not None else "compute"


def queue_of(node: fx.Node) -> str:
    return node.meta["fxshard"].queue


def collectives(phase: Phase) -> list[fx.Node]:
    return [n for n in phase.graph.nodes if kind_of(n) in ("all_gather", "reduce_scatter", "all_reduce")]


def bars_of(timeline: Timeline, phase: str, *queues: str) -> list[Bar]:
    return [b for lane in timeline.lanes if lane.queue in queues for b in lane.bars if b.phase == phase]


@every_case
def test_each_queue_holds_its_collectives_in_issue_order(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    for phase in schedule.phases:
        issued: dict[str, list[tuple[str, str, int]]] = {}
        for node in collectives(phase):
            found = node.meta["fxshard"]
            issued.setdefault(found.queue, []).append((found.kind, found.flat, found.num_bytes))
        drawn = {
            lane.queue: [(b.kind, b.name, b.num_bytes) for b in lane.bars if b.phase == phase.name]
            for lane in timeline.lanes
            if lane.queue != "compute"
        }
        assert {queue: found for queue, found in drawn.items() if found} == issued


@every_case
def test_a_lane_for_each_queue_that_occurs(name: str) -> None:
    schedule = traced(name)
    used = {"compute"}
    for phase in schedule.phases:
        used |= {queue_of(n) for n in phase.graph.nodes if kind_of(n) in ops.LABELS}
    assert {lane.queue for lane in lay_out(schedule).lanes} == used


@every_case
def test_one_thing_at_a_time_on_a_queue_and_on_the_communicator(name: str) -> None:
    timeline = lay_out(traced(name))
    for lane in timeline.lanes:
        assert all(before.end <= after.start for before, after in pairwise(lane.bars))
        assert all(bar.start < bar.end for bar in lane.bars)
    for span in timeline.spans:
        shared = sorted((b.start, b.end) for b in bars_of(timeline, span.phase, "unshard", "reduce"))
        assert all(before[1] <= after[0] for before, after in pairwise(shared))


@every_case
def test_collectives_of_the_shard_group_keep_their_issue_order(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    for phase in schedule.phases:
        issued = [
            (kind_of(n), n.meta["fxshard"].flat) for n in collectives(phase) if queue_of(n) in ("unshard", "reduce")
        ]
        drawn = sorted(bars_of(timeline, phase.name, "unshard", "reduce"), key=lambda bar: bar.start)
        assert [(bar.kind, bar.name) for bar in drawn] == issued


@every_case
def test_no_wait_ends_before_its_collective(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    ends = {(b.phase, b.queue, b.name): b.end for lane in timeline.lanes for b in lane.bars if b.queue != "compute"}
    waits = [m for lane in timeline.lanes for m in lane.marks if m.kind == "wait" and m.name]
    assert all(mark.time >= ends[mark.phase, mark.source, mark.name] for mark in waits)
    issued = sum(kind_of(n) == "wait" for phase in schedule.phases for n in phase.graph.nodes)
    assert sum(arrow.kind == "wait" for arrow in timeline.arrows) == issued
    assert all(arrow.source_time <= arrow.target_time for arrow in timeline.arrows)


@every_case
def test_operators_of_a_unit_start_between_its_wait_and_its_free(name: str) -> None:
    timeline = lay_out(traced(name))
    compute = next(lane for lane in timeline.lanes if lane.queue == "compute")
    starts: dict[tuple[str, str], float] = {}
    for bar in compute.bars:
        starts.setdefault((bar.phase, bar.unit), bar.start)
    for mark in compute.marks:
        start = starts.get((mark.phase, mark.name))
        if start is not None and mark.kind == "wait" and mark.source == "unshard":
            assert mark.time <= start
        elif start is not None and mark.kind == "free":
            assert start < mark.time


@every_case
def test_compute_is_either_busy_or_exposed(name: str) -> None:
    timeline = lay_out(traced(name))
    for span in timeline.spans:
        busy = [(b.start, b.end) for b in bars_of(timeline, span.phase, "compute")]
        idle = [(gap.start, gap.end) for gap in timeline.exposed if gap.phase == span.phase]
        pieces = sorted([*busy, *idle])
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        assert pieces[0][0] == span.start
        assert pieces[-1][1] == span.end
        assert span.exposed == pytest.approx(sum(end - start for start, end in idle))


@every_case
def test_phases_follow_each_other(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    assert [span.phase for span in timeline.spans] == [phase.name for phase in schedule.phases]
    assert timeline.spans[0].start == 0.0
    assert all(before.end == after.start for before, after in pairwise(timeline.spans))
    assert timeline.end == timeline.spans[-1].end


@pytest.mark.parametrize("name", PLANNED)
def test_peaks_are_those_of_the_memory_plan(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    assert timeline.gathered.peak[1] == schedule.memory.peak_gathered_bytes
    assert timeline.gradients.peak[1] == schedule.memory.peak_gradient_bytes
    assert timeline.resident_bytes == schedule.memory.resident_bytes


@every_case
def test_curves_begin_and_end_with_the_residents(name: str) -> None:
    timeline = lay_out(traced(name))
    assert timeline.gathered.points[0] == (0.0, timeline.resident_bytes)
    assert timeline.gathered.points[-1] == (timeline.end, timeline.resident_bytes)
    assert timeline.gradients.points[-1] == (timeline.end, 0)
    for curve in (timeline.gathered, timeline.gradients):
        assert all(before[0] <= after[0] and after[1] >= 0 for before, after in pairwise(curve.points))


@pytest.mark.parametrize("name", ["hybrid", "no-limit", "no-plan"])
def test_a_gathered_buffer_is_counted_while_its_collective_runs_and_until_its_free(name: str) -> None:
    schedule = traced(name)
    timeline = lay_out(schedule)
    gathers = [b for b in bars_of(timeline, "forward", "unshard") if b.name not in schedule.resident]
    compute = next(lane for lane in timeline.lanes if lane.queue == "compute")
    freed = {mark.name: mark.time for mark in compute.marks if (mark.phase, mark.kind) == ("forward", "free")}
    for bar in gathers:
        alive = sum(other.num_bytes for other in gathers if other.start <= bar.start < freed[other.name])
        held = [level for time, level in timeline.gathered.points if time <= bar.start][-1]
        assert held >= timeline.resident_bytes + alive


def test_the_median_unit_takes_one_slot_and_collectives_their_share() -> None:
    timeline = lay_out(traced("full"))
    forward: dict[str, float] = {}
    for bar in bars_of(timeline, "forward", "compute"):
        forward[bar.unit] = forward.get(bar.unit, 0.0) + bar.end - bar.start
    assert statistics.median(forward.values()) == pytest.approx(1.0)
    for span in timeline.spans:
        compute = sum(b.end - b.start for b in bars_of(timeline, span.phase, "compute"))
        moved = bars_of(timeline, span.phase, "unshard", "reduce", "replicate")
        assert min(b.end - b.start for b in moved) > SHORTEST
        assert sum(b.end - b.start for b in moved) == pytest.approx(COMMUNICATION_SHARE * compute)
        ratios = [(b.end - b.start) / b.num_bytes for b in moved]
        assert min(ratios) == pytest.approx(max(ratios))


def test_a_backward_segment_takes_longer_than_its_forward() -> None:
    timeline = lay_out(traced("full"))
    for unit in ("layers.1", "layers.2"):
        forward, backward = (
            sum(b.end - b.start for b in bars_of(timeline, phase, "compute") if b.unit == unit)
            for phase in ("forward", "backward")
        )
        assert backward > forward


def test_prefetching_hides_communication() -> None:
    with_prefetch, without = lay_out(traced("full")), lay_out(traced("no-prefetch"))
    for ahead, late in zip(with_prefetch.spans, without.spans):
        assert ahead.exposed < late.exposed
        assert ahead.end < late.end


def test_an_arrow_shows_the_free_that_holds_a_gather_back() -> None:
    timeline = lay_out(traced("hybrid"))
    frees = {mark.time for lane in timeline.lanes for mark in lane.marks if mark.kind == "free"}
    starts = {bar.name: bar.start for bar in bars_of(timeline, "forward", "unshard")}
    held = [a for a in timeline.arrows if a.kind == "limit" and a.target_time < timeline.spans[0].end]
    assert held
    for arrow in held:
        assert arrow.source_time in frees
        assert arrow.source_time == pytest.approx(arrow.target_time)
        assert arrow.target_time == starts[arrow.name]
    assert not [a for a in lay_out(traced("no-limit")).arrows if a.kind == "limit"]


def test_who_put_and_who_moved_a_collective() -> None:
    bar = next(b for b in bars_of(lay_out(traced("hybrid")), "backward", "unshard") if b.name == "layers.1")
    assert bar.passes[:2] == ("insert-gathers", "backward-prefetch")


def test_segments_are_those_of_the_text() -> None:
    schedule = traced("hybrid")
    lines = [
        line.split()
        for line in schedule.text().splitlines()
        if line.split()[:2] in (["compute", "FWD"], ["compute", "GRAD"])
    ]
    text = [(words[2] if len(words) == 5 else "", int(words[-2])) for words in lines]
    timeline = lay_out(schedule)
    drawn = [(b.unit, b.num_operators) for lane in timeline.lanes if lane.queue == "compute" for b in lane.bars]
    assert drawn == text


def test_unit_kinds() -> None:
    timeline = lay_out(traced("hybrid"))
    assert timeline.kinds == {"(root)": "(root)", **{f"layers.{i}": "layers.*" for i in range(4)}}
    assert timeline.root_kinds == {"(root)"}


def test_every_node_kind_has_a_picture() -> None:
    assert {*TITLES, *MARKS, "throttle"} == set(ops.LABELS)


def test_casts_of_mixed_precision_are_marks() -> None:
    timeline = lay_out(traced("replicated-bf16"))
    casts = [m for lane in timeline.lanes for m in lane.marks if m.kind == "cast_shard"]
    assert {mark.queue for mark in casts} == {"compute"}
    schedule: Schedule = traced("replicated-bf16")
    assert len(casts) == sum(len(phase.nodes("cast_shard")) for phase in schedule.phases)


def test_symbolic_sizes_stay_symbolic() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    schedule = fxshard.trace(model, (torch.randn(6, 4),), F=2, dynamic=True)
    values = [
        n.meta["val"] for n in schedule.forward.graph.nodes if kind_of(n) == "compute" and n.op == "call_function"
    ]
    before = [str(value.shape) for value in values]
    assert "6" not in before[-1]
    assert lay_out(schedule).end > 0
    assert [str(value.shape) for value in values] == before
