"""A schedule as a cell of a notebook shows it: the timeline in a box that scrolls, and the text to unfold."""

from __future__ import annotations

import html
import re
import zlib

from fxshard.ir import Schedule
from fxshard.viz.svg import draw_svg
from fxshard.viz.timeline import lay_out


def draw_notebook(schedule: Schedule) -> str:
    """HTML to put into a page, whatever else is there: the picture's styles reach that picture alone."""
    picture = draw_svg(lay_out(schedule))
    name = f"fxshard-{zlib.crc32(picture.encode()):08x}"
    before, sheet, after = re.split("<style>|</style>", picture, maxsplit=2)
    # A selector is what a brace opens after; declarations have none after them before one that closes.
    scoped = re.sub(r"[^{},]+(?=[^{}]*\{)", lambda selector: f".{name} {selector[0]}", sheet)
    picture = f"{before}<style>{scoped}</style>{after}"
    picture = picture.replace('id="hatch"', f'id="{name}-hatch"').replace("url(#hatch)", f"url(#{name}-hatch)")
    return (
        f'<div class="{name}"><div style="overflow-x:auto">{picture}</div>'
        f"<details><summary>The schedule as text</summary><pre>{html.escape(schedule.text())}</pre></details></div>"
    )
