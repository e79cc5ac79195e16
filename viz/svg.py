"""A timeline as one SVG file: no script, no font, nothing loaded from outside.

From top to bottom: title and passes, legend, and one row or several: phases, one lane a queue, the memory held, the time
axis. A step that is too long for one row has forward and backward on rows of their own, a long phase on several.
Every bar and mark has a tooltip. Text is placed by an upper bound of its width, and thinned out or left out where it does
not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fxshard.ir.nodes import bytes_text
from fxshard.viz.lanes import LONGEST_NAME, MARKS, NO_UNIT, Lanes, Names, mark_shape, time_text
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
from fxshard.viz.style import Palette, number, shortened
from fxshard.viz.timeline import ROOT, Bar, Mark, Span, Timeline, clipped, cut_in_rows


def draw_svg(timeline: Timeline) -> str:
    """The picture as text; the same timeline gives the same text."""
    return _Picture(timeline).text()


class _Picture:
    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.palette = Palette(timeline.kinds, ROOT)
        cuts = cut_in_rows(timeline, WIDEST / LEAST_SLOT * timeline.slot, ROWS)
        self.rows = [clipped(timeline, *cut) for cut in cuts]
        self.page = Page(max(end - start for start, end in cuts), timeline.slot)
        self.memory = MEMORY if len(self.rows) < 3 else LOW_MEMORY
        levels = Names.levels(timeline)
        self.names = Names(timeline, self.palette, next(filter(self._complete, range(levels)), levels - 1))

    def _complete(self, level: int) -> bool:
        names = Names(self.timeline, self.palette, level)
        return all(self._lanes(row, names, 0.0).complete for row in self.rows)

    def _lanes(self, row: Timeline, names: Names, y: float) -> Lanes:
        self.page.origin = row.start
        return Lanes(row, self.timeline, self.page, names, self._fill, y)

    def _fill(self, item: Bar | Mark) -> str:
        return self.palette.fill(item.unit) if isinstance(item, Bar) else item.kind

    def text(self) -> str:
        page = self.page
        y = self._header(32.0)
        y = page.legend(y + 26.0, self._samples()) + 12.0
        for row in self.rows:
            top, behind = y, len(page.lines)
            lanes = self._lanes(row, self.names, y + 34.0)
            for span in row.spans:
                page.band(y, page.x(span.end), span.start, self._about(span))
            lanes.draw(notes=row is self.rows[0])
            bottom = lanes.bottom + 24.0 + self.memory
            self._memory(row, lanes.bottom + 24.0)
            front, page.lines[behind:] = page.lines[behind:], []
            page.time_axis(row.start, row.end, top + 22.0, bottom)
            for span in row.spans[1:]:
                page.line(page.x(span.start), top, page.x(span.start), bottom, "split")
            page.lines += front
            y = bottom + 38.0
        last = self.rows[-1]
        page.text((LEFT + page.x(last.end)) / 2, y - 4.0, f"time in {unit_text(last.unit)}", "m faint")
        about = f"fxshard schedule, W={self.timeline.W}, F={self.timeline.F}"
        return page.file(y + 6.0, about, self.palette.sheet)

    # -- above the lanes

    def _header(self, y: float) -> float:
        t = self.timeline
        step = "training step" if len(t.spans) > 1 else "forward call"
        self.page.text(MARGIN, y, f"Schedule of one {step}: {sharding_text(t)}", "strong", TITLE)
        offloaded = any(mark.kind == "load_shard" for lane in t.lanes for mark in lane.marks)
        notes = f"{time_note(t)} {'LOAD and STORE take no time.' if offloaded else 'The host never blocks.'}"
        if {"unshard", "reduce"} <= {lane.queue for lane in t.lanes}:
            notes += " AllGather and ReduceScatter share one communicator, so they run one at a time."
        y = self.page.paragraph(y + 6.0, notes.split())
        return self.page.paragraph(y, ["Passes:", *passes_text(t)], "faint")

    def _samples(self) -> Iterator[Sample]:
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

    def _units(self) -> Iterator[Sample]:
        """Each hue: its kind of unit, how that is written and what is gathered of it; or each part of the root."""
        t, palette = self.timeline, self.palette
        gathered = {b.unit: b.num_bytes for lane in t.lanes for b in lane.bars if b.kind == "all_gather"}
        for hue in dict.fromkeys(palette.hues.values()):
            kinds = [kind for kind, its_hue in palette.hues.items() if its_hue == hue]
            units = [unit for kind in kinds for unit in palette.members[kind]]
            if t.parts and kinds == [ROOT]:
                for part, modules in t.parts.items():
                    text = shortened(f"{part}: {', '.join(modules)}", 48)
                    yield ["swatch", palette.fill(part)], text + _each({gathered.get(part, 0)}, "")
                continue
            text = shortened(kinds[0]) if len(kinds) == 1 else f"{len(kinds)} more kinds of unit"
            if len(kinds) == 1:
                text += self._written(units[0]) + _each({gathered.get(u, 0) for u in units}, " each" * (len(units) > 1))
            yield ["swatch", *dict.fromkeys(palette.fill(unit) for unit in units[:2])], text

    def _written(self, unit: str) -> str:
        tail = self.names.short(unit)
        if tail == shortened(unit, LONGEST_NAME):
            return ""
        return ", by number" if tail.isdigit() else f", written {re.sub('[0-9]+', '*', tail)}"

    def _about(self, piece: Span) -> tuple[str, ...]:
        whole = next(span for span in self.timeline.spans if span.phase == piece.phase)
        if piece.start > whole.start:
            return f"{whole.phase}, continued", whole.phase
        length = f"{whole.end - whole.start:.1f} {self.timeline.unit}"
        return f"{whole.phase}: {length}, {whole.exposed:.1f} of them exposed", f"{whole.phase}: {length}", whole.phase

    # -- memory

    def _memory(self, row: Timeline, y: float) -> None:
        t, page, right = self.timeline, self.page, self.page.x(row.end)
        plot = page.plot(y, self.memory, right, max(t.gathered.peak[1], t.gradients.peak[1], 1))
        outline = page.steps(row.gathered, plot.y, row.end)
        page.path(f"{outline}V{number(plot.bottom)}H{number(LEFT)}Z", "gathered")
        if t.resident_bytes:
            page.rect(LEFT, plot.y(t.resident_bytes), right - LEFT, t.resident_bytes * plot.per_byte, "resident")
        page.path(outline, "gathered-line")
        if t.gradients.peak[1]:
            page.path(page.steps(row.gradients, plot.y, row.end), "gradients-line")
        page.text(MARGIN, y + 8.0, "memory", "strong", 13.0)
        if row is self.rows[0]:
            self._memory_key(y + 27.0)
        for curve, classes in ((t.gathered, "gathered-line"), (t.gradients, "gradients-line")):
            time, peak = curve.peak
            if peak and (row.start < time <= row.end or time == row.start == 0.0):
                title = f"peak {bytes_text(peak)}, at {time_text(time, t.unit)}"
                page.path(mark_shape("free", page.x(time), plot.y(peak), 3.2), f"{classes} dot", title)

    def _memory_key(self, y: float) -> None:
        t, page = self.timeline, self.page
        entries = [("gathered", "gathered-line", t.gathered.peak[1])]
        if t.gradients.peak[1]:
            entries.append(("gradients", "gradients-line", t.gradients.peak[1]))
        for text, classes, peak in entries:
            page.line(MARGIN, y - 4.0, MARGIN + 12.0, y - 4.0, classes)
            page.text(MARGIN + 18.0, y, f"{text}, peak {bytes_text(peak)}")
            y += 17.0
        if t.resident_bytes:
            page.rect(MARGIN, y - 9.0, 12.0, 10.0, "gathered")
            page.rect(MARGIN, y - 9.0, 12.0, 10.0, "resident")
            page.text(MARGIN + 18.0, y, f"residents, {bytes_text(t.resident_bytes)}")


def _each(sizes: set[int], word: str) -> str:
    """What is gathered of each unit, where it is the same for all."""
    (size, *others) = sizes
    return f" · {bytes_text(size)}{word}" if size and not others else ""
