"""The difference of two schedules as one SVG file.

Phase by phase and row by row: both timelines under each other on one time scale that begins with the phase, and one plot
of the memory both hold. What was moved, added or removed has a colour; the rest is grey. Of marks and arrows only those
of changed operations are drawn.

What differs is what `fxshard.diff` says, so text and picture agree. Times of both are by the costs of the first: what
differs in time differs in order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from fxshard.ir import Schedule, ops
from fxshard.ir.costs import Costs
from fxshard.ir.diff import diff
from fxshard.ir.nodes import bytes_text, info
from fxshard.viz import style
from fxshard.viz.lanes import MARKS, Lanes, Names
from fxshard.viz.page import (
    LEAST_SLOT,
    LEFT,
    LOW_MEMORY,
    MARGIN,
    MEMORY,
    ROWS,
    TITLE,
    WIDEST,
    Page,
    Sample,
    passes_text,
    sharding_text,
    time_note,
    unit_text,
)
from fxshard.viz.style import Palette, number
from fxshard.viz.timeline import ROOT, Bar, Mark, Span, Timeline, clipped, lay_out, rows_of

Key = tuple[str, str, str, int]
"""Phase, kind (of a WAIT with the queue it waits for), FlatParameter, occurrence: a node of communication."""

HUES = {"moved": style.HUES[0], "added": style.HUES[1], "removed": style.HUES[2]}
SIDES = ("before", "after")

SHEET = "".join(
    [
        ".same0{fill:#eceff2;stroke:#9aa4af}.same1{fill:#dde2e7;stroke:#9aa4af}.unchanged{fill:#9aa4af;stroke:none}",
        *(
            f".{name}{{fill:{style.tint(hue, 0.35)};stroke:{style.shade(hue)}}}"
            f".marks>.{name}{{fill:{style.tint(hue, 0)};stroke:{style.shade(hue)}}}"
            for name, hue in HUES.items()
        ),
        f".link{{fill:none;stroke:{style.tint(HUES['moved'], 0)};stroke-width:1.2;stroke-dasharray:2 3;opacity:.7}}",
        ".before-line{stroke-dasharray:4 3}",
    ]
)


STATES = {"-": "removed", "<": "moved", "+": "added", ">": "moved", " ": "same"}


def compared(a: Schedule, b: Schedule) -> tuple[dict[Key, str], dict[Key, str]]:
    """What became of each communication node of `a` (`same`, `moved`, `removed`), and how each of `b` came to be (`same`,
    `moved`, `added`)."""
    marks = {change.row.node: STATES[change.mark] for change in diff(a, b).changes}
    return _of_nodes(a, marks), _of_nodes(b, marks)


def _of_nodes(schedule: Schedule, marks: dict[fx.Node | None, str]) -> dict[Key, str]:
    found = {}
    for phase in schedule.phases:
        seen: Counter[tuple[str, str]] = Counter()
        for node in phase.graph.nodes:
            kind, flat = info(node).kind, info(node).label
            if kind in ops.LABELS:
                if kind == "wait":
                    kind = f"wait {info(node.args[0]).queue}"
                found[phase.name, kind, flat, seen[kind, flat]] = marks.get(node, "same")
                seen[kind, flat] += 1
    return found


def render_diff(a: Schedule, b: Schedule, path: str | os.PathLike[str]) -> None:
    """Draw what changed from `a` to `b` into a file, replacing it. Raises ValueError unless the suffix of `path` is .svg."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix != ".svg":
        raise ValueError(f"path {os.fspath(path)!r} has suffix {suffix!r}: a difference is drawn as .svg")
    text = draw_diff(a, b)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def draw_diff(a: Schedule, b: Schedule) -> str:
    """The picture as text."""
    return _Diff(a, b).text()


@dataclass(frozen=True)
class _Row:
    """Both timelines from `start` to `end`, counted from where each begins the phase; None where the phase is over."""

    phase: str
    start: float
    end: float
    sides: tuple[Timeline | None, Timeline | None]


