"""What pictures are made of: colours, widths of text, escaping, numbers, and the canvas they are written on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

Hue = tuple[int, int, int]

# Okabe and Ito's colours, told apart with any colour vision. Vermillion is kept for exposed time.
ROOT_HUE: Hue = (230, 159, 0)
HUES: tuple[Hue, ...] = ((0, 114, 178), (0, 158, 115), (204, 121, 167), (86, 180, 233), (240, 228, 66))
OTHER_HUE: Hue = (130, 130, 130)
EXPOSED, GATHERED, GRADIENTS = "#d55e00", "#41556b", "#8b2f8f"
INK, FAINT, EDGE, GRID, PAPER = "#1c2430", "#5c6773", "#aab3bd", "#e6eaee", "#ffffff"

FONT = "Helvetica,Arial,'DejaVu Sans',sans-serif"
FONT_SIZE = 11.0

BOLD = 1.15
"""How much wider bold text is, at most."""

# The wider of DejaVu Sans and Arial, rounded up; what is not listed counts as one em.
_EMS = {
    character: width
    for width, characters in (
        (0.32, " ',.Iijl·"),
        (0.42, "!()-/:;[]\\frt|"),
        (0.53, '"*J`sz'),
        (0.6, "?L_ckvxy"),
        (0.65, "$0123456789FTabdeghnopqu{}"),
        (0.7, "ABEKPSVXYZ"),
        (0.79, "&CDGHNOQRU"),
        (0.86, "#+<=>^w~"),
    )
    for character in characters
}


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """An upper bound of the width of `text` in pixels, for the usual sans-serif fonts."""
    return size * sum(_EMS.get(character, 1.0) for character in text)


def fitting(candidates: Iterable[str], width: float, size: float = FONT_SIZE) -> str:
    """The first of `candidates` that is at most `width` wide, or ''."""
    return next((text for text in candidates if text_width(text, size) <= width), "")


def wrap(words: Sequence[str], width: float, size: float) -> list[str]:
    """Lines of `words` that are at most `width` wide; a longer word has a line of its own."""
    lines: list[str] = []
    for word in words:
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def shortened(text: str, characters: int = 32) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def plain(text: str) -> str:
    """Escaped for XML; a character that XML cannot hold becomes the replacement character."""

    def allowed(c: str) -> bool:
        return c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff"

    return escape("".join(c if allowed(c) else "\ufffd" for c in text), {'"': "&quot;"})


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def tint(hue: Hue, white: float) -> str:
    """The hue mixed with a share of white."""
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in hue)


def shade(hue: Hue) -> str:
    """A darker form of the hue, for outlines."""
    return "#" + "".join(f"{round(part * 0.62):02x}" for part in hue)


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= least * (1 - 1e-9))


def bytes_step(largest: int, count: int) -> int:
    """About a `count`-th of `largest`: 1, 2, 5, 10, ... times a power of 1024 bytes."""
    unit = 1
    while unit * 1024 <= largest and unit < 1024**3:
        unit *= 1024
    return max(1, round(nice_step(largest / count / unit) * unit))


TINTS = {"a": 0.42, "b": 0.66, "c": 0.84}
"""Share of white in each fill of a hue."""


class Palette:
    """The fill of each unit: one hue a unit kind, two tints of it in turn; three for
    the parts of the kind `root`."""

    def __init__(self, kinds: dict[str, str], root: str):
        hues = iter(HUES)
        distinct = dict.fromkeys(kinds.values())
        self.hues = {kind: ROOT_HUE if kind == root else next(hues, OTHER_HUE) for kind in distinct}
        names = {hue: f"u{i}" for i, hue in enumerate(dict.fromkeys(self.hues.values()))}
        self.members: dict[str, list[str]] = {}
        self.place = {"": 0}
        """Number of each unit within its kind."""
        self._classes = {"": "none"}
        for unit, kind in kinds.items():
            place = self.place[unit] = len(self.members.setdefault(kind, []))
            self.members[kind].append(unit)
            self._classes[unit] = names[self.hues[kind]] + ("bac"[place % 3] if kind == root else "ba"[place % 2])
        self.sheet = "".join(
            "".join(f".{name}{letter}{{fill:{tint(hue, white)}}}" for letter, white in TINTS.items())
            + "".join(f".{name}{letter}," for letter in TINTS).removesuffix(",")
            + f"{{stroke:{shade(hue)}}}"
            for hue, name in names.items()
        )

    def fill(self, unit: str) -> str:
        return self._classes.get(unit, "none")


class Canvas:
    """Lines of SVG; `x` maps a time to pixels, `origin` being at `left`."""

    def __init__(self, left: float, scale: float):
        self.left, self.scale, self.origin = left, scale, 0.0
        self.lines: list[str] = []

    def x(self, time: float) -> float:
        return self.left + (time - self.origin) * self.scale

    def add(self, line: str) -> None:
        self.lines.append(line)

    def text(self, x: float, y: float, text: str, classes: str = "", size: float = FONT_SIZE) -> None:
        named = f' class="{classes}"' if classes else ""
        sized = f' style="font-size:{number(size)}px"' if size != FONT_SIZE else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}"{named}{sized}>{plain(text)}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, title: str = "", radius: int = 0
    ) -> None:
        """A filled rectangle with its tooltip."""
        rounded = f' rx="{radius}"' if radius else ""
        size = f'width="{max(width, 0.0):.2f}" height="{number(height)}"'
        body = f"><title>{plain(title)}</title></rect>" if title else "/>"
        self.add(f'<rect x="{x:.2f}" y="{number(y)}" {size}{rounded} class="{classes}"{body}')

    def path(self, data: str, classes: str, title: str = "") -> None:
        body = f"><title>{plain(title)}</title></path>" if title else "/>"
        self.add(f'<path d="{data}" class="{classes}"{body}')

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str) -> None:
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", classes)
