"""A timeline as one SVG file: no script, no font, nothing loaded from outside.

From top to bottom: title and passes, legend, and one row or several: phases, one lane a queue, the memory held, the time
axis. A step that is too long for one row has forward and backward on rows of their own, a long phase on several.
Every bar and mark has a tooltip. Text is placed by an upper bound of its width, and thinned out or left out where it does
not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import groupby

from fxshard.ir.costs import COMMUNICATION_SHARE
from fxshard.ir.schedule import bytes_text
from fxshard.viz import style
from fxshard.viz.lanes import LONGEST_NAME, MARKS, NO_UNIT, Lanes, Names, mark_shape, time_text
from fxshard.viz.style import Canvas, Palette, number, shortened, text_width
from fxshard.viz.timeline import Curve, Span, Timeline, clipped, cut_in_rows

WIDEST_SLOT, LEAST_SLOT, ROWS = 92.0, 60.0, 6
"""Pixels of the median unit's forward, at most; and at least, unless there would be more than so many rows."""
NARROWEST, WIDEST = 760.0, 1440.0
"""Pixels of a row without its gutter."""

LEFT, MARGIN, MEMORY, LOW_MEMORY = 240.0, 24.0, 132.0, 84.0
SMALL, TITLE = 12.0, 18.0

HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{style.PAPER}"/>'
    f'<path d="M0 0V6" stroke="{style.EXPOSED}" stroke-width="2.4"/></pattern></defs>'
)


def draw_svg(timeline: Timeline) -> str:
    """The picture as text; the same timeline gives the same text."""
    return _Picture(timeline).text()


