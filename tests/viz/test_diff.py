"""The picture of a difference: what is called moved, added and removed, and that both schedules are all there."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

import fxshard
from fxshard.ir import Schedule, ops
from fxshard.ir.nodes import bytes_text, info
from fxshard.viz import render_diff
from fxshard.viz.diff import compared, draw_diff
from fxshard.viz.lanes import TITLES
from fxshard.viz.page import LEFT, MARGIN, WIDEST
from fxshard.viz.timeline import lay_out
from tests.viz.cases import traced
from tests.viz.picture import SVG, check_text, classes, lane_bars, number_of, title

PAIRS = [
    ("no-prefetch", "full"),
    ("hybrid", "resident"),
    ("hybrid", "late-accumulation"),
    ("no-limit", "no-plan"),
    ("forward-only", "hybrid"),
    ("hybrid", "forward-only"),
    ("replicated", "full"),
    ("no-passes", "hybrid"),
    ("names", "names"),
    ("96-late", "96-units"),
]
every_pair = pytest.mark.parametrize(("a", "b"), PAIRS)


@functools.cache
def picture(a: str, b: str) -> Element:
    return ElementTree.fromstring(draw_diff(traced(a), traced(b)))


def collectives(schedule: Schedule) -> Counter[str]:
    return Counter(
        f"{TITLES[info(n).kind]} {info(n).flat}, {bytes_text(info(n).num_bytes)}, {phase.name}"
        for phase in schedule.phases
        for kind in ops.COLLECTIVES
        for n in phase.nodes(kind)
    )


# -- what changed


def test_nothing_changed() -> None:
    for states in compared(traced("hybrid"), traced("hybrid")):
        assert set(states.values()) == {"same"}


def test_prefetching_moves_gathers() -> None:
    """And the throttles before them, which are of the order of gathers too; nothing comes and nothing goes."""
    before, after = compared(traced("no-prefetch"), traced("full"))
    assert before.keys() == after.keys()
    moved = {key for key, state in before.items() if state != "same"}
    assert moved == {key for key, state in after.items() if state != "same"}
    assert {key[1] for key in moved} == {"all_gather", "throttle"}
    assert {key[2] for key in moved if key[:2] == ("backward", "all_gather")} == {f"layers.{i}" for i in range(4)}


def test_residents_remove_the_gathers_of_backward_and_frees() -> None:
    before, after = compared(traced("hybrid"), traced("resident"))
    removed = {key for key, state in before.items() if state == "removed"}
    layers = [f"layers.{i}" for i in range(4)]
    for name in layers:
        assert {("backward", "all_gather", name, 0), ("backward", "wait unshard", name, 0)} <= removed
        assert ("backward", "wait replicate", name, 0) not in removed
    assert "added" not in after.values()
    # the other way round the same operations are added
    back = compared(traced("resident"), traced("hybrid"))[1]
    assert {key for key, state in back.items() if state == "added"} == removed


def test_a_pass_that_moves_is_seen_to_move() -> None:
    """Of an ACC that goes over others to the end and of one that does not, either may count as where it was."""
    before, after = compared(traced("hybrid"), traced("late-accumulation"))
    moved = [key for key, state in before.items() if state == "moved"]
    assert {key[2] for key in moved if key[1] == "accumulate_grad"} >= {"(root).1", "layers.2", "layers.3"}
    assert {key[1] for key in moved} <= {"accumulate_grad", "wait replicate"}
    assert set(before.values()) == set(after.values()) == {"same", "moved"}


@every_pair
def test_what_did_not_move_is_in_the_same_order(a: str, b: str) -> None:
    """Apart from LIMITs, which are the same if they wait for the same FREE."""
    before, after = compared(traced(a), traced(b))
    kept = [[k for k, state in side.items() if state == "same" and k[1] != "throttle"] for side in (before, after)]
    assert kept[0] == kept[1]
    moved = [{k for k, state in side.items() if state == "moved" and k[1] != "throttle"} for side in (before, after)]
    assert moved[0] == moved[1]
    # removed and still there: with other bytes
    assert {after.get(k, "added") for k, state in before.items() if state == "removed"} <= {"added"}


def test_counts_are_those_of_the_text() -> None:
    found = fxshard.diff(traced("hybrid"), traced("resident"))
    before, after = compared(traced("hybrid"), traced("resident"))
    assert Counter(before.values())["removed"] == found.count("-") > 0
    assert Counter(after.values())["added"] == found.count("+")
    assert Counter(before.values())["moved"] == Counter(after.values())["moved"] == found.count("<")


# -- the picture


@every_pair
def test_text_neither_overlaps_nor_leaves_the_picture(a: str, b: str) -> None:
    root = picture(a, b)
    check_text(root)
    assert number_of(root, "width") <= LEFT + WIDEST + MARGIN


@every_pair
def test_all_collectives_of_both_are_there_and_coloured_by_what_became_of_them(a: str, b: str) -> None:
    begun = [bar for bars in lane_bars(picture(a, b)) for bar in bars if "rest" not in classes(bar)]
    drawn = Counter(title(bar).split("\n")[0] for bar in begun if title(bar).startswith(tuple(TITLES.values())))
    if a != "names":  # names that XML cannot hold are compared in test_svg
        assert drawn == collectives(traced(a)) + collectives(traced(b))
    coloured = Counter(classes(bar)[0] for bar in begun if not classes(bar)[0].startswith("same"))
    states = [s for states in compared(traced(a), traced(b)) for k, s in states.items() if k[1] in ops.COLLECTIVES]
    assert coloured == Counter(state for state in states if state != "same")


@every_pair
def test_marks_are_those_of_changed_operations_and_of_their_waits(a: str, b: str) -> None:
    root = picture(a, b)
    marks = [path for g in root.iter(f"{SVG}g") if "marks" in classes(g) for path in g]
    coloured = Counter(tuple(classes(path)) for path in marks if "unchanged" not in classes(path))
    states = [
        (key[1].split()[0], state)
        for states in compared(traced(a), traced(b))
        for key, state in states.items()
        if state != "same" and key[1] not in (*ops.COLLECTIVES, "throttle")
    ]
    assert coloured == Counter(states)
    assert {classes(path)[0] for path in marks if "unchanged" in classes(path)} <= {"wait"}


def test_both_are_on_one_time_scale() -> None:
    """The same gather is as wide before and after, each phase begins at the left, and the better one is shorter."""
    root = picture("no-prefetch", "full")
    widths: dict[str, set[float]] = {}
    for bars in lane_bars(root):
        for bar in bars:
            if title(bar).startswith(tuple(TITLES.values())):
                widths.setdefault(title(bar).split("\n")[0], set()).add(number_of(bar, "width"))
    assert widths
    assert all(max(found) - min(found) <= 0.0101 for found in widths.values())
    compute = [bars for bars in lane_bars(root) if bars and "operators of" in title(bars[0])]
    ends = [number_of(bars[-1], "x") + number_of(bars[-1], "width") for bars in compute]
    assert len(compute) == 4
    assert ends[1] < ends[0]
    assert ends[3] < ends[2]
    assert {number_of(bars[0], "x") for bars in compute[2:]} == {LEFT}


def test_memory_of_both_is_in_one_plot_a_row() -> None:
    root = picture("hybrid", "resident")
    found = [tuple(classes(p)) for p in root.iter(f"{SVG}path") if re.match(r"M\S+ \S+H", p.get("d", ""))]
    kinds = [(f"{what}-line", f"{side}-line") for side in ("before", "after") for what in ("gathered", "gradients")]
    assert [pair for pair in found if pair in kinds] == 2 * kinds


def test_says_what_changed_in_numbers() -> None:
    text = " ".join(t.text or "" for t in picture("hybrid", "resident").iter(f"{SVG}text"))
    before, after = lay_out(traced("hybrid")), lay_out(traced("resident"))
    assert (
        f"peak gathered {bytes_text(before.gathered.peak[1])} before, {bytes_text(after.gathered.peak[1])} after"
        in text
    )
    assert "moved: none" in text
    assert "added: none" in text
    assert re.search(r"removed: 4 AG, 4 WAIT, 4 FREE", text)
    assert "keep-root-resident{everything=True}" in text


def test_a_phase_that_one_lacks_is_said_to_be_missing() -> None:
    texts = [t.text or "" for t in picture("forward-only", "hybrid").iter(f"{SVG}text")]
    assert "before, backward: there is none" in texts
    assert any(text.startswith("after, backward: ") and "slots" in text for text in texts)


def test_lines_join_where_a_collective_was_and_is_in_short_phases_only() -> None:
    def lines(a: str, b: str) -> int:
        found = [p.get("d", "") for p in picture(a, b).iter(f"{SVG}path") if classes(p) == ["link"]]
        return sum(data.count("M") for data in found)

    moved = [k for k, s in compared(traced("no-prefetch"), traced("full"))[0].items() if s == "moved"]
    in_the_legend = 1
    assert lines("no-prefetch", "full") == sum(key[1] in ops.COLLECTIVES for key in moved) + in_the_legend
    assert lines("96-late", "96-units") == 0


def test_a_file_is_written_and_another_suffix_refused(tmp_path: Path) -> None:
    for name in ("a.svg", "b.SVG"):
        render_diff(traced("hybrid"), traced("resident"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.SVG").read_bytes()
    with pytest.raises(ValueError, match=r"'\.pdf': a difference is drawn as \.svg"):
        render_diff(traced("hybrid"), traced("resident"), tmp_path / "a.pdf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "b.SVG"]
