"""Pictures of schedules."""

from __future__ import annotations

import os

from fxshard.ir import Schedule
from fxshard.viz.diff import render_diff
from fxshard.viz.svg import draw_svg
from fxshard.viz.timeline import lay_out

__all__ = ["FORMATS", "render", "render_diff"]

FORMATS = (".svg",)


def render(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Draw `schedule` into a file, replacing it; the suffix of `path` chooses the format.

    Raises ValueError for a suffix that is not in FORMATS.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in FORMATS:
        raise ValueError(f"path {os.fspath(path)!r} has suffix {suffix!r}: allowed are {', '.join(FORMATS)}")
    text = draw_svg(lay_out(schedule))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