def page(width: float, height: float, about: str, sheet: str, lines: list[str]) -> str:
    """A whole SVG file of `lines`, with its style sheet."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{about}" width="{number(width)}" '
            f'height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}">',
            f"<style>{sheet}</style>",
            HATCH,
            f'<path d="M0 0H{number(width)}V{number(height)}H0Z" fill="{style.PAPER}"/>',
            *lines,
            "</svg>\n",
        ]
    )


class _Picture:
    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.palette = Palette(timeline.kinds, timeline.root_kind)
        cuts = cut_in_rows(timeline, WIDEST / LEAST_SLOT * timeline.slot, ROWS)
        self.rows = [clipped(timeline, *cut) for cut in cuts]
        longest = max(end - start for start, end in cuts)
        plot = min(max(longest * WIDEST_SLOT / timeline.slot, NARROWEST), WIDEST)
        self.canvas = Canvas(LEFT, plot / max(longest, 1e-9))
        self.right = LEFT + plot
        self.width = self.right + MARGIN
        self.memory = MEMORY if len(self.rows) < 3 else LOW_MEMORY
        self.level = next((i for i in range(Names.levels(timeline)) if self._complete(i)), Names.levels(timeline) - 1)

    def _complete(self, level: int) -> bool:
        return all(self._lanes(row, level, 0.0).complete for row in self.rows)

    def _lanes(self, row: Timeline, level: int, y: float) -> Lanes:
        self.canvas.origin = row.start
        return Lanes(row, self.timeline, self.canvas, self.palette, level, y)

    def text(self) -> str:
        canvas = self.canvas
        y = self._header(32.0)
        y = self._legend(y + 26.0) + 12.0
        for row in self.rows:
            top, behind = y, len(canvas.lines)
            lanes = self._lanes(row, self.level, y + 34.0)
            self.right = canvas.x(row.end)
            self._phases(row, y)
            lanes.draw(notes=row is self.rows[0])
            bottom = lanes.bottom + 24.0 + self.memory
            self._memory(row, lanes.bottom + 24.0)
            front, canvas.lines[behind:] = canvas.lines[behind:], []
            self._time_axis(row, top + 22.0, bottom)
            canvas.lines += front
            y = bottom + 38.0
        about = f"fxshard schedule, W={self.timeline.W}, F={self.timeline.F}"
        return page(self.width, y + 6.0, about, self._sheet(), canvas.lines)

    def _sheet(self) -> str:
        return "".join(
            [
                f"text{{font-family:{style.FONT};font-size:{number(style.FONT_SIZE)}px;fill:{style.INK}}}",
                f".faint{{fill:{style.FAINT}}}.strong{{font-weight:bold}}.m{{text-anchor:middle}}.r{{text-anchor:end}}",
                ".over{pointer-events:none}rect,path{stroke-width:.8;stroke-linejoin:round}",
                f".none{{fill:#dde1e6;stroke:{style.FAINT}}}",
                f".halo{{stroke:{style.PAPER};stroke-width:3;stroke-linejoin:round;paint-order:stroke}}",
                self.palette.sheet,
                ".flush{stroke:none}.outline{fill:none;pointer-events:none}",
                f".bars>rect:hover,.marks>path:hover{{stroke:{style.INK};stroke-width:2}}",
                f".exposed{{fill:url(#hatch);stroke:{style.EXPOSED}}}",
                f".wait,.accumulate_grad,.cast_shard,.presence{{fill:{style.INK};stroke:none}}",
                f".free{{fill:{style.PAPER};stroke:{style.INK};stroke-width:1.1}}",
                f".flatten_grads{{fill:{style.GRADIENTS};stroke:none}}",
                f".arrow{{fill:none;stroke:{style.INK};opacity:.55}}.limit{{stroke-dasharray:3 2}}",
                f".grid{{stroke:{style.GRID}}}.edge,.split{{stroke:{style.EDGE}}}.split{{stroke-dasharray:5 4}}",
                f".band{{fill:#eef1f4}}.gathered{{fill:{style.GATHERED};fill-opacity:.22;stroke:none}}",
                f".resident{{fill:{style.GATHERED};fill-opacity:.3;stroke:none}}",
                f".gathered-line{{fill:none;stroke:{style.GATHERED};stroke-width:1.3}}",
                f".gradients-line{{fill:none;stroke:{style.GRADIENTS};stroke-width:1.3}}",
                f".dot{{fill:{style.PAPER}}}",
            ]
        )

    # -- above the lanes

    def _header(self, y: float) -> float:
        t = self.timeline
        replicas = t.W // t.F
        ranks = "1 rank" if t.W == 1 else f"{t.W} ranks"
        mode = "replicated" if t.F == 1 else "full shard" if replicas == 1 else f"hybrid, {replicas} replicas"
        step = "training step" if len(t.spans) > 1 else "forward call"
        self.canvas.text(MARGIN, y, f"Schedule of one {step}: W = {ranks}, F = {t.F} ({mode})", "strong", TITLE)
        notes = f"Time is in {t.unit}, by the schedule's costs. The host never blocks."
        if t.unit == "slots":
            notes = (
                "Time is in unit slots, not measured. 1 slot is the forward of the median unit, by the bytes its operators "
                f"read and write. Collectives go by their bytes and add up to {COMMUNICATION_SHARE:g} of the compute of "
                "their phase. The host never blocks."
            )
        if {"unshard", "reduce"} <= {lane.queue for lane in t.lanes}:
            notes += " AllGather and ReduceScatter share one communicator, so they run one at a time."
        passes = [name if i == len(t.passes) else f"{name}," for i, name in enumerate(t.passes, 1)] or ["none yet"]
        y += 6.0
        for words, classes in ((notes.split(), ""), (["Passes:", *passes], "faint")):
            for line in style.wrap(words, self.width - 2 * MARGIN, SMALL):
                y += 17.0
                self.canvas.text(MARGIN, y, line, classes, SMALL)
        return y

    def _legend(self, y: float) -> float:
        x = MARGIN
        for sample, text in self._samples():
            width = 44.0 + text_width(text, SMALL)
            if x > MARGIN and x + width > self.right:
                x, y = MARGIN, y + 20.0
            self._draw_sample(sample, x, y - 4.0)
            self.canvas.text(x + 24.0, y, text, size=SMALL)
            x += width
        return y

    def _samples(self) -> Iterator[tuple[list[str], str]]:
        """What is drawn for each entry of the legend, as classes, and its text."""
        t = self.timeline
        yield from self._units()
        bars = [bar for lane in t.lanes for bar in lane.bars]
        if any(bar.unit == "" for bar in bars):
            yield ["swatch", "none"], f"{NO_UNIT} read yet"
        if t.exposed:
            yield ["swatch", "exposed"], "exposed: compute waits"
        arrows = {arrow.kind for arrow in t.arrows}
        for kind, text in (("wait", "from a collective to its WAIT"), ("limit", "AllGather held back to a FREE")):
            if kind in arrows:
                yield ["line", f"arrow {kind}"], text
        found = {mark.kind for lane in t.lanes for mark in lane.marks}
        for kind, (label, what) in MARKS.items():
            if kind in found:
                yield ["mark", kind], f"{label} {what}"

    def _units(self) -> Iterator[tuple[list[str], str]]:
        """Each hue: its kind of unit, how that is written and what is gathered of it; or each part of the root."""
        t, palette = self.timeline, self.palette
        gathered = {b.unit: b.num_bytes for lane in t.lanes for b in lane.bars if b.kind == "all_gather"}
        for hue in dict.fromkeys(palette.hues.values()):
            kinds = [kind for kind, its_hue in palette.hues.items() if its_hue == hue]
            units = [unit for kind in kinds for unit in palette.members[kind]]
            if t.parts and kinds == [t.root_kind]:
                for part, modules in t.parts.items():
                    text = shortened(f"{part}: {', '.join(modules)}", 48)
                    yield ["swatch", palette.fill(part)], text + _each({gathered.get(part, 0)}, "")
                continue
            text = shortened(kinds[0]) if len(kinds) == 1 else f"{len(kinds)} more kinds of unit"
            if len(kinds) == 1:
                text += self._written(units[0]) + _each({gathered.get(u, 0) for u in units}, " each" * (len(units) > 1))
            yield ["swatch", *dict.fromkeys(palette.fill(unit) for unit in units[:2])], text

    def _written(self, unit: str) -> str:
        tail = Names(self.timeline, self.palette, self.level).short(unit)
        if tail == shortened(unit, LONGEST_NAME):
            return ""
        return ", by number" if tail.isdigit() else f", written {re.sub('[0-9]+', '*', tail)}"

    def _draw_sample(self, sample: list[str], x: float, y: float) -> None:
        shape, *classes = sample
        if shape == "swatch":
            for i, name in enumerate(classes):
                self.canvas.rect(x + 9.0 * i, y - 6.0, 18.0 / len(classes), 12.0, name)
        elif shape == "line":
            self.canvas.line(x, y + 4.0, x + 18.0, y - 4.0, classes[0])
        elif classes[0] == "wait":
            self.canvas.path(mark_shape("wait-down", x + 4.0, y, 4.0) + mark_shape("wait-up", x + 15.0, y, 4.0), "wait")
        else:
            self.canvas.path(mark_shape(classes[0], x + 10.0, y, 4.0), classes[0])

    def _phases(self, row: Timeline, y: float) -> None:
        for span in row.spans:
            left, right = self.canvas.x(span.start), self.canvas.x(span.end)
            self.canvas.rect(left + 1.0, y, right - left - 2.0, 22.0, "band flush", radius=3)
            texts = self._about(next(s for s in self.timeline.spans if s.phase == span.phase), span)
            if text := style.fitting(texts, (right - left - 20.0) / style.BOLD, SMALL):
                self.canvas.text(left + 10.0, y + 15.0, text, "strong", SMALL)

    def _about(self, whole: Span, piece: Span) -> tuple[str, ...]:
        if piece.start > whole.start:
            return f"{whole.phase}, continued", whole.phase
        length = f"{whole.end - whole.start:.1f} {self.timeline.unit}"
        return f"{whole.phase}: {length}, {whole.exposed:.1f} of them exposed", f"{whole.phase}: {length}", whole.phase

    # -- memory and time

    def _memory(self, row: Timeline, y: float) -> None:
        t, canvas = self.timeline, self.canvas
        bottom = y + self.memory
        most = max(t.gathered.peak[1], t.gradients.peak[1], 1)
        step = style.bytes_step(most, 4 if self.memory == MEMORY else 2)
        per_byte = (self.memory - 10.0) / (-(-most // step) * step)

        def height(num_bytes: float) -> float:
            return bottom - num_bytes * per_byte

        for i in range(-(-most // step) + 1):
            level = height(i * step)
            canvas.line(LEFT, level, self.right, level, "grid" if i else "edge")
            canvas.text(LEFT - 6.0, level + 4.0, bytes_text(i * step), "r faint")
        outline = self._steps(row.gathered, height, row.end)
        canvas.path(f"{outline}V{number(bottom)}H{number(LEFT)}Z", "gathered")
        if t.resident_bytes:
            canvas.rect(LEFT, height(t.resident_bytes), self.right - LEFT, t.resident_bytes * per_byte, "resident")
        canvas.path(outline, "gathered-line")
        if t.gradients.peak[1]:
            canvas.path(self._steps(row.gradients, height, row.end), "gradients-line")
        self._memory_key(y, row is self.rows[0])
        for curve, classes in ((t.gathered, "gathered-line"), (t.gradients, "gradients-line")):
            time, peak = curve.peak
            if peak and (row.start < time <= row.end or time == row.start == 0.0):
                title = f"peak {bytes_text(peak)}, at {time_text(time, t.unit)}"
                canvas.path(mark_shape("free", canvas.x(time), height(peak), 3.2), f"{classes} dot", title)

    def _memory_key(self, y: float, everything: bool) -> None:
        t, canvas = self.timeline, self.canvas
        canvas.text(MARGIN, y + 8.0, "memory", "strong", 13.0)
        if not everything:
            return
        y += 27.0
        entries = [("gathered", "gathered-line", t.gathered.peak[1])]
        if t.gradients.peak[1]:
            entries.append(("gradients", "gradients-line", t.gradients.peak[1]))
        for text, classes, peak in entries:
            canvas.line(MARGIN, y - 4.0, MARGIN + 12.0, y - 4.0, classes)
            canvas.text(MARGIN + 18.0, y, f"{text}, peak {bytes_text(peak)}")
            y += 17.0
        if t.resident_bytes:
            canvas.rect(MARGIN, y - 9.0, 12.0, 10.0, "gathered")
            canvas.rect(MARGIN, y - 9.0, 12.0, 10.0, "resident")
            canvas.text(MARGIN + 18.0, y, f"residents, {bytes_text(t.resident_bytes)}")

    def _steps(self, curve: Curve, height: Callable[[float], float], end: float) -> str:
        """Path data of a curve; of what happens at one time only a peak above both sides is drawn."""
        data, before = "", -1
        for time, group in groupby(curve.points, key=lambda point: point[0]):
            levels = [num_bytes for _, num_bytes in group]
            x = number(self.canvas.x(time))
            if not data:
                data = f"M{x} {number(height(levels[0]))}"
            if max(levels) > max(before, levels[-1]):
                data += f"H{x}V{number(height(max(levels)))}"
            if levels[-1] != before:
                data += f"H{x}V{number(height(levels[-1]))}"
            before = levels[-1]
        return f"{data}H{number(self.canvas.x(end))}"

    def _time_axis(self, row: Timeline, top: float, bottom: float) -> None:
        canvas = self.canvas
        step = style.nice_step(64.0 / canvas.scale)
        for i in range(math.ceil(row.start / step - 1e-9), math.floor(row.end / step + 1e-9) + 1):
            x = canvas.x(i * step)
            canvas.line(x, top, x, bottom + 4.0, "grid")
            canvas.text(x, bottom + 17.0, f"{i * step:g}", "m faint")
        unit = "unit slots (not measured)" if self.timeline.unit == "slots" else self.timeline.unit
        if row is self.rows[-1]:
            canvas.text((LEFT + self.right) / 2, bottom + 34.0, f"time in {unit}", "m faint")
        for span in row.spans[1:]:
            canvas.line(canvas.x(span.start), top - 22.0, canvas.x(span.start), bottom, "split")


def _each(sizes: set[int], word: str) -> str:
    """What is gathered of each unit, where it is the same for all."""
    (size, *others) = sizes
    return f" · {bytes_text(size)}{word}" if size and not others else ""
