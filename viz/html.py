"""A schedule as one HTML file that loads nothing: a timeline to zoom into, its operations, units, passes and memory.

`report.html`, `.css` and `.js` beside this file are the page; what it shows is embedded as JSON. The script writes text
nodes alone, so no name can become markup; in the JSON and the text of the page `<`, `>` and `&` are escaped.
"""

from __future__ import annotations

import functools
import html
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from torch import fx

from fxshard.ir import FlatParameter, Schedule, clock, ops
from fxshard.ir.diff import marked, near_changes
from fxshard.ir.nodes import bytes_text, describe, info
from fxshard.viz.lanes import LANE_NOTES, MARKS, NO_UNIT, TITLES
from fxshard.viz.page import mode_text, time_note, unit_text
from fxshard.viz.style import Palette
from fxshard.viz.timeline import ROOT, Timeline, lay_out


def draw_html(schedule: Schedule) -> str:
    """The page as text; the same schedule gives the same text, but for the seconds its passes took."""
    found = report(schedule)
    data = json.dumps(found, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = _part("report.html")
    fields = {
        "title": html.escape(found["title"]),
        "style": _part("report.css"),
        "data": data,
        "text": html.escape(schedule.text()),
        "script": _part("report.js"),
    }
    before, *pieces = page.split("{{")
    for piece in pieces:
        field, after = piece.split("}}", 1)
        before += fields[field] + after
    return before


@functools.cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def report(schedule: Schedule) -> dict[str, Any]:
    """What the page shows, of JSON's types: `timeline` holds the fields of `Timeline`, sizes are in bytes or elements."""
    timeline = lay_out(schedule)
    palette = Palette(timeline.kinds, ROOT)
    fields = asdict(timeline) | {"end": timeline.end}
    return {
        "title": f"Schedule of one {'forward call' if schedule.backward is None else 'training step'}",
        "summary": list(_summary(schedule, timeline)),
        "time": time_note(timeline),
        "timeline": fields,
        "operations": list(_operations(schedule, timeline)),
        "units": [_unit(schedule, flat) for flat in schedule.flats.values()],
        "passes": _passes(schedule),
        "memory": asdict(schedule.memory),
        "hues": {unit: [*palette.hues[kind], palette.place[unit] % 2] for unit, kind in timeline.kinds.items()},
        "words": {
            "queues": LANE_NOTES,
            "kinds": TITLES | {kind: f"{label} {what}" for kind, (label, what) in MARKS.items()},
            "no unit": NO_UNIT,
            "time": f"time in {unit_text(timeline.unit)}",
        },
    }


def _summary(schedule: Schedule, timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    """Label, value and note of each figure at the top."""
    yield "Ranks", f"W = {schedule.W}, F = {schedule.F}", mode_text(schedule.W, schedule.F)
    flats = schedule.flats.values()
    yield "FSDP units", f"{len(schedule.units)}", f"{sum(flat.numel for flat in flats):,} elements of parameters"
    issued = [info(node) for phase in schedule.phases for kind in ops.COLLECTIVES for node in phase.nodes(kind)]
    count = Counter(found.kind for found in issued)
    each = ", ".join(f"{number} {TITLES[kind]}" for kind, number in count.items())
    moved = bytes_text(sum(found.num_bytes for found in issued))
    yield "Collectives", f"{len(issued)}", f"{each}; {moved} in all" if issued else "none yet"
    exposed = sum(span.exposed for span in timeline.spans)
    yield "Exposed", f"{exposed:.2f} {timeline.unit}", f"of {timeline.end:.2f} in which compute waits"
    resident = f"residents {bytes_text(timeline.resident_bytes)}" if timeline.resident_bytes else "no residents"
    yield "Peak gathered", bytes_text(timeline.gathered.peak[1]), resident
    yield "Peak gradients", bytes_text(timeline.gradients.peak[1]), "gradient buffers and reduce staging"
    if "memory-planned" in schedule.established:
        yield "Arena", bytes_text(schedule.memory.arena_bytes), "shared by all phases, residents outside"
        if schedule.offloaded:
            yield "Arena on the host", bytes_text(schedule.memory.host_bytes), "gradients on their way to .grad"


def _operations(schedule: Schedule, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Each step of the schedule in issue order; `at` is its place in the timeline: lane, bar or mark, number.

    A LIMIT, and operators that take no time, have none.
    """
    places: dict[tuple[str, str], Iterator[list[Any]]] = {}
    for number, lane in enumerate(timeline.lanes):
        for shape, count in (("bars", len(lane.bars)), ("marks", len(lane.marks))):
            places[lane.queue, shape] = iter([[number, shape, i] for i in range(count)])
    for task in clock.run(schedule).tasks:
        found = info(task.node)
        row: dict[str, Any] = {"phase": task.phase, "queue": found.queue}
        if found.kind == "compute":
            row |= {"op": "GRAD" if task.phase == "backward" else "FWD", "name": task.unit, "bytes": 0}
            row["note"] = f"{len(task.nodes)} operator{'s' if len(task.nodes) > 1 else ''}"
        else:
            size = found.num_bytes if found.kind != "wait" else 0
            row |= {"op": ops.LABELS[found.kind], "name": found.label, "bytes": size, "note": _note(task.node)}
        shape = "bars" if found.kind in ("compute", *ops.COLLECTIVES) else "marks"
        if found.kind != "throttle" and not (found.kind == "compute" and task.end == task.start):
            row["at"] = next(places[found.queue, shape])
        yield row


def _note(node: fx.Node) -> str:
    found = info(node)
    if found.kind in ("wait", "throttle"):
        return f"{'for' if found.kind == 'wait' else 'after'} {describe(node.args[0])}"  # type: ignore[arg-type]
    return f"moved by {', '.join(dict.fromkeys(found.moved_by))}" if found.moved_by else ""


def _unit(schedule: Schedule, flat: FlatParameter) -> dict[str, Any]:
    return {
        "name": flat.name,
        "unit": flat.unit,
        "numel": flat.numel,
        "dtype": str(flat.dtype).removeprefix("torch."),
        "gathered as": str(flat.param_dtype).removeprefix("torch."),
        "gathered bytes": flat.full_bytes,
        "shard bytes": flat.shard_numel * flat.dtype.itemsize,
        "notes": [
            word
            for word, holds in (
                ("root", flat.is_root),
                ("resident", flat.name in schedule.resident),
                ("frozen", not flat.requires_grad),
            )
            if holds
        ],
        "parameters": [[p.fqn, list(p.shape), list(p.aliases)] for p in flat.parameters],
    }


def _passes(schedule: Schedule) -> list[dict[str, Any]]:
    """Each pass as it ran, with what it said; where one name ran twice, the first has the remarks of both."""
    remarks: dict[str, list[dict[str, str]]] = {}
    for remark in schedule.remarks:
        said = {"kind": remark.kind, "unit": remark.unit, "text": remark.text}
        remarks.setdefault(remark.by, []).append(said)
    lines = [(), *(record.lines for record in schedule.history)]
    return [
        {
            "text": record.text,
            "seconds": record.seconds,
            "added": record.added,
            "removed": record.removed,
            "moved": record.moved,
            "remarks": remarks.pop(record.text.split("{")[0], []),
            "changes": list(_changes(before, after)) if before and after else [],
        }
        for record, before, after in zip(schedule.history, lines, lines[1:])
    ]


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lines of a schedule's text that differ, each with its mark and with a line around it.

    `-` gone, `+` new; `<` from here and `>` to here for one that only moved, ` ` the same, `…` some are left out. Columns
    are closed up, since their widths change with what is in them, and neither their titles nor the list of passes count.
    """

    def kept(lines: Sequence[str]) -> list[str]:
        closed = [" ".join(line.split()) for line in lines if not line.startswith("#")]
        return [line for line in closed if not set(line.split()) <= set(ops.QUEUE_ORDER)]

    entries = marked(kept(before), kept(after), str)
    near = near_changes((mark for mark, _ in entries), 1)
    for place, entry in enumerate(entries):
        if place in near:
            yield entry
        elif place - 1 in near:
            yield "…", ""
