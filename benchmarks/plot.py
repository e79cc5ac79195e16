"""The picture of docs/benchmarks.md: steps of all systems and the limit, in parts of FSDP2's, a group of bars a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.viz import style
from fxshard.viz.style import Canvas, number

SYSTEMS = {"fsdp2": "FSDP2", "fsdp1": "FSDP1", "ddp": "DDP", "fxshard": "fxshard"}
LEFT, PLOT, RIGHT, BAR, GAP, TOP = 300.0, 560.0, 90.0, 14.0, 18.0, 74.0
SMALL, TITLE = 12.0, 16.0
MOST = 1.1
"""Where the plot ends, in FSDP2's steps; a longer bar is cut there and its number says how long it is."""

SHEET = "".join(
    [
        f"text{{font-family:{style.FONT};font-size:{number(style.FONT_SIZE)}px;fill:{style.INK}}}",
        ".r{text-anchor:end}.m{text-anchor:middle}.strong{font-weight:bold}",
        f".faint{{fill:{style.FAINT}}}.grid{{stroke:{style.GRID}}}.edge{{stroke:{style.EDGE}}}",
        f".limit{{stroke:{style.EXPOSED};stroke-width:2}}",
        *(f".{system}{{fill:{style.tint(hue, white)}}}" for system, hue, white in (
            ("fsdp2", style.OTHER_HUE, 0.35), ("fsdp1", style.OTHER_HUE, 0.55), ("ddp", style.OTHER_HUE, 0.75),
            ("fxshard", style.HUES[0], 0.0),
        )),
    ]
)  # fmt: skip


def steps(found: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """An SVG file. found: by case, what it is and its result."""
    canvas = Canvas(LEFT, PLOT / MOST)
    canvas.text(24.0, 28.0, "A training step, FSDP2's = 1", "strong", TITLE)
    x = 24.0
    for system, name in SYSTEMS.items():
        canvas.rect(x, 42.0, 18.0, 12.0, system)
        canvas.text(x + 24.0, 52.0, name, size=SMALL)
        x += 48.0 + style.text_width(name, SMALL)
    canvas.line(x + 8.0, 41.0, x + 8.0, 55.0, "limit")
    canvas.text(x + 20.0, 52.0, "the longer of fxshard's compute and communication, each alone", size=SMALL)
    y = TOP
    bottom = TOP + sum(GAP + BAR * len(_bars(result)) for _, result in found.values())
    for tenths in range(0, int(10 * MOST) + 1, 2):
        at = canvas.x(tenths / 10)
        canvas.line(at, TOP - 4.0, at, bottom, "grid" if tenths else "edge")
        canvas.text(at, bottom + 16.0, f"{tenths / 10:g}", "faint m", SMALL)
    for what, result in found.values():
        seconds, bars = result["seconds"], _bars(result)
        canvas.text(LEFT - 12.0, y + 0.5 * BAR * len(bars) + 4.0, what, "r", SMALL)
        for i, system in enumerate(bars):
            ratio = seconds[system] / seconds["fsdp2"]
            length = min(ratio, MOST) * PLOT / MOST
            canvas.rect(LEFT, y + i * BAR, length, BAR - 2.0, system)
            classes = "strong" if system == "fxshard" else "faint"
            canvas.text(LEFT + length + 6.0, y + (i + 1) * BAR - 4.0, f"{ratio:.2f}", classes)
        limit = canvas.x(max(seconds["compute"], seconds["communication"]) / seconds["fsdp2"])
        canvas.line(limit, y + (len(bars) - 1) * BAR - 2.0, limit, y + len(bars) * BAR, "limit")
        y += GAP + BAR * len(bars)
    width, height = LEFT + PLOT + RIGHT, bottom + 32.0
    size = f"{number(width)} {number(height)}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Steps of all systems" '
            f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {size}">',
            f"<style>{SHEET}</style>",
            f'<path d="M0 0H{number(width)}V{number(height)}H0Z" fill="{style.PAPER}"/>',
            *canvas.lines,
            "</svg>\n",
        ]
    )


def _bars(result: Mapping[str, Any]) -> list[str]:
    return [system for system in SYSTEMS if system in result["seconds"]]
