"""forward-overlap: AG(i+1) before the computation of i."""

import pytest

from fxshard.passes import ForwardOverlap
from tests.capture.compare import Framed
from tests.passes.golden import after, golden, node_names, remarks, text


def test_golden():
    # Each gather is under the computation of the unit before; backward is not touched.
    schedule = after(6)
    assert text(schedule, "forward") == golden("""
        AG     layers.0  288 B
        AG     layers.1  288 B
                                WAIT   layers.0  for AG
                                FWD    layers.0
                                FREE   layers.0
                                FWD    layers.0
        AG     layers.2  288 B
                                WAIT   layers.1  for AG
                                FWD    layers.1
                                FREE   layers.1
                                FWD    layers.1
                                WAIT   layers.2  for AG
                                FWD    layers.2
                                FREE   layers.2
                                FWD    layers.2
    """)
    assert node_names(schedule)[1] == node_names(after(5))[1]


def test_only_gathers_move_and_say_where():
    before, moved = after(5), after(6)
    assert sorted(node_names(before)[0]) == sorted(node_names(moved)[0])
    assert [(r.unit, r.text) for r in remarks(moved, "forward-overlap", "passed")] == [
        ("layers.1", "AG issued before WAIT layers.0"), ("layers.2", "AG issued before WAIT layers.1")
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_idempotent_and_in_order(depth):
    one = after(5, Framed, extra=(ForwardOverlap(depth),))
    assert node_names(after(5, Framed, extra=(ForwardOverlap(depth), ForwardOverlap(depth)))) == node_names(one)
    assert [n.name for n in one.forward.all_gathers] == [n.name for n in after(5, Framed).forward.all_gathers]


def test_a_group_of_one_has_nothing_to_move():
    assert node_names(after(6, F=1)) == node_names(after(5, F=1))


def test_depth_zero_does_nothing():
    assert node_names(after(5, extra=(ForwardOverlap(0),))) == node_names(after(5))
