"""The SVG file: read back as XML and compared with the schedule; text that fits, names that are escaped, equal files."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from fxshard.ir import ops
from fxshard.ir.nodes import bytes_text
from fxshard.viz import FORMATS, render
from fxshard.viz.lanes import LANE_NOTES, TITLES, short_names
from fxshard.viz.page import LEFT, MARGIN, ROWS, WIDEST
from fxshard.viz.style import bytes_step, nice_step, number, plain, text_width, wrap
from fxshard.viz.svg import draw_svg
from fxshard.viz.timeline import lay_out
from tests.viz.cases import CASES, Named, traced
from tests.viz.picture import SVG, check_text, classes, lane_bars, number_of, title

every_case = pytest.mark.parametrize("name", CASES)

LARGEST = 400_000
"""Bytes of a picture of 96 units, at most."""


@functools.cache
def picture(name: str) -> Element:
    return ElementTree.fromstring(draw_svg(lay_out(traced(name))))


@every_case
def test_one_bar_with_a_tooltip_for_each_collective(name: str) -> None:
    schedule = traced(name)
    issued = sorted(
        f"{TITLES[kind]} {n.meta['fxshard'].flat}, {bytes_text(n.meta['fxshard'].num_bytes)}, {phase.name}"
        for phase in schedule.phases
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for n in phase.nodes(kind)
    )
    begun = [bar for bars in lane_bars(picture(name)) for bar in bars if "rest" not in classes(bar)]
    first_lines = [title(bar).split("\n")[0] for bar in begun]
    drawn = sorted(line for line in first_lines if line.startswith(tuple(TITLES.values())))
    assert drawn == [plain_of(line) for line in issued]


def plain_of(text: str) -> str:
    """The text as XML gives it back: escaping undone, what XML cannot hold replaced."""
    return ElementTree.fromstring(f"<t>{plain(text)}</t>").text or ""


@every_case
def test_bars_of_a_lane_do_not_overlap(name: str) -> None:
    for bars in lane_bars(picture(name)):
        for before, after in pairwise(bars):
            # x and width are rounded to a hundredth of a pixel each
            assert number_of(before, "x") + number_of(before, "width") <= number_of(after, "x") + 0.0151


@every_case
def test_each_queue_has_a_lane(name: str) -> None:
    schedule = traced(name)
    strong = [t.text for t in picture(name).iter(f"{SVG}text") if "strong" in classes(t)]
    used = {"compute"}
    for phase in schedule.phases:
        found = [n.meta["fxshard"] for n in phase.graph.nodes if "fxshard" in n.meta]
        used |= {f.queue for f in found if f.kind in ops.LABELS}
    assert {text for text in strong if text in LANE_NOTES} == used


@every_case
def test_a_mark_for_each_node_that_takes_no_time(name: str) -> None:
    schedule = traced(name)
    groups = [g for g in picture(name).iter(f"{SVG}g") if "marks" in classes(g)]
    drawn = sorted(classes(path)[0] for g in groups for path in g)
    untimed = ("wait", "free", "cast_shard", "flatten_grads", "accumulate_grad", "presence")
    assert drawn == sorted(kind for kind in untimed for phase in schedule.phases for _ in phase.nodes(kind))


@every_case
def test_text_neither_overlaps_nor_leaves_the_picture(name: str) -> None:
    check_text(picture(name))


@every_case
def test_says_that_time_is_not_measured_and_states_the_peaks(name: str) -> None:
    schedule = traced(name)
    text = "\n".join(t.text or "" for t in picture(name).iter(f"{SVG}text"))
    assert "time in unit slots (not measured)" in text
    timeline = lay_out(schedule)
    assert f"peak {bytes_text(timeline.gathered.peak[1])}" in text
    assert (f"peak {bytes_text(timeline.gradients.peak[1])}" in text) or not timeline.gradients.peak[1]
    words = text.replace("\n", " ")
    assert all(record.text in words for record in schedule.history)


def test_title_says_how_the_model_is_sharded() -> None:
    heads = {name: next(picture(name).iter(f"{SVG}text")).text or "" for name in ("hybrid", "full", "replicated")}
    assert heads["hybrid"].endswith("W = 8 ranks, F = 4 (hybrid, 2 replicas)")
    assert heads["full"].endswith("W = 4 ranks, F = 4 (full shard)")
    assert heads["replicated"].endswith("W = 4 ranks, F = 1 (replicated)")


def test_exposed_time_is_hatched() -> None:
    root = picture("no-prefetch")
    hatched = [r for r in root.iter(f"{SVG}rect") if "exposed" in classes(r) and title(r)]
    exposed = lay_out(traced("no-prefetch")).exposed
    assert [title(r).split("\n")[0] for r in hatched] == [f"compute waits for {g.cause}, {g.phase}" for g in exposed]
    assert root.find(f"{SVG}defs/{SVG}pattern[@id='hatch']") is not None


def test_units_of_a_kind_share_a_hue_in_two_tints() -> None:
    compute = lane_bars(picture("hybrid"))[1]
    fills: dict[str, set[str]] = {}
    for bar in compute:
        fills.setdefault(title(bar).split(":")[0], set()).add(classes(bar)[0])
    assert all(len(found) == 1 for found in fills.values())
    (root,), (even,), (odd,) = fills["(root).0"], fills["layers.0"], fills["layers.1"]
    (last,) = fills["(root).1"]
    assert last[:-1] == root[:-1]
    assert last != root
    assert fills["layers.2"] == {even}
    assert fills["layers.3"] == {odd}
    assert even[:-1] == odd[:-1] != root[:-1]
    assert even != odd


def test_names_are_escaped() -> None:
    text = draw_svg(lay_out(traced("names")))
    assert "a&lt;b&amp;&quot;c&quot;&gt;" in text
    assert "\x07" not in text
    titles = "\n".join(title(bar) for bars in lane_bars(ElementTree.fromstring(text)) for bar in bars)
    for name in Named.NAMES:
        assert name.replace("\x07", "\ufffd") in titles


def test_96_units_are_a_page_of_rows_that_names_every_unit() -> None:
    text = draw_svg(lay_out(traced("96-units")))
    assert len(text.encode()) < LARGEST
    root = ElementTree.fromstring(text)
    assert number_of(root, "width") <= LEFT + WIDEST + MARGIN
    assert number_of(root, "height") <= 2 * number_of(root, "width")
    bands = [r for r in root.iter(f"{SVG}rect") if "band" in classes(r)]
    assert 3 <= len(bands) <= ROWS
    labels = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert sum("continued" in label for label in labels) == len(bands) - 2
    # each unit has its number in two lanes of forward and in four of backward
    axis = {t.text for t in root.iter(f"{SVG}text") if "faint" in classes(t)}
    assert all(labels.count(str(i)) >= 6 for i in range(96) if str(i) not in axis)


@pytest.mark.parametrize("name", ["hybrid", "96-units", "no-limit", "resident"])
def test_a_unit_has_one_name_in_a_picture(name: str) -> None:
    labels = {t.text or "" for t in picture(name).iter(f"{SVG}text") if "over" in classes(t) or "halo" in classes(t)}
    schedule = traced(name)
    for flat in schedule.flats.values():
        found = labels & set(short_names(flat.name))
        assert len(found) == 1, (flat.name, found)
    assert not [label for label in labels if "·" in label]


def test_each_part_of_the_root_is_in_the_legend_with_what_it_holds() -> None:
    labels = [t.text or "" for t in picture("hybrid").iter(f"{SVG}text")]
    assert any(label.startswith("(root).0: first · ") for label in labels)
    assert any(label.startswith("(root).1: last · ") for label in labels)
    size = bytes_text(traced("hybrid").flats["layers.0"].full_bytes)
    assert any(label.startswith("layers.*") and label.endswith(f" · {size} each") for label in labels)
    assert any(
        label.startswith("layers.*, by number · ")
        for label in [t.text or "" for t in picture("96-units").iter(f"{SVG}text")]
    )


def test_arrows_stay_in_their_row() -> None:
    """One that goes on in the next row ends at the right border and begins again at the left one."""
    root = picture("96-units")
    bands = [
        (number_of(r, "x") - 1.0, number_of(r, "width") + 2.0) for r in root.iter(f"{SVG}rect") if "band" in classes(r)
    ]
    paths = [p.get("d", "") for p in root.iter(f"{SVG}path") if "arrow" in classes(p) and p.get("d", "").count("M") > 1]
    borders = {round(x + width) for x, width in bands}
    xs = [float(x) for path in paths for x in re.findall(r"[ML]([\d.]+) ", path)]
    assert min(xs) >= LEFT
    assert max(xs) <= max(borders) + 0.6
    assert LEFT in xs
    assert {round(x) for x in xs} & borders


@every_case
def test_a_line_between_phases_of_one_row(name: str) -> None:
    root = picture(name)
    bands = {number_of(r, "y") for r in root.iter(f"{SVG}rect") if "band" in classes(r)}
    lines = sum("split" in classes(path) for path in root.iter(f"{SVG}path"))
    assert lines == (len(lay_out(traced(name)).spans) - 1 if len(bands) == 1 else 0)


def test_says_the_unit_of_known_costs() -> None:
    timeline = dataclasses.replace(lay_out(traced("hybrid")), unit="ms")
    text = draw_svg(timeline)
    assert "time in ms" in text
    assert "by the schedule&apos;s costs" in text or "by the schedule's costs" in text
    assert "slot" not in text


def test_needs_nothing_from_outside() -> None:
    text = draw_svg(lay_out(traced("hybrid")))
    assert re.findall(r"(?:href|src)=|@import|url\((?!#)", text) == []
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_drawing_twice_gives_equal_files_and_leaves_the_schedule_alone(tmp_path: Path) -> None:
    schedule = traced("hybrid")
    before = schedule.text("all")
    for name in ("a.svg", "b.SVG"):
        render(schedule, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.SVG").read_bytes()
    assert schedule.text("all") == before


def test_another_process_draws_the_same(tmp_path: Path) -> None:
    render(traced("hybrid"), tmp_path / "here.svg")
    code = "import sys, fxshard.viz as viz, tests.viz.cases as cases; viz.render(cases.traced('hybrid'), sys.argv[1])"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = tmp_path / "there.svg"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code, str(there)], env=environment, cwd=root, check=True, timeout=300)
    assert there.read_bytes() == (tmp_path / "here.svg").read_bytes()


@pytest.mark.parametrize("file", ["step.gif", "step", "step.svg.gz", "step.json"])
def test_another_suffix_is_refused_with_the_allowed_ones(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allowed are \.svg") as caught:
        render(traced("hybrid"), tmp_path / file)
    assert repr(os.path.splitext(file)[1]) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert all(form in str(caught.value) for form in FORMATS)


def test_short_names() -> None:
    assert short_names("model.layers.12") == ["model.layers.12", "layers.12", "12"]
    assert short_names("(root).1") == ["(root).1"]
    assert short_names("encoder.embedding") == ["encoder.embedding"]


def test_round_numbers() -> None:
    assert [nice_step(x) for x in (0.03, 1.0, 1.1, 3.0, 7.0, 64.0)] == [0.05, 1.0, 2.0, 5.0, 10.0, 100.0]
    assert bytes_step(1, 4) == 1
    assert bytes_step(7 * 1024**2, 4) == 2 * 1024**2
    assert bytes_step(900, 4) == 500
    assert [number(x) for x in (1.0, 1.25, -0.01, 12.34)] == ["1", "1.2", "0", "12.3"]


def test_lines_are_wrapped_by_width() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    lines = wrap(words, text_width("one two three ", 12.0), 12.0)
    assert " ".join(lines) == " ".join(words)
    assert len(lines) > 1
    assert all(text_width(line, 12.0) <= text_width("one two three ", 12.0) for line in lines)
