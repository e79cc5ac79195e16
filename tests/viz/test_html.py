"""The report: what is embedded compared with the schedule, names that are escaped, nothing loaded; in a browser if there
is one."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.ir import Schedule, ops
from fxshard.viz import render
from fxshard.viz.html import draw_html, report
from fxshard.viz.timeline import lay_out
from tests.viz.cases import CASES, Named, traced

every_case = pytest.mark.parametrize("name", CASES)

LARGEST = 1_500_000
"""Bytes of a report on 96 units, at most."""


class Page(HTMLParser):
    """Elements with their attributes, and the text in each `script`, `style`, `pre` and `title`."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "pre", "title"):
            self.inside = str(dict(attrs).get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "pre", "title"):
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


@functools.cache
def page(name: str) -> Page:
    return Page(draw_html(traced(name)))


def embedded(name: str) -> dict[str, Any]:
    return json.loads(page(name).texts["data"])


@every_case
def test_what_is_embedded_is_the_timeline(name: str) -> None:
    timeline = asdict(lay_out(traced(name)))
    found = embedded(name)["timeline"]
    assert found.pop("end") == found["spans"][-1]["end"]
    assert found == json.loads(json.dumps(timeline))


@every_case
def test_every_step_is_an_operation_in_issue_order_at_its_place_in_the_timeline(name: str) -> None:
    schedule, found = traced(name), embedded(name)
    steps = [(phase, nodes) for phase in schedule.phases for _, nodes in phase.steps()]
    assert len(steps) == len(found["operations"])
    taken = []
    for (phase, nodes), row in zip(steps, found["operations"]):
        about = nodes[0].meta.get("fxshard")
        kind = about.kind if about is not None else "compute"
        assert row["phase"] == phase.name
        if kind == "compute":
            assert row["op"] == ("GRAD" if phase.name == "backward" else "FWD")
            assert row["note"].split(" ")[0] == str(len(nodes))
        else:
            assert (row["op"], row["name"], row["queue"]) == (ops.LABELS[kind], about.flat or "", about.queue)
        if "at" not in row:
            assert row["note"].startswith("after FREE") if kind == "throttle" else kind == "compute"
            continue
        lane, shape, number = row["at"]
        place = found["timeline"]["lanes"][lane][shape][number]
        assert (place["phase"], place["queue"], place["kind"], place["name"]) == (
            phase.name,
            row["queue"],
            kind,
            row["name"],
        )
        if kind in ops.COLLECTIVES:
            assert row["bytes"] == place["num_bytes"] == about.num_bytes
        taken.append(tuple(row["at"]))
    lanes = found["timeline"]["lanes"]
    all_places = {(i, s, n) for i, lane in enumerate(lanes) for s in ("bars", "marks") for n in range(len(lane[s]))}
    assert len(taken) == len(all_places) and set(taken) == all_places


@every_case
def test_units(name: str) -> None:
    schedule = traced(name)
    for row, flat in zip(embedded(name)["units"], schedule.flats.values(), strict=True):
        assert (row["name"], row["unit"], row["numel"]) == (flat.name, flat.unit, flat.numel)
        assert [fqn for fqn, _, _ in row["parameters"]] == list(flat.fqns)
        assert row["gathered bytes"] == flat.full_bytes
        assert row["shard bytes"] * flat.F == flat.padded_numel * flat.dtype.itemsize
        assert f"torch.{row['gathered as']}" == str(flat.param_dtype)
        assert ("resident" in row["notes"]) == (flat.name in schedule.resident)
    assert set(embedded(name)["hues"]) == set(schedule.units)


def test_frozen_and_tied_parameters_are_told() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
            self.b.weight = self.a.weight
            self.c.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).tanh()).tanh()).sum()

    torch._dynamo.reset()
    units = report(fxshard.trace(Tied(), (torch.randn(4, 8),), F=2, units="none"))["units"]
    frozen = {name for row in units if "frozen" in row["notes"] for name, _, _ in row["parameters"]}
    assert frozen == {"c.weight", "c.bias"}
    assert [aliases for row in units for name, _, aliases in row["parameters"] if name == "a.weight"] == [["b.weight"]]


@every_case
def test_passes_and_their_remarks(name: str) -> None:
    schedule = traced(name)
    found = embedded(name)["passes"]
    assert [row["text"] for row in found] == [record.text for record in schedule.history]
    assert [(r["added"], r["removed"], r["moved"]) for r in found] == [
        (record.added, record.removed, record.moved) for record in schedule.history
    ]
    told = Counter(
        (row["text"].split("{")[0], r["kind"], r["unit"], r["text"]) for row in found for r in row["remarks"]
    )
    assert told == Counter((r.by, r.kind, r.unit, r.text) for r in schedule.remarks)


def closed_up(lines: tuple[str, ...]) -> Counter[str]:
    return Counter(" ".join(line.split()) for line in lines)


@every_case
def test_what_a_pass_changed(name: str) -> None:
    history = traced(name).history
    for before, record, row in zip(history, history[1:], embedded(name)["passes"][1:]):
        new = Counter(line for mark, line in row["changes"] if mark == "+")
        gone = Counter(line for mark, line in row["changes"] if mark == "-")
        here, there = (Counter(line for mark, line in row["changes"] if mark == sign) for sign in "<>")
        assert here == there
        titles = {line for line in closed_up(record.lines + before.lines) if set(line.split()) <= QUEUES}
        old, now = closed_up(before.lines), closed_up(record.lines)
        assert new == Counter({k: v for k, v in (now - old).items() if k[0] != "#" and k not in titles})
        assert gone == Counter({k: v for k, v in (old - now).items() if k[0] != "#" and k not in titles})


QUEUES = {"unshard", "compute", "reduce", "replicate"}


