"""What tests read out of an SVG file."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree.ElementTree import Element

from fxshard.viz.style import BOLD, FONT_SIZE, text_width

SVG = "{http://www.w3.org/2000/svg}"


def classes(element: Element) -> list[str]:
    return element.get("class", "").split()


def title(element: Element) -> str:
    found = element.find(f"{SVG}title")
    return found.text or "" if found is not None else ""


def number_of(element: Element, name: str) -> float:
    return float(element.get(name, "nan"))


def lane_bars(root: Element) -> list[list[Element]]:
    """Bars of each lane, in the order they are written: without outlines and exposed time."""
    groups = [g for g in root.iter(f"{SVG}g") if "bars" in classes(g)]
    return [[r for r in g.iter(f"{SVG}rect") if title(r) and "exposed" not in classes(r)] for g in groups]


def check_text(root: Element) -> None:
    """No text leaves the page or runs into another, by an upper bound of its width."""
    boxes = []
    for element in root.iter(f"{SVG}text"):
        found = re.search(r"font-size:([\d.]+)px", element.get("style", ""))
        size = float(found[1]) if found else FONT_SIZE
        width = text_width(element.text or "", size) * (BOLD if "strong" in classes(element) else 1.0)
        x, y = number_of(element, "x"), number_of(element, "y")
        left = x - width / 2 if "m" in classes(element) else x - width if "r" in classes(element) else x
        boxes.append((left, left + width, y - 0.75 * size, y + 0.2 * size, element.text))
    assert boxes
    right, bottom = number_of(root, "width"), number_of(root, "height")
    assert all(box[0] >= 0 and box[1] <= right and box[2] >= 0 and box[3] <= bottom for box in boxes)
    for a, b in combinations(boxes, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], f"{a[4]!r} runs into {b[4]!r}"
