"""A page with time from left to right: the frame, legend, axes and curves that all pictures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxshard.ir.costs import COMMUNICATION_SHARE
from fxshard.ir.nodes import bytes_text
from fxshard.viz import style
from fxshard.viz.lanes import mark_shape
from fxshard.viz.style import Canvas, number, text_width
from fxshard.viz.timeline import Curve, Timeline

WIDEST_SLOT, LEAST_SLOT, ROWS = 92.0, 60.0, 6
"""Pixels of the median unit's forward, at most; and at least, unless there would be more than so many rows."""
NARROWEST, WIDEST = 760.0, 1440.0
"""Pixels of a row without its gutter."""

LEFT, MARGIN, MEMORY, LOW_MEMORY = 240.0, 24.0, 132.0, 84.0
SMALL, TITLE = 12.0, 18.0

Sample = tuple[list[str], str]
"""An entry of a legend: a shape (`swatch`, `line`, `mark`) with its classes, and the text."""

HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{style.PAPER}"/>'
    f'<path d="M0 0V6" stroke="{style.EXPOSED}" stroke-width="2.4"/></pattern></defs>'
)

SHEET = "".join(
    [
        f"text{{font-family:{style.FONT};font-size:{number(style.FONT_SIZE)}px;fill:{style.INK}}}",
        f".faint{{fill:{style.FAINT}}}.strong{{font-weight:bold}}.m{{text-anchor:middle}}.r{{text-anchor:end}}",
        ".over{pointer-events:none}rect,path{stroke-width:.8;stroke-linejoin:round}",
        f".none{{fill:#dde1e6;stroke:{style.FAINT}}}",
        f".halo{{stroke:{style.PAPER};stroke-width:3;stroke-linejoin:round;paint-order:stroke}}",
        f".exposed{{fill:url(#hatch);stroke:{style.EXPOSED}}}",
        f".wait,.accumulate_grad,.cast_shard,.load_shard,.store_grad,.presence{{fill:{style.INK};stroke:none}}",
        f".free{{fill:{style.PAPER};stroke:{style.INK};stroke-width:1.1}}",
        f".flatten_grads,.keep_grads,.keep_shard{{fill:{style.GRADIENTS};stroke:none}}",
        f".arrow{{fill:none;stroke:{style.INK};opacity:.55}}.limit{{stroke-dasharray:3 2}}",
        f".grid{{stroke:{style.GRID}}}.edge,.split{{stroke:{style.EDGE}}}.split{{stroke-dasharray:5 4}}",
        f".band{{fill:#eef1f4}}.gathered{{fill:{style.GATHERED};fill-opacity:.22;stroke:none}}",
        f".resident{{fill:{style.GATHERED};fill-opacity:.3;stroke:none}}",
        f".gathered-line{{fill:none;stroke:{style.GATHERED};stroke-width:1.3}}",
        f".gradients-line{{fill:none;stroke:{style.GRADIENTS};stroke-width:1.3}}",
        f".dot{{fill:{style.PAPER}}}",
    ]
)
AFTER_FILLS = (
    ".flush{stroke:none}.outline{fill:none;pointer-events:none}"
    f".bars>rect:hover,.marks>path:hover{{stroke:{style.INK};stroke-width:2}}"
)
"""What overrules the fills of bars."""


@dataclass(frozen=True)
class Plot:
    """Bytes over time: the bottom line, and pixels a byte."""

    bottom: float
    per_byte: float

    def y(self, num_bytes: float) -> float:
        return self.bottom - num_bytes * self.per_byte


