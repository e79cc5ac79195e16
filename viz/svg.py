"""A timeline as one SVG file: no script, no font, nothing loaded from outside.

From top to bottom: title and passes, legend, phases, one lane a queue, the memory held, the time axis. Every bar and
mark has a tooltip. Text is placed by an upper bound of its width, and thinned out or left out where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from fxshard.ir.costs import COMMUNICATION_SHARE
from fxshard.ir.schedule import bytes_text
from fxshard.viz import style
from fxshard.viz.lanes import MARKS, NO_UNIT, Lanes, mark_shape
from fxshard.viz.style import Canvas, Palette, number, text_width
from fxshard.viz.timeline import Curve, Timeline

SLOT_WIDTH = 92.0
"""Pixels a slot, unless the plot would become narrower or wider than this:"""
NARROWEST, WIDEST = 760.0, 3600.0

LEFT, MARGIN, TEXT_WIDTH, MEMORY = 224.0, 24.0, 1500.0, 132.0
SMALL, TITLE = 12.0, 18.0


def draw_svg(timeline: Timeline) -> str:
    """The picture as text; the same timeline gives the same text."""
    return _Picture(timeline).text()


class _Picture:
    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        plot = min(max(timeline.end * SLOT_WIDTH, NARROWEST), WIDEST)
        self.canvas = Canvas(LEFT, plot / max(timeline.end, 1e-9))
        self.right = LEFT + plot
        self.width = self.right + MARGIN
        self.palette = Palette(timeline.kinds, timeline.root_kinds)

    def text(self) -> str:
        canvas = self.canvas
        y = self._header(32.0)
        y = self._legend(y + 26.0) + 12.0
        top, behind = y, len(canvas.lines)
        self._phases(y)
        lanes = Lanes(self.timeline, canvas, self.palette, y + 34.0)
        lanes.draw()
        bottom = lanes.bottom + 24.0 + MEMORY
        self._memory(lanes.bottom + 24.0)
        height = bottom + 44.0
        front, canvas.lines[behind:] = canvas.lines[behind:], []
        self._time_axis(top + 22.0, bottom)
        about = f"fxshard schedule, W={self.timeline.W}, F={self.timeline.F}"
        size = f"{number(self.width)} {number(height)}"
        hatch = (
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{style.PAPER}"/>'
            f'<path d="M0 0V6" stroke="{style.EXPOSED}" stroke-width="2.4"/></pattern></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{about}" width="{number(self.width)}" '
                f'height="{number(height)}" viewBox="0 0 {size}">',
                f"<style>{self._sheet()}</style>",
                hatch,
                f'<path d="M0 0H{number(self.width)}V{number(height)}H0Z" fill="{style.PAPER}"/>',
                *canvas.lines,
                *front,
                "</svg>\n",
            ]
        )

    def _sheet(self) -> str:
        return "".join(
            [
                f"text{{font-family:{style.FONT};font-size:{number(style.FONT_SIZE)}px;fill:{style.INK}}}",
                f".faint{{fill:{style.FAINT}}}.strong{{font-weight:bold}}.m{{text-anchor:middle}}.r{{text-anchor:end}}",
                ".over{pointer-events:none}rect,path{stroke-width:.8;stroke-linejoin:round}",
                f".none{{fill:#dde1e6;stroke:{style.FAINT}}}",
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
            for line in style.wrap(words, min(self.width - 2 * MARGIN, TEXT_WIDTH), SMALL):
                y += 17.0
                self.canvas.text(MARGIN, y, line, classes, SMALL)
        return y

    def _legend(self, y: float) -> float:
        x = MARGIN
        for sample, text in self._samples():
            width = 44.0 + text_width(text, SMALL)
            if x > MARGIN and x + width > min(self.right, TEXT_WIDTH):
                x, y = MARGIN, y + 20.0
            self._draw_sample(sample, x, y - 4.0)
            self.canvas.text(x + 24.0, y, text, size=SMALL)
            x += width
        return y

    def _samples(self) -> Iterator[tuple[list[str], str]]:
        """What is drawn for each entry of the legend, as classes, and its text."""
        t = self.timeline
        for text, classes in self.palette.legend:
            yield ["swatch", *classes], text
        bars = [bar for lane in t.lanes for bar in lane.bars]
        if any(bar.unit == "" for bar in bars):
            yield ["swatch", "none"], NO_UNIT
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

    def _draw_sample(self, sample: list[str], x: float, y: float) -> None:
        shape, *classes = sample
        if shape == "swatch":
            for i, name in enumerate(classes):
                self.canvas.rect(x + 9.0 * i, y - 6.0, 18.0 / len(classes), 12.0, name)
        elif shape == "line":
            self.canvas.line(x, y + 4.0, x + 18.0, y - 4.0, classes[0])
        else:
            self.canvas.path(mark_shape(classes[0], x + 10.0, y, 4.0), classes[0])

    def _phases(self, y: float) -> None:
        for span in self.timeline.spans:
            left, right = self.canvas.x(span.start), self.canvas.x(span.end)
            self.canvas.rect(left + 1.0, y, right - left - 2.0, 22.0, "band flush", radius=3)
            length, idle = f"{span.end - span.start:.1f} slots", f"{span.exposed:.1f} of them exposed"
            texts = (f"{span.phase}: {length}, {idle}", f"{span.phase}: {length}", span.phase)
            if text := style.fitting(texts, (right - left - 20.0) / style.BOLD, SMALL):
                self.canvas.text(left + 10.0, y + 15.0, text, "strong", SMALL)

    # -- memory and time

    def _memory(self, y: float) -> None:
        t, canvas = self.timeline, self.canvas
        bottom = y + MEMORY
        most = max(t.gathered.peak[1], t.gradients.peak[1], 1)
        step = style.bytes_step(most, 4)
        per_byte = (MEMORY - 10.0) / (-(-most // step) * step)

        def height(num_bytes: float) -> float:
            return bottom - num_bytes * per_byte

        for i in range(-(-most // step) + 1):
            level = height(i * step)
            canvas.line(LEFT, level, self.right, level, "grid" if i else "edge")
            canvas.text(LEFT - 6.0, level + 4.0, bytes_text(i * step), "r faint")
        outline = self._steps(t.gathered, height)
        canvas.path(f"{outline}V{number(bottom)}H{number(LEFT)}Z", "gathered")
        if t.resident_bytes:
            canvas.rect(LEFT, height(t.resident_bytes), self.right - LEFT, t.resident_bytes * per_byte, "resident")
        canvas.path(outline, "gathered-line")
        if t.gradients.peak[1]:
            canvas.path(self._steps(t.gradients, height), "gradients-line")
        self._memory_key(y)
        for curve, classes in ((t.gathered, "gathered-line"), (t.gradients, "gradients-line")):
            time, peak = curve.peak
            if peak:
                x, level = canvas.x(time), height(peak)
                title = f"peak {bytes_text(peak)}, at slot {time:.2f}"
                canvas.path(mark_shape("free", x, level, 3.2), f"{classes} dot", title)

    def _memory_key(self, y: float) -> None:
        t, canvas = self.timeline, self.canvas
        canvas.text(MARGIN, y + 8.0, "memory", "strong", 13.0)
        y += 28.0
        entries = [("gathered", "gathered-line", t.gathered.peak[1])]
        if t.gradients.peak[1]:
            entries.append(("gradient buffers", "gradients-line", t.gradients.peak[1]))
        for text, classes, peak in entries:
            canvas.line(MARGIN, y - 4.0, MARGIN + 12.0, y - 4.0, classes)
            canvas.text(MARGIN + 18.0, y, text)
            canvas.text(MARGIN + 18.0, y + 14.0, f"peak {bytes_text(peak)}", "strong")
            y += 28.0
            if text == "gathered" and t.resident_bytes:
                canvas.rect(MARGIN, y - 9.0, 12.0, 10.0, "gathered")
                canvas.rect(MARGIN, y - 9.0, 12.0, 10.0, "resident")
                canvas.text(MARGIN + 18.0, y, f"residents {bytes_text(t.resident_bytes)}", "faint")
                y += 14.0
            y += 6.0

    def _steps(self, curve: Curve, height: Callable[[float], float]) -> str:
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
        return f"{data}H{number(self.canvas.x(self.timeline.end))}"

    def _time_axis(self, top: float, bottom: float) -> None:
        canvas = self.canvas
        step = style.nice_step(64.0 / canvas.scale)
        for i in range(int(self.timeline.end / step) + 1):
            x = canvas.x(i * step)
            canvas.line(x, top, x, bottom + 4.0, "grid")
            canvas.text(x, bottom + 17.0, f"{i * step:g}", "m faint")
        canvas.text((LEFT + self.right) / 2, bottom + 34.0, "time in unit slots (not measured)", "m faint")
        for span in self.timeline.spans[1:]:
            canvas.line(canvas.x(span.start), top - 22.0, canvas.x(span.start), bottom, "split")
