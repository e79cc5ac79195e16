"""A timeline as a trace file that https://ui.perfetto.dev and chrome://tracing open (Chrome's JSON trace format).

One process; a thread for the phases and one for each queue; counters for the memory held. Collectives, compute segments
and exposed time are slices. What takes no time is an instant, but for a WAIT, which is a slice of no length: a flow goes
to it from its collective, and may not end in an instant.

Times are whole microseconds, so that no rounding makes neighbours overlap; one unit slot is a thousand of them.

Source: "Trace Event Format", Google; flows are those of version 2 (`bind_id`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fxshard.ir import ops
from fxshard.viz.lanes import NO_UNIT
from fxshard.viz.page import time_note, unit_text
from fxshard.viz.timeline import Bar, Curve, Mark, Timeline

MICROSECONDS = {"slots": 1000, "us": 1, "ms": 1000, "s": 1_000_000}
"""Microseconds of the trace for one of each unit of time."""

PID, PHASES_TID = 1, 0
"""The one process, and its thread of phases; queues are the threads from 1 on."""

Event = dict[str, Any]


def draw_trace(timeline: Timeline) -> str:
    """The trace file as text; the same timeline gives the same text."""
    return json.dumps(trace(timeline), separators=(",", ":"), allow_nan=False) + "\n"


def trace(timeline: Timeline) -> dict[str, Any]:
    """What the file says: `traceEvents` in order of time, and under `otherData` what the times mean."""
    step = "training step" if len(timeline.spans) > 1 else "forward call"
    us = MICROSECONDS[timeline.unit]
    names = [_name("process_name", PHASES_TID, name=f"fxshard: one {step}, W={timeline.W}, F={timeline.F}")]
    for tid, thread in enumerate(["phases", *(lane.queue for lane in timeline.lanes)]):
        names.append(_name("thread_name", tid, name=thread))
        names.append(_name("thread_sort_index", tid, sort_index=tid))
    events: list[Event] = []
    for span in timeline.spans:
        events.append(_slice(span.phase, "phase", PHASES_TID, span.start, span.end, {"exposed": span.exposed}, us))
    flows = _flows(timeline)
    for tid, lane in enumerate(timeline.lanes, 1):
        # Marks first: one that stands where a bar begins is before that bar and not inside it.
        events += [_mark(mark, tid, flows, us) for mark in lane.marks]
        events += [_bar(bar, tid, flows, us) for bar in lane.bars]
        if lane.queue == "compute":
            for gap in timeline.exposed:
                cause = f"exposed: waits for {gap.cause}"
                events.append(_slice(cause, "exposed", tid, gap.start, gap.end, {"phase": gap.phase}, us))
    events += _counter("gathered parameters, residents included", timeline.gathered, timeline.end, us)
    events += _counter("gradient buffers", timeline.gradients, timeline.end, us)
    events.sort(key=lambda event: event["ts"])  # stable: what shares a time stays in the order above
    about = {
        "time": f"{time_note(timeline)} In this trace {us} us are 1 of the {unit_text(timeline.unit)}.",
        "W": timeline.W,
        "F": timeline.F,
        "passes": list(timeline.passes),
    }
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}


def _flows(timeline: Timeline) -> dict[tuple[str, str, float], int]:
    """The number of the flow that starts at a collective and ends at its WAIT: by queue, name and time of either."""
    bars = {(bar.queue, bar.name, bar.end) for lane in timeline.lanes for bar in lane.bars}
    flows: dict[tuple[str, str, float], int] = {}
    for number, arrow in enumerate(timeline.arrows, 1):
        source = (arrow.source, arrow.name, arrow.source_time)
        if arrow.kind == "wait" and source in bars:
            flows[source] = flows[arrow.target, arrow.name, arrow.target_time] = number
    return flows


def _bar(bar: Bar, tid: int, flows: dict[tuple[str, str, float], int], us: int) -> Event:
    if bar.kind == "compute":
        args: dict[str, Any] = {"unit": bar.unit, "operators": bar.num_operators, "phase": bar.phase}
        return _slice(bar.name or NO_UNIT, "compute", tid, bar.start, bar.end, args, us)
    args = {"unit": bar.unit, "bytes": bar.num_bytes, "phase": bar.phase}
    if bar.passes:
        args["put there by"], *moved = bar.passes
        if moved:
            args["moved by"] = moved
    event = _slice(f"{ops.LABELS[bar.kind]} {bar.name}", "collective", tid, bar.start, bar.end, args, us)
    if (flow := flows.get((bar.queue, bar.name, bar.end))) is not None:
        event |= {"bind_id": hex(flow), "flow_out": True}
    return event


def _mark(mark: Mark, tid: int, flows: dict[tuple[str, str, float], int], us: int) -> Event:
    name = f"{ops.LABELS[mark.kind]} {mark.name}".strip()
    if mark.kind != "wait":
        where = {"pid": PID, "tid": tid, "ts": round(mark.time * us)}
        return {"ph": "i", "s": "t", "cat": mark.kind, "name": name, **where, "args": {"phase": mark.phase}}
    args = {"phase": mark.phase, "queue waited for": mark.source}
    event = _slice(name, "wait", tid, mark.time, mark.time, args, us)
    if (flow := flows.get((mark.queue, mark.name, mark.time))) is not None:
        event |= {"bind_id": hex(flow), "flow_in": True}
    return event


def _slice(name: str, category: str, tid: int, start: float, end: float, args: dict[str, Any], us: int) -> Event:
    where = {"pid": PID, "tid": tid, "ts": round(start * us), "dur": round(end * us) - round(start * us)}
    return {"ph": "X", "cat": category, "name": name, **where, "args": args}


def _counter(name: str, curve: Curve, end: float, us: int) -> Iterator[Event]:
    """Bytes over time; zero after the step, where the picture ends, though residents stay where they are."""
    for time, num_bytes in (*curve.points, (end, 0)):
        where = {"pid": PID, "tid": PHASES_TID, "ts": round(time * us)}
        yield {"ph": "C", "name": name, **where, "args": {"bytes": num_bytes}}


def _name(kind: str, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "ts": 0, "args": args}