class _Diff:
    def __init__(self, a: Schedule, b: Schedule):
        costs = a.costs or Costs.unit_slots(a)
        self.states = compared(a, b)
        self.sides = tuple(_only_changed(lay_out(s, costs), state) for s, state in zip((a, b), self.states))
        first, second = self.sides
        self.palette = Palette(second.kinds | first.kinds, ROOT)
        self.slot = first.slot or second.slot
        self.rows = list(self._cut())
        phases = Counter(row.phase for row in self.rows)
        self.linked = {phase for phase in phases if phases[phase] == 1}
        """Phases of one row: on longer ones both drift so far apart that lines from one to the other help nobody."""
        self.page = Page(max(row.end - row.start for row in self.rows), self.slot)
        self.memory = MEMORY if len(self.rows) < 3 else LOW_MEMORY
        levels = max(map(Names.levels, self.sides))
        self.level = next(filter(self._complete, range(1, levels)), levels - 1)

    def _cut(self) -> Iterator[_Row]:
        phases = dict.fromkeys(span.phase for side in self.sides for span in side.spans)
        begins = [{span.phase: span for span in side.spans} for side in self.sides]
        lengths = [max(s[p].end - s[p].start for s in begins if p in s) for p in phases]
        spans = [Span(phase, 0.0, length, 0.0) for phase, length in zip(phases, lengths)]
        for span, count in zip(spans, rows_of(spans, WIDEST / LEAST_SLOT * self.slot, ROWS)):
            for i in range(count):
                start, end = span.end * i / count, span.end * (i + 1) / count if i + 1 < count else span.end
                yield _Row(
                    span.phase,
                    start,
                    end,
                    tuple(  # type: ignore[arg-type]
                        _piece(side, found.get(span.phase), start, end) for side, found in zip(self.sides, begins)
                    ),
                )

    def _lanes(self, row: _Row, side: int, level: int, y: float) -> Lanes | None:
        piece, whole = row.sides[side], self.sides[side]
        if piece is None:
            return None
        self.page.origin = piece.start
        return Lanes(piece, whole, self.page, Names(whole, self.palette, level), self._fill(side), y)

    def _complete(self, level: int) -> bool:
        lanes = [self._lanes(row, side, level, 0.0) for row in self.rows for side in (0, 1)]
        return all(found.complete for found in lanes if found is not None)

    def _fill(self, side: int) -> Callable[[Bar | Mark], str]:
        def classes(item: Bar | Mark) -> str:
            state = self.states[side].get(_key(item), "same")
            if isinstance(item, Mark):
                return f"{item.kind} {'unchanged' if state == 'same' else state}"
            return f"same{self.palette.place.get(item.unit, 0) % 2}" if state == "same" else state

        return classes

    def text(self) -> str:
        page = self.page
        y = self._header(32.0)
        y = page.legend(y + 26.0, self._samples()) + 12.0
        for row in self.rows:
            top, behind = y, len(page.lines)
            right = LEFT + (row.end - row.start) * page.scale
            placed: list[Lanes | None] = []
            for side in (0, 1):
                page.origin = row.sides[side].start if row.sides[side] else 0.0  # type: ignore[union-attr]
                page.band(y, right, page.origin, self._about(row, side))
                lanes = self._lanes(row, side, self.level, y + 30.0)
                if lanes is not None:
                    lanes.draw(notes=False)
                placed.append(lanes)
                y = (lanes.bottom if lanes is not None else y + 30.0) + 10.0
            self._memory(row, y + 8.0, right)
            bottom = y + 8.0 + self.memory
            front, page.lines[behind:] = page.lines[behind:], []
            page.origin = row.start
            page.time_axis(row.start, row.end, top + 22.0, bottom)
            if row.phase in self.linked:
                self._links(row, placed)
            page.lines += front
            y = bottom + 38.0
        title = f"time from where each begins the phase, in {unit_text(self.sides[0].unit)}"
        page.text(LEFT + (page.width - LEFT - MARGIN) / 2, y - 4.0, title, "m faint")
        return page.file(y + 6.0, "difference of two fxshard schedules", SHEET)

    # -- above the lanes

    def _header(self, y: float) -> float:
        page = self.page
        page.text(MARGIN, y, "Difference of two schedules", "strong", TITLE)
        y = page.paragraph(y + 6.0, self._summary().split(), "strong")
        for name, side in zip(SIDES, self.sides):
            y = page.paragraph(y, [f"{name}: {sharding_text(side)}. Passes:", *passes_text(side)], "faint")
        return page.paragraph(y, f"{time_note(self.sides[0])} Both are drawn by the costs of the first.".split())

    def _summary(self) -> str:
        a, b = self.sides
        idle = [sum(span.exposed for span in side.spans) for side in self.sides]
        texts = [
            _became("Step", f"{a.end:.1f} {a.unit}", f"{b.end:.1f} {b.unit}"),
            _became("exposed", f"{idle[0]:.1f} {a.unit}", f"{idle[1]:.1f} {b.unit}"),
            _became("peak gathered", *(bytes_text(side.gathered.peak[1]) for side in self.sides)),
            _became("peak gradients", *(bytes_text(side.gradients.peak[1]) for side in self.sides)),
        ]
        return "; ".join(texts)

    def _samples(self) -> Iterator[Sample]:
        for state in ("moved", "added", "removed"):
            side = int(state != "removed")
            found = Counter(kind.split()[0] for (_, kind, *_), its in self.states[side].items() if its == state)
            kinds = [*ops.COLLECTIVES, *(kind for kind in ops.LABELS if kind not in ops.COLLECTIVES)]
            counts = ", ".join(f"{found[kind]} {ops.LABELS[kind]}" for kind in kinds if found[kind]) or "none"
            yield ["swatch", state], f"{state}: {counts}"
        yield ["swatch", "same0", "same1"], "unchanged, and operators"
        if any(side.exposed for side in self.sides):
            yield ["swatch", "exposed"], "exposed: compute waits"
        if any(side.arrows for side in self.sides):
            yield ["line", "arrow wait"], "from a changed collective to its WAIT"
        marks = {mark.kind for side in self.sides for lane in side.lanes for mark in lane.marks}
        for kind, (label, _) in MARKS.items():
            if kind in marks:
                yield ["mark", kind], label
        if self.linked and any(s == "moved" and key[1] in ops.COLLECTIVES for key, s in self.states[0].items()):
            yield ["line", "link"], "from where it was to where it is"

    def _about(self, row: _Row, side: int) -> tuple[str, ...]:
        head = f"{SIDES[side]}, {row.phase}"
        span = next((s for s in self.sides[side].spans if s.phase == row.phase), None)
        if span is None:
            return f"{head}: there is none", head
        if row.sides[side] is None:
            return f"{head}: is over", head
        if row.start:
            return f"{head}, continued", head
        length = f"{head}: {span.end - span.start:.1f} {self.sides[side].unit}"
        return f"{length}, {span.exposed:.1f} of them exposed", length, head

    # -- between and below

    def _links(self, row: _Row, placed: list[Lanes | None]) -> None:
        """A line from where a moved collective was to where it is."""
        upper, lower = placed
        if upper is None or lower is None:
            return
        was = {_key(bar): (bar, place.bottom) for place in upper.places.values() for bar in place.lane.bars}
        data = ""
        for place in lower.places.values():
            for bar in place.lane.bars:
                found = was.get(_key(bar))
                if found is None or bar.kind == "compute" or self.states[1].get(_key(bar)) != "moved":
                    continue
                ends = [(b.start + b.end) / 2 - side.timeline.start for b, side in zip((found[0], bar), (upper, lower))]
                x1, x2 = (number(LEFT + end * self.page.scale) for end in ends)
                data += f"M{x1} {number(found[1])}L{x2} {number(place.top)}"
        if data:
            self.page.path(data, "link")

    def _memory(self, row: _Row, y: float, right: float) -> None:
        page = self.page
        most = max(max(side.gathered.peak[1], side.gradients.peak[1], 1) for side in self.sides)
        plot = page.plot(y, self.memory, right, most)
        for side, piece in zip(SIDES, row.sides):
            if piece is None:
                continue
            page.origin = piece.start
            for name in ("gathered", "gradients"):
                curve = getattr(piece, name)
                classes = f"{name}-line {side}-line"
                page.path(page.steps(curve, plot.y, piece.end), classes)
        page.text(MARGIN, y + 8.0, "memory", "strong", 13.0)
        if row is self.rows[0]:
            y += 27.0
            for name in ("gathered", "gradients"):
                for side in SIDES:
                    page.line(MARGIN, y - 4.0, MARGIN + 20.0, y - 4.0, f"{name}-line {side}-line")
                    page.text(MARGIN + 26.0, y, f"{name} {side}")
                    y += 15.0


