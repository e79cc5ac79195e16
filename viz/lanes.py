"""The lanes of a picture: one a queue, with bars, exposed time, marks, names, and the arrows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from fxshard.ir.nodes import bytes_text
from fxshard.viz.style import Canvas, Palette, number, shortened, text_width
from fxshard.viz.timeline import Bar, Exposed, Lane, Mark, Timeline

COLLECTIVE, COMPUTE, ROW, FLIGHT, NAMES = 26.0, 38.0, 11.0, 26.0, 17.0
"""Heights: a collective, a compute segment, a row of marks, what arrows cross between lanes, a row of names."""

NO_UNIT = "no parameter"
"""Name of the operators of a phase in which no parameter is read before them."""

OUTLINED = 5.0
"""Bars at least this wide have an outline."""

TITLES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}

LANE_NOTES = {
    "unshard": "AllGather, shard group",
    "compute": "the model's operators",
    "reduce": "ReduceScatter, shard group",
    "replicate": "AllReduce across replicas",
}

MARKS = {
    "cast_shard": ("CAST", "the shard, to the gathered dtype"),
    "load_shard": ("LOAD", "the shard, from host memory"),
    "store_grad": ("STORE", "the reduced gradient, to host memory"),
    "presence": ("ANY", "which gradients exist on any rank"),
    "free": ("FREE", "gathered parameters"),
    "wait": ("WAIT", "for a collective"),
    "flatten_grads": ("FLAT", "gradients into one buffer"),
    "accumulate_grad": ("ACC", "reduced gradient into .grad"),
    "keep_grads": ("KEEP", "whole gradients, for a later reduce"),
    "keep_shard": ("KEEP", "a sum of the shard group, for a later reduce"),
}

ABOVE, BELOW = ("cast_shard", "load_shard", "presence", "free", "wait-down"), (
    "wait-up", "store_grad", "accumulate_grad", "flatten_grads", "keep_grads", "keep_shard"
)  # fmt: skip
"""Rows of marks over and under the bars, downwards; a WAIT stands on the side of the queue it waits for."""

LONGEST_NAME = 24
"""Characters."""

GAP, MOST_ASIDE, BEYOND = 6.0, 8.0, 22.0
"""Pixels between two names under a lane, how far one may stand to the right of its bar, and of the row."""

WITH_BYTES = 0
"""The first level of names: collectives with their bytes. The next ones are the name and what it may be shortened to."""


class Names:
    """What each bar is called: in the same words everywhere in a picture, so by one level for all of it."""

    def __init__(self, timeline: Timeline, palette: Palette, level: int):
        self.kinds, self.palette, self.level = timeline.kinds, palette, level

    def of(self, bar: Bar) -> str:
        if self.level == WITH_BYTES and bar.num_bytes:
            return f"{shortened(bar.name, LONGEST_NAME)} · {bytes_text(bar.num_bytes)}"
        return self.short(bar.name) if bar.name else NO_UNIT

    def short(self, name: str) -> str:
        forms = short_names(name)
        return shortened(forms[min(max(self.level - 1, 0), len(forms) - 1)], LONGEST_NAME)

    @staticmethod
    def levels(timeline: Timeline) -> int:
        """How many there are."""
        return 1 + max((len(short_names(unit)) for unit in timeline.kinds), default=1)


@dataclass
class Place:
    """Where a lane lies: its bars from `top` to `bottom`, and the middle of each row of marks."""

    lane: Lane
    top: float
    bottom: float
    rows: dict[str, float] = field(default_factory=dict)
    runs: list[tuple[list[Bar], str]] = field(default_factory=list)
    """Bars that follow each other without a gap, with the name that stands in them."""
    names: list[tuple[float, str]] = field(default_factory=list)
    """Centre and text of the names that stand under the bars."""
    complete: bool = True
    """Whether every unit has its name."""


class Lanes:
    """Places the lanes of one row of `whole` from `y` down when made; draws when asked. `fill`: the
    classes of each bar and mark."""

    def __init__(
        self, row: Timeline, whole: Timeline, canvas: Canvas, names: Names, fill: Callable[[Bar | Mark], str], y: float
    ):
        self.timeline, self.canvas, self.names, self.fill = row, canvas, names, fill
        self.order = [lane.queue for lane in whole.lanes]
        self.mark_size = min(4.0, max(1.0, 0.25 * canvas.scale * whole.slot))
        self.places: dict[str, Place] = {}
        used = {end for arrow in row.arrows for end in (arrow.source, arrow.target)} | {"compute"}
        for lane, everywhere in zip(row.lanes, whole.lanes):
            if lane.bars or lane.marks or lane.queue in used or row.spans == whole.spans:
                place = self._place(lane, everywhere, y + FLIGHT * bool(self.places))
                self.places[lane.queue] = place
                y = max(place.bottom + NAMES * bool(place.names), *place.rows.values(), 0.0) + ROW / 2
        self.bottom = y

    @property
    def _last_pixel(self) -> float:
        """Where a name under the bars has to end."""
        return self.canvas.x(self.timeline.end) + BEYOND

    @property
    def complete(self) -> bool:
        """Whether every unit has its name in every lane; with bytes, whether they are all inside."""
        inside = self.names.level != WITH_BYTES or not any(
            place.names for queue, place in self.places.items() if queue != "compute"
        )
        return inside and all(place.complete for place in self.places.values())

    def _place(self, lane: Lane, everywhere: Lane, y: float) -> Place:
        phases = {span.phase for span in self.timeline.spans}
        found = {self._row_name(mark) for mark in everywhere.marks if mark.phase in phases}
        above, below = [row for row in ABOVE if row in found], [row for row in BELOW if row in found]
        top = y + ROW * len(above)
        place = Place(lane, top, top + (COMPUTE if lane.queue == "compute" else COLLECTIVE))
        self._label(place)
        under = place.bottom + NAMES * bool(place.names)
        place.rows = {row: y + ROW * (i + 0.5) for i, row in enumerate(above)}
        place.rows |= {row: under + ROW * (i + 0.5) for i, row in enumerate(below)}
        return place

    def _row_name(self, mark: Mark) -> str:
        if mark.kind != "wait":
            return mark.kind
        return "wait-down" if self.order.index(mark.source) < self.order.index(mark.queue) else "wait-up"

    # -- drawing

    def draw(self, notes: bool) -> None:
        self._draw_arrows()
        for place in self.places.values():
            self._draw_gutter(place, notes)
            self.canvas.add('<g class="bars">')
            self._draw_bars(place)
            self.canvas.add("</g>")
            self._draw_marks(place)

    def _draw_gutter(self, place: Place, notes: bool) -> None:
        middle = (place.top + place.bottom) / 2
        self.canvas.text(24.0, middle - 1.0 if notes else middle + 4.0, place.lane.queue, "strong", 13.0)
        if notes:
            note = LANE_NOTES.get(place.lane.queue, "") if place.lane.bars else "no collective"
            self.canvas.text(24.0, middle + 13.0, note, "faint")
        self.canvas.line(self.canvas.left, place.bottom, self.canvas.x(self.timeline.end), place.bottom, "grid")

    def _draw_bars(self, place: Place) -> None:
        canvas, height, unit = self.canvas, place.bottom - place.top, self.timeline.unit
        if place.lane.queue == "compute":
            for gap in self.timeline.exposed:
                width = (gap.end - gap.start) * canvas.scale
                canvas.rect(canvas.x(gap.start), place.top, width, height, "exposed", _gap_title(gap, unit))
        for run, label in place.runs:
            left, right = canvas.x(run[0].start), canvas.x(run[-1].end)
            outlined, fill = right - left >= OUTLINED, self.fill(run[0])
            single = outlined and len(run) == 1
            for bar in run:
                width = (bar.end - bar.start) * canvas.scale
                classes = (fill if single else f"{fill} flush") + " rest" * (
                    bar.whole is not None and bar.start > bar.whole[0]
                )
                canvas.rect(canvas.x(bar.start), place.top, width, height, classes, bar_title(bar, unit), 2 * single)
            if outlined and not single:
                canvas.rect(left, place.top, right - left, height, f"{fill} outline", radius=2)
            if label:
                canvas.text((left + right) / 2, (place.top + place.bottom) / 2 + 4.0, label, "m over")
        for x, text in place.names:
            canvas.line(x, place.bottom, x, place.bottom + 4.0, "edge")
            canvas.text(x, place.bottom + 14.0, text, "m halo")

    def _draw_marks(self, place: Place) -> None:
        if not place.lane.marks:
            return
        self.canvas.add('<g class="marks">')
        for mark in place.lane.marks:
            row = self._row_name(mark)
            shape = mark_shape(row, self.canvas.x(mark.time), place.rows[row], self.mark_size)
            title = f"{MARKS[mark.kind][0]} {mark.name}, {mark.phase}, at {time_text(mark.time, self.timeline.unit)}"
            self.canvas.path(shape, self.fill(mark), title)
        self.canvas.add("</g>")

    def _draw_arrows(self) -> None:
        """An arrow that goes on in another row ends at the border, and goes on there from the same height."""
        drawn: dict[str, list[str]] = {"wait": [], "limit": []}
        left, right = self.timeline.start, self.timeline.end
        for arrow in self.timeline.arrows:
            source, target = self.places[arrow.source], self.places[arrow.target]
            down = source.top < target.top
            if arrow.kind == "limit":
                begin, end = source.rows["free"], target.bottom
            else:
                begin = source.bottom if down else source.top
                end = target.rows["wait-down" if down else "wait-up"]
            first, last = max(arrow.source_time, left), min(arrow.target_time, right)
            slope = (end - begin) / max(arrow.target_time - arrow.source_time, 1e-9)
            if arrow.source_time < left:
                begin += slope * (left - arrow.source_time)
            if arrow.target_time > right:
                end -= slope * (arrow.target_time - right)
            x1, x2 = number(self.canvas.x(first)), number(self.canvas.x(last))
            drawn[arrow.kind].append(f"M{x1} {number(begin)}L{x2} {number(end)}")
        for kind, lines in drawn.items():
            if lines:
                self.canvas.path("".join(lines), f"arrow {kind}")

    # -- names

    def _label(self, place: Place) -> None:
        """Names go into the bars, or under the lane where they do not fit; where most bars of one unit kind in a phase are
        too narrow, all go under it. Of several runs of a unit the widest is named."""
        groups: dict[tuple[str, str], dict[str, list[Bar]]] = {}
        place.runs = [(run, "") for run in runs(place.lane.bars)]
        for run, _ in place.runs:
            mine = groups.setdefault((run[0].phase, self.names.kinds.get(run[0].unit, "")), {})
            shown = _shown(run[0]) >= 0.5 or length(run) * self.canvas.scale > 2 * text_width(self.names.of(run[0]))
            if shown and (run[0].name not in mine or length(run) > length(mine[run[0].name])):
                mine[run[0].name] = run
        inside: set[int] = set()
        under: list[tuple[float, str]] = []
        for group in groups.values():
            fits = {
                name
                for name, run in group.items()
                if text_width(self.names.of(run[0])) <= length(run) * self.canvas.scale - 4.0
            }
            if 2 * len(fits) < len(group):
                fits = set()
            inside |= {id(group[name]) for name in fits}
            outside = [run for name, run in group.items() if name not in fits and run[0].unit]
            thinned = self._thinned(outside)
            place.complete &= len(thinned) == len(outside)
            under += thinned
        place.runs = [(run, self.names.of(run[0]) if id(run) in inside else "") for run, _ in place.runs]
        place.names = list(_side_by_side(sorted(under), self._last_pixel))
        place.complete &= len(place.names) == len(under)

    def _thinned(self, outside: list[list[Bar]]) -> list[tuple[float, str]]:
        """Every n-th name of one kind and phase, n as small as the room allows."""
        outside = sorted(outside, key=lambda run: run[0].start)
        named = [
            (
                self.canvas.x((run[0].start + run[-1].end) / 2),
                self.names.palette.place[run[0].unit],
                self.names.of(run[0]),
            )
            for run in outside
        ]
        thinned: list[tuple[float, str]] = []
        for every in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000):
            thinned = [(x, name) for x, place, name in named if place % every == 0]
            if all(_apart(a, b) for a, b in pairwise(thinned)):
                break
        return thinned


def _side_by_side(names: list[tuple[float, str]], right: float) -> Iterator[tuple[float, str]]:
    """Names in order of their centres, those that run into one before them a little to the right, or left out."""
    last: tuple[float, str] | None = None
    for i, (x, text) in enumerate(names):
        if last is not None and not _apart(last, (x, text)):
            x = last[0] + (text_width(last[1]) + text_width(text)) / 2 + GAP
            aside = x - names[i][0] > MOST_ASIDE or x + text_width(text) / 2 > right
            if aside or (i + 1 < len(names) and not _apart((x, text), names[i + 1])):
                continue
        last = x, text
        yield last


def _apart(a: tuple[float, str], b: tuple[float, str]) -> bool:
    return b[0] - a[0] >= (text_width(a[1]) + text_width(b[1])) / 2 + GAP - 1e-6


def length(run: list[Bar]) -> float:
    return run[-1].end - run[0].start


def _shown(bar: Bar) -> float:
    """The share of a bar that is in this row; of two halves the first counts as more."""
    if bar.whole is None:
        return 1.0
    share = (bar.end - bar.start) / (bar.whole[1] - bar.whole[0])
    return share if bar.start == bar.whole[0] or share != 0.5 else 0.49


def runs(bars: Iterable[Bar]) -> Iterator[list[Bar]]:
    """Bars of one unit that follow each other without a gap; each collective is by itself."""
    run: list[Bar] = []
    for bar in bars:
        last = run[-1] if run and bar.kind == "compute" else None
        if last is not None and (bar.unit, bar.phase, bar.start) == (last.unit, last.phase, last.end):
            run.append(bar)
            continue
        if run:
            yield run
        run = [bar]
    if run:
        yield run


def short_names(name: str) -> list[str]:
    """`model.layers.3` and what it may be shortened to; a name that is not numbered stays whole. Of a bucket, `a + b`, all
    members are shortened alike."""
    if " + " in name:
        return [" + ".join(members) for members in zip(*map(short_names, name.split(" + ")))]
    parts = name.split(".")
    tails = [".".join(parts[i:]) for i in range(len(parts))]
    return [tail for tail in tails if tail == name or (name[0] != "(" and any(map(str.isdigit, tail)))]


def mark_shape(row: str, x: float, y: float, s: float) -> str:
    """The outline of a mark around (x, y), of about 2 s each way, as path data."""

    def polygon(*points: tuple[float, float]) -> str:
        return "M" + "L".join(f"{number(x + dx * s)} {number(y + dy * s)}" for dx, dy in points) + "Z"

    if row == "wait-down":
        return polygon((-1, -1), (1, -1), (0, 1))
    if row in ("wait-up", "wait"):
        return polygon((-1, 1), (1, 1), (0, -1))
    if row in ("accumulate_grad", "keep_grads", "keep_shard"):
        return polygon((0, -1.1), (1.1, 0), (0, 1.1), (-1.1, 0))
    if row == "free":
        radius, across = number(s * 0.9), number(s * 1.8)
        half = f"a{radius} {radius} 0 1 0"
        return f"M{number(x - s * 0.9)} {number(y)}{half} {across} 0{half} -{across} 0Z"
    if row in ("load_shard", "store_grad"):
        to = 1 if row == "load_shard" else -1
        return polygon((-0.85, -0.85 * to), (0.85, -0.85 * to), (0.85, 0), (0, to), (-0.85, 0))
    if row == "presence":
        return polygon((-1.1, -0.4), (1.1, -0.4), (1.1, 0.4), (-1.1, 0.4))
    return polygon((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))


def time_text(time: float, unit: str) -> str:
    """`slot 1.25`, or `1.25 ms`."""
    return f"slot {time:.2f}" if unit == "slots" else f"{time:.2f} {unit}"


def bar_title(bar: Bar, unit: str) -> str:
    start, end = bar.whole or (bar.start, bar.end)
    when = f"{unit} {start:.2f} to {end:.2f}"
    if bar.kind == "compute":
        return f"{bar.name or NO_UNIT}: {bar.num_operators} operators of {bar.phase}\n{when}"
    first, *moved = bar.passes
    by = f"put there by {first}" + (f", moved by {', '.join(moved)}" if moved else "")
    return f"{TITLES[bar.kind]} {bar.name}, {bytes_text(bar.num_bytes)}, {bar.phase}\n{when}\n{by}"


def _gap_title(gap: Exposed, unit: str) -> str:
    when = f"{gap.end - gap.start:.2f} {unit}, {gap.start:.2f} to {gap.end:.2f}"
    return f"compute waits for {gap.cause}, {gap.phase}\n{when}"
