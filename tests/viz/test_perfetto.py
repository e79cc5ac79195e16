"""The trace file: read back as JSON, and compared with the schedule's own nodes and with the timeline."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from fxshard.ir import clock, ops
from fxshard.viz import render
from fxshard.viz.perfetto import MICROSECONDS, draw_trace
from fxshard.viz.timeline import lay_out
from tests.viz.cases import CASES, Named, traced

every_case = pytest.mark.parametrize("name", CASES)

Event = dict[str, Any]


@functools.cache
def parsed(name: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(draw_trace(lay_out(traced(name))), parse_constant=refuse)


def events(name: str, *phases: str) -> list[Event]:
    return [event for event in parsed(name)["traceEvents"] if event["ph"] in phases]


def threads(name: str) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(name, "M") if e["name"] == "thread_name"}


@every_case
def test_a_slice_for_each_collective_and_an_event_for_every_other_node(name: str) -> None:
    schedule = traced(name)
    expected: Counter[tuple[str, str, str]] = Counter()
    for phase in schedule.phases:
        for node in phase.graph.nodes:
            found = node.meta.get("fxshard")
            if found is not None and found.kind in ops.LABELS and found.kind != "throttle":
                shape = "X" if found.kind in (*ops.COLLECTIVES, "wait") else "i"
                expected[shape, f"{ops.LABELS[found.kind]} {found.flat or ''}".strip(), phase.name] += 1
    labels = tuple(ops.LABELS.values())
    drawn = Counter(
        (e["ph"], e["name"], e["args"]["phase"]) for e in events(name, "X", "i") if e["name"].split(" ")[0] in labels
    )
    assert drawn == expected


@every_case
def test_slices_say_what_the_nodes_say(name: str) -> None:
    schedule = traced(name)
    drawn = {(e["name"], e["args"]["phase"]): e["args"] for e in events(name, "X") if e["cat"] == "collective"}
    for phase in schedule.phases:
        for kind in ops.COLLECTIVES:
            for node in phase.nodes(kind):
                found = node.meta["fxshard"]
                args = drawn[f"{ops.LABELS[kind]} {found.flat}", phase.name]
                assert (args["unit"], args["bytes"], args["put there by"]) == (found.unit, found.num_bytes, found.by)
                assert set(args.get("moved by", ())) == set(found.moved_by) - {found.by}
    operators = Counter[str]()
    for event in events(name, "X"):
        if event["cat"] == "compute":
            operators[event["args"]["phase"]] += event["args"]["operators"]
    taking_time = [t for t in clock.run(schedule).tasks if t.kind == "compute" and t.end > t.start]
    for phase in schedule.phases:
        assert operators[phase.name] == sum(len(t.nodes) for t in taking_time if t.phase == phase.name)


@every_case
def test_a_thread_for_each_queue_in_the_order_of_the_picture(name: str) -> None:
    queues = [lane.queue for lane in lay_out(traced(name)).lanes]
    assert threads(name) == dict(enumerate(["phases", *queues]))
    order = {e["tid"]: e["args"]["sort_index"] for e in events(name, "M") if e["name"] == "thread_sort_index"}
    assert order == {tid: tid for tid in threads(name)}


@every_case
def test_slices_of_a_thread_do_not_overlap(name: str) -> None:
    ends: dict[int, int] = defaultdict(int)
    for event in events(name, "X", "i"):  # in the order of the file, as a reader takes them
        assert isinstance(event["ts"], int) and event.get("dur", 0) >= 0
        assert event["ts"] >= ends[event["tid"]], event
        ends[event["tid"]] = event["ts"] + event.get("dur", 0)


@every_case
def test_each_wait_for_a_collective_has_a_flow_with_both_ends(name: str) -> None:
    schedule = traced(name)
    sources = {e["bind_id"]: e for e in events(name, "X") if e.get("flow_out")}
    targets = {e["bind_id"]: e for e in events(name, "X") if e.get("flow_in")}
    bound = [e for e in events(name, "X", "i", "C", "M") if "bind_id" in e]
    assert sources.keys() == targets.keys() and len(bound) == 2 * len(sources)
    queues = threads(name)
    for flow, source in sources.items():
        target = targets[flow]
        assert source["ts"] + source["dur"] <= target["ts"]
        assert source["name"].split(" ", 1)[1] == target["name"].split(" ", 1)[1]
        assert queues[source["tid"]] == target["args"]["queue waited for"]
    waited = [w for p in schedule.phases for w in p.waits if w.args[0].meta["fxshard"].kind in ops.COLLECTIVES]
    assert len(sources) == len(waited)


@every_case
def test_counters_follow_the_curves_and_end_at_zero(name: str) -> None:
    timeline = lay_out(traced(name))
    levels: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events(name, "C"):
        levels[event["name"]].append((event["ts"], event["args"]["bytes"]))
    gathered, gradients = levels.values()
    for found, curve in ((gathered, timeline.gathered), (gradients, timeline.gradients)):
        assert found[:-1] == [(round(time * 1000), num_bytes) for time, num_bytes in curve.points]
        assert found[-1] == (round(timeline.end * 1000), 0)


@every_case
def test_exposed_time_and_phases(name: str) -> None:
    timeline = lay_out(traced(name))
    exposed = [e for e in events(name, "X") if e["cat"] == "exposed"]
    assert [e["name"] for e in exposed] == [f"exposed: waits for {gap.cause}" for gap in timeline.exposed]
    assert {threads(name)[e["tid"]] for e in exposed} <= {"compute"}
    assert [e["name"] for e in events(name, "X") if e["cat"] == "phase"] == [p.name for p in traced(name).phases]


def test_it_says_what_its_times_mean() -> None:
    about = parsed("hybrid")["otherData"]
    assert "not measured" in about["time"] and "1000 us are 1 of the unit slots" in about["time"]
    assert MICROSECONDS["slots"] == MICROSECONDS["ms"] == 1000
    assert (about["W"], about["F"]) == (8, 4)
    assert about["passes"] == [record.text for record in traced("hybrid").history]


def test_any_unit_name_goes_through() -> None:
    drawn = {e["args"]["unit"] for e in events("names", "X") if e["cat"] == "collective"}
    assert drawn == set(Named.NAMES)


@pytest.mark.parametrize("suffix", [".perfetto.json", ".trace.json", ".Perfetto.JSON"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"step{suffix}"
    render(traced("hybrid"), path)
    assert path.read_text(encoding="utf-8") == draw_trace(lay_out(traced("hybrid")))