def _key(item: Bar | Mark) -> Key:
    return *item.identity, item.occurrence


def _piece(timeline: Timeline, span: Span | None, start: float, end: float) -> Timeline | None:
    length = span.end - span.start if span is not None else 0.0
    if span is None or start >= length:
        return None
    return clipped(timeline, span.start + start, span.end if end >= length else span.start + end)


def _only_changed(timeline: Timeline, states: dict[Key, str]) -> Timeline:
    """Without the marks of what did not change, and the arrows of collectives that did not, nor their WAIT."""
    changed = {key for key, state in states.items() if state != "same"}
    queues = {(b.phase, lane.queue, b.name) for lane in timeline.lanes for b in lane.bars if _key(b) in changed}
    queues |= {
        (m.phase, m.source, m.name) for lane in timeline.lanes for m in lane.marks if _key(m) in changed and m.source
    }
    return replace(
        timeline,
        lanes=tuple(
            replace(
                lane, marks=tuple(m for m in lane.marks if _key(m) in changed or (m.phase, m.source, m.name) in queues)
            )
            for lane in timeline.lanes
        ),
        arrows=tuple(a for a in timeline.arrows if a.kind == "wait" and (a.phase, a.source, a.name) in queues),
    )


def _became(what: str, before: str, after: str) -> str:
    return f"{what} {before} before and after" if before == after else f"{what} {before} before, {after} after"
