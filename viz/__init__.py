"""Pictures of schedules."""

from __future__ import annotations

import os
from collections.abc import Callable

from fxshard.ir import Schedule
from fxshard.viz.dag import draw_dot, render_dot
from fxshard.viz.diff import render_diff
from fxshard.viz.html import draw_html
from fxshard.viz.notebook import draw_notebook
from fxshard.viz.perfetto import draw_trace
from fxshard.viz.svg import draw_svg
from fxshard.viz.timeline import lay_out

__all__ = ["FORMATS", "draw_notebook", "render", "render_diff"]

_TEXTS: dict[str, Callable[[Schedule], str]] = {
    ".svg": lambda schedule: draw_svg(lay_out(schedule)),
    ".html": draw_html,
    ".perfetto.json": lambda schedule: draw_trace(lay_out(schedule)),
    ".trace.json": lambda schedule: draw_trace(lay_out(schedule)),
}

_GRAPHS = {
    ".dot": "",
    ".gv": "",
    ".dag.svg": "svg",
    ".dag.png": "png",
    ".dag.pdf": "pdf",
    ".png": "png",
    ".pdf": "pdf",
}
"""What a Graphviz program makes of the graph for each suffix; '' is the graph's own text."""

FORMATS = (*_TEXTS, *_GRAPHS)
"""Suffixes of the pictures: a timeline, a report, a trace (twice), and the graph of the communication."""


def render(schedule: Schedule, path: str | os.PathLike[str], every_unit: bool = False) -> None:
    """Draw `schedule` into a file, replacing it; the suffix of `path` chooses the format.

    `.svg` is the timeline, `.html` a report to look around in, `.perfetto.json` or `.trace.json` a trace for
    ui.perfetto.dev, `.dot` or `.gv` the graph of the communication, and `.dag.svg`, `.png`, `.pdf` what a Graphviz
    program makes of it. `every_unit` draws each unit of that graph, where many equal ones are otherwise drawn as one.

    Raises ValueError for a suffix that is not in FORMATS or has no such option, RuntimeError where a Graphviz program is
    needed and none is found, or it fails. Nothing is written then.
    """
    name = os.fspath(path)
    suffix = max((s for s in FORMATS if name.lower().endswith(s)), key=len, default=None)
    if suffix is None:
        found = os.path.splitext(name)[1]
        raise ValueError(f"path {name!r} has suffix {found!r}: allowed are {', '.join(FORMATS)}")
    if suffix in _TEXTS:
        if every_unit:
            raise ValueError(f"every_unit=True is for the graph ({', '.join(_GRAPHS)}); {name!r} always has every unit")
        drawn = _TEXTS[suffix](schedule).encode()
    else:
        text = draw_dot(schedule, every_unit)
        drawn = render_dot(text, _GRAPHS[suffix]) if _GRAPHS[suffix] else text.encode()
    with open(path, "wb") as file:
        file.write(drawn)
