"""What a notebook shows: the picture and the text of the schedule, and styles that reach nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from fxshard.viz.svg import draw_svg
from fxshard.viz.timeline import lay_out
from tests.viz.cases import CASES, traced

every_case = pytest.mark.parametrize("name", CASES)


def picture(name: str) -> ElementTree.Element:
    shown = traced(name)._repr_html_()
    return ElementTree.fromstring(shown[shown.index("<svg") : shown.index("</svg>") + len("</svg>")])


@every_case
def test_it_is_the_picture(name: str) -> None:
    drawn, shown = ElementTree.fromstring(draw_svg(lay_out(traced(name)))), picture(name)
    assert [e.tag for e in drawn.iter()] == [e.tag for e in shown.iter()]
    for before, after in zip(drawn.iter(), shown.iter()):
        if not before.tag.endswith("style"):
            assert before.text == after.text
            assert {k: v for k, v in before.attrib.items() if k != "id"} == {
                k: v for k, v in after.attrib.items() if k != "id"
            }


@every_case
def test_each_rule_is_for_this_picture_alone(name: str) -> None:
    shown = traced(name)._repr_html_()
    scope = re.match(r'<div class="(fxshard-[0-9a-f]{8})">', shown)
    assert scope
    sheet = next(e.text or "" for e in picture(name).iter() if e.tag.endswith("style"))
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", sheet)
    original = re.findall(r"([^{}]+)\{([^{}]*)\}", re.split("</?style>", draw_svg(lay_out(traced(name))))[1])
    assert len(rules) == len(original) > 10
    for (selectors, body), (before, declarations) in zip(rules, original):
        assert selectors.split(",") == [f".{scope[1]} {selector}" for selector in before.split(",")]
        assert body.replace(f"{scope[1]}-", "") == declarations
    for reference in re.findall(r"url\(#([^)]*)\)", shown):
        assert f'id="{reference}"' in shown and reference.startswith(scope[1])


def test_two_pictures_do_not_share_a_scope() -> None:
    first, second = traced("hybrid")._repr_html_(), traced("full")._repr_html_()
    assert first[:30] != second[:30]
    assert first == traced("hybrid")._repr_html_()


@every_case
def test_the_text_is_there(name: str) -> None:
    class Text(HTMLParser):
        inside, text = False, ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = self.inside or tag == "pre"

        def handle_data(self, data: str) -> None:
            self.text += data * self.inside

    parser = Text()
    parser.feed(traced(name)._repr_html_())
    assert parser.text.strip() == traced(name).text().strip()