def test_a_pass_that_moves_is_told_as_moves() -> None:
    changes = {row["text"].split("{")[0]: row["changes"] for row in embedded("full")["passes"]}
    moved = [line for mark, line in changes["backward-prefetch"] if mark == ">"]
    assert moved and all(line.startswith(("AG", "GRAD", "RS", "FLAT")) for line in moved)
    assert any(line.startswith("LIMIT after FREE") for mark, line in changes["rate-limit"] if mark == "+")


@every_case
def test_figures_at_the_top(name: str) -> None:
    schedule, timeline = traced(name), lay_out(traced(name))
    figures = {label: (value, note) for label, value, note in embedded(name)["summary"]}
    collectives = [n for p in schedule.phases for kind in ops.COLLECTIVES for n in p.nodes(kind)]
    assert figures["Collectives"][0] == str(len(collectives))
    assert figures["FSDP units"][0] == str(len(schedule.units))
    assert figures["Exposed"][0] == f"{sum(gap.end - gap.start for gap in timeline.exposed):.2f} slots"
    assert ("Arena" in figures) == (name not in ("no-plan", "gathers-only", "no-passes"))


@every_case
def test_the_page_loads_nothing_and_runs_no_other_script(name: str) -> None:
    found = page(name)
    for tag, attributes in found.elements:
        assert not attributes.keys() & {"src", "srcset", "data", "action", "onclick", "onload", "onerror"}
        assert (attributes.get("href") or "#").startswith("#")
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "form")
    policy = [a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert [tag for tag, _ in found.elements].count("script") == 2
    for text in (found.texts["style"], found.texts["script"]):
        assert not re.search(
            r"https?:|url\(|@import|fetch\(|XMLHttp|WebSocket|import\(|innerHTML|document\.write", text
        )


@every_case
def test_the_text_is_in_the_page(name: str) -> None:
    expected = re.sub(r"[\r\n]+", "\n", traced(name).text())
    assert page(name).texts["pre"].replace("\x07", "") == expected.replace("\x07", "")


class Hostile(nn.Module):
    """Names of units that would end a script, a text or an attribute, or fill in the page's own fields."""

    NAMES = (
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "\"'><img src=x onerror=alert(1)>",
        "&amp;{{data}}",
        "\u2028",
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.NAMES:
            x = self._modules[name](x).tanh()  # type: ignore[misc]
        return x.sum()


@functools.cache
def hostile() -> Schedule:
    torch._dynamo.reset()
    return fxshard.trace(Hostile(), (torch.randn(2, 4),), F=2, units=nn.Linear)


@pytest.mark.parametrize("make", [hostile, lambda: traced("names")])
def test_hostile_names_stay_text(make: Any) -> None:
    schedule = make()
    found, plain = Page(draw_html(schedule)), page("full")
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in plain.elements]
    assert {row["unit"] for row in json.loads(found.texts["data"])["units"]} == set(schedule.units)
    assert set(schedule.units) in (set(Hostile.NAMES), set(Named.NAMES))
    assert found.texts["script"] == plain.texts["script"] and found.texts["style"] == plain.texts["style"]


def test_it_says_that_time_is_not_measured() -> None:
    assert "unit slots, not measured" in embedded("full")["time"]
    assert embedded("full")["words"]["time"] == "time in unit slots (not measured)"


def test_what_is_there_for_those_who_do_not_use_a_mouse_or_see() -> None:
    found = page("full").elements
    ids = {attributes["id"] for _, attributes in found if "id" in attributes}
    canvas = next(attributes for tag, attributes in found if tag == "canvas")
    assert canvas["tabindex"] == "0" and canvas["aria-label"] and set(canvas["aria-describedby"].split()) <= ids
    for _, attributes in found:
        named = attributes.get("aria-labelledby") or attributes.get("for")
        assert named is None or named in ids
        assert (attributes.get("href") or "#timeline")[1:] in ids
    assert any(attributes.get("aria-live") == "polite" for _, attributes in found)
    assert "prefers-color-scheme: dark" in page("full").texts["style"]
    assert ("html", {"lang": "en"}) in found


def test_the_parts_of_the_page_are_installed() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fxshard.viz"]
    parts = {path.name for path in (root / "viz").iterdir() if path.suffix in (".html", ".css", ".js")}
    assert len(parts) == 3
    assert {path.name for pattern in patterns for path in (root / "viz").glob(pattern)} == parts


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "step.HTML"
    render(traced("hybrid"), path)
    assert path.read_bytes() == draw_html(traced("hybrid")).encode()


def test_many_units_are_a_file_of_moderate_size() -> None:
    assert len(draw_html(traced("96-units"))) < LARGEST


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, to run the page's script")
@pytest.mark.parametrize("make", [hostile, lambda: traced("presence"), lambda: traced("no-passes")])
def test_a_browser_shows_every_operation_unit_and_pass(tmp_path: Path, make: Any) -> None:
    schedule = make()
    render(schedule, tmp_path / "step.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path}", (tmp_path / "step.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-ready="true"' in shown, "the script did not run to its end"
    tables = {
        name: re.search(rf'<table id="{name}-table">.*?</table>', shown, re.S) for name in ("operations", "units")
    }
    assert all(tables.values())
    rows = {name: found[0].count("<tr") - 1 for name, found in tables.items() if found}
    assert rows == {"operations": sum(1 for p in schedule.phases for _ in p.steps()), "units": len(schedule.flats)}
    texts = html.unescape(re.sub(r"<[^>]*>", "\n", str(tables["units"] and tables["units"][0])))
    assert all(unit.strip() in texts for unit in schedule.units)
    assert shown.count('class="pass"') == len(schedule.history)
    assert "<img" not in shown