class Page(Canvas):
    """For rows of at most `longest` time, of a model whose median forward takes `slot`."""

    def __init__(self, longest: float, slot: float):
        plot = min(max(longest * WIDEST_SLOT / slot, NARROWEST), WIDEST)
        super().__init__(LEFT, plot / max(longest, 1e-9))
        self.width = LEFT + plot + MARGIN

    def file(self, height: float, about: str, fills: str) -> str:
        """The whole SVG file; `fills` are the styles of bars."""
        size = f"{number(self.width)} {number(height)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{about}" width="{number(self.width)}" '
                f'height="{number(height)}" viewBox="0 0 {size}">',
                f"<style>{SHEET}{fills}{AFTER_FILLS}</style>",
                HATCH,
                f'<path d="M0 0H{number(self.width)}V{number(height)}H0Z" fill="{style.PAPER}"/>',
                *self.lines,
                "</svg>\n",
            ]
        )

    def paragraph(self, y: float, words: Sequence[str], classes: str = "") -> float:
        """Wrapped text under `y`; returns the line it ends at."""
        for line in style.wrap(words, (self.width - 2 * MARGIN) / (style.BOLD if classes == "strong" else 1.0), SMALL):
            y += 17.0
            self.text(MARGIN, y, line, classes, SMALL)
        return y

    def legend(self, y: float, samples: Iterable[Sample]) -> float:
        """Entries in lines from `y` down; returns the last line."""
        x = MARGIN
        for sample, text in samples:
            width = 44.0 + text_width(text, SMALL)
            if x > MARGIN and x + width > self.width - MARGIN:
                x, y = MARGIN, y + 20.0
            self._sample(sample, x, y - 4.0)
            self.text(x + 24.0, y, text, size=SMALL)
            x += width
        return y

    def _sample(self, sample: list[str], x: float, y: float) -> None:
        shape, *classes = sample
        if shape == "swatch":
            for i, name in enumerate(classes):
                self.rect(x + 9.0 * i, y - 6.0, 18.0 / len(classes), 12.0, name)
        elif shape == "line":
            self.line(x, y + 4.0, x + 18.0, y - 4.0, classes[0])
        elif classes[0] == "wait":
            self.path(mark_shape("wait-down", x + 4.0, y, 4.0) + mark_shape("wait-up", x + 15.0, y, 4.0), "wait")
        else:
            self.path(mark_shape(classes[0], x + 10.0, y, 4.0), classes[0])

    def band(self, y: float, right: float, start: float, texts: Sequence[str]) -> None:
        """The head of a phase from time `start` to x = `right`, with the first text that fits."""
        left = self.x(start)
        self.rect(left + 1.0, y, right - left - 2.0, 22.0, "band flush", radius=3)
        if text := style.fitting(texts, (right - left - 20.0) / style.BOLD, SMALL):
            self.text(left + 10.0, y + 15.0, text, "strong", SMALL)

    def plot(self, y: float, height: float, right: float, most: int) -> Plot:
        """A grid for up to `most` bytes."""
        step = style.bytes_step(most, 4 if height >= MEMORY else 2)
        lines = -(-most // step)
        plot = Plot(y + height, (height - 10.0) / (lines * step))
        for i in range(lines + 1):
            level = plot.y(i * step)
            self.line(LEFT, level, right, level, "grid" if i else "edge")
            self.text(LEFT - 6.0, level + 4.0, bytes_text(i * step), "r faint")
        return plot

    def steps(self, curve: Curve, height: Callable[[float], float], end: float) -> str:
        """Path data of a curve; of what happens at one time only a peak above both sides is drawn."""
        data, before = "", -1
        for time, group in groupby(curve.points, key=lambda point: point[0]):
            levels = [num_bytes for _, num_bytes in group]
            x = number(self.x(time))
            if not data:
                data = f"M{x} {number(height(levels[0]))}"
            if max(levels) > max(before, levels[-1]):
                data += f"H{x}V{number(height(max(levels)))}"
            if levels[-1] != before:
                data += f"H{x}V{number(height(levels[-1]))}"
            before = levels[-1]
        return f"{data}H{number(self.x(end))}"

    def time_axis(self, start: float, end: float, top: float, bottom: float) -> None:
        step = style.nice_step(64.0 / self.scale)
        for i in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1):
            x = self.x(i * step)
            self.line(x, top, x, bottom + 4.0, "grid")
            self.text(x, bottom + 17.0, f"{i * step:g}", "m faint")


def sharding_text(timeline: Timeline) -> str:
    """`W = 8 ranks, F = 4 (hybrid, 2 replicas)`."""
    ranks = "1 rank" if timeline.W == 1 else f"{timeline.W} ranks"
    return f"W = {ranks}, F = {timeline.F} ({mode_text(timeline.W, timeline.F)})"


def mode_text(W: int, F: int) -> str:
    """What the sharding factor makes of a world: `replicated`, `full shard`, `hybrid, 2 replicas`."""
    return "replicated" if F == 1 else "full shard" if F == W else f"hybrid, {W // F} replicas"


def passes_text(timeline: Timeline) -> list[str]:
    """The passes as words that a line may end after."""
    last = len(timeline.passes)
    return [name if i == last else f"{name}," for i, name in enumerate(timeline.passes, 1)] or ["none yet"]


def time_note(timeline: Timeline) -> str:
    """How times are come by."""
    if timeline.unit != "slots":
        return f"Time is in {timeline.unit}, by the schedule's costs."
    return (
        "Time is in unit slots, not measured. 1 slot is the forward of the median unit, by the bytes its operators read "
        f"and write. Collectives go by their bytes and add up to {COMMUNICATION_SHARE:g} of the compute of their phase."
    )


def unit_text(unit: str) -> str:
    return "unit slots (not measured)" if unit == "slots" else unit
