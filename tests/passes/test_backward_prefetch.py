"""backward-prefetch: AG(i-1) before the gradient of i, and so before RS(i)."""

import pytest

from fxshard.passes import BackwardPrefetch
from tests.capture.compare import Framed
from tests.passes.golden import after, golden, node_names, remarks, text


def test_golden():
    # AG layers.1 is issued before WAIT layers.2, so it runs under the gradient of layers.2 and ahead of its RS; the first
    # gather of the phase comes first of all.
    assert text(after(5), "backward") == golden("""
        AG     layers.2  288 B
                                GRAD   layers.2
        AG     layers.1  288 B
                                WAIT   layers.2  for AG
                                GRAD   layers.2
                                FREE   layers.2
                                GRAD   layers.2
                                FLAT   layers.2  288 B
                                                         RS     layers.2  288 B
                                GRAD   layers.1
                                WAIT   layers.1  for AG
                                GRAD   layers.1
                                FREE   layers.1
                                GRAD   layers.1
                                FLAT   layers.1  288 B
                                                         RS     layers.1  288 B
                                GRAD   layers.0
                                FLAT   layers.0  288 B
                                                         RS     layers.0  288 B
                                WAIT   layers.2  for RS
                                ACC    layers.2  144 B
                                WAIT   layers.1  for RS
                                ACC    layers.1  144 B
                                WAIT   layers.0  for RS
                                ACC    layers.0  144 B
    """)


def test_only_gathers_move_and_say_where():
    before, moved = after(4), after(5)
    assert node_names(before)[0] == node_names(moved)[0]
    assert sorted(node_names(before)[1]) == sorted(node_names(moved)[1])
    assert [(r.unit, r.text) for r in remarks(moved, "backward-prefetch", "passed")] == [
        ("layers.2", "AG issued first"), ("layers.1", "AG issued before WAIT layers.2")
    ]  # fmt: skip
    assert [n.meta["fxshard"].moved_by for n in moved.backward.all_gathers] == [("backward-prefetch",)] * 2
    assert moved.history[-1].moved == 2


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_idempotent(depth):
    one = after(4, Framed, extra=(BackwardPrefetch(depth),))
    assert node_names(after(4, Framed, extra=(BackwardPrefetch(depth), BackwardPrefetch(depth)))) == node_names(one)


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_gathers_keep_their_order(depth):
    order = [n.name for n in after(4, Framed).backward.all_gathers]
    assert [n.name for n in after(4, Framed, extra=(BackwardPrefetch(depth),)).backward.all_gathers] == order


def test_a_unit_that_is_still_gathered_is_remarked():
    missed = remarks(after(5, Framed), "backward-prefetch", "missed")
    assert [(r.unit, r.text) for r in missed] == [("(root).1", "still gathered from forward")]


def test_depth_zero_does_nothing():
    assert node_names(after(4, extra=(BackwardPrefetch(0),))) == node_names(after(4))
