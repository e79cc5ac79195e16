"""plan-memory: slots by interval colouring; a reused slot names the node that ends its last use."""

import pytest

from fxshard.passes import PlanMemory
from tests.capture.compare import Chain, Framed
from tests.passes.golden import after, node_names, remarks


def slots(schedule, phase: str) -> dict[str, tuple[int, int, tuple[str, ...]]]:
    nodes = getattr(schedule, phase).graph.nodes
    return {
        f"{n.meta['fxshard'].kind} {n.meta['fxshard'].flat}": (
            n.meta["slot"].offset, n.meta["slot"].num_bytes, n.meta["slot"].after
        )
        for n in nodes if "slot" in n.meta
    }  # fmt: skip


def test_golden():
    # Two buffers of 288 bytes take turns: the third gather goes where the first was, behind the first one's FREE.
    assert slots(after(8), "forward") == {
        "all_gather layers.0": (0, 288, ()),
        "all_gather layers.1": (288, 288, ()),
        "all_gather layers.2": (0, 288, ("free_layers_0",)),
    }


def test_only_the_meta_changes():
    assert node_names(after(8, Framed)) == node_names(after(7, Framed))


def test_totals_are_remarked():
    schedule = after(8)
    (remark,) = remarks(schedule, "plan-memory")
    assert remark.text == "arena 576 B, residents 0 B" and schedule.memory.arena_bytes == 576


def test_a_group_of_one_needs_no_buffers():
    """Parameters are read where they are, gradients made where they stay."""
    schedule = after(8, F=1)
    assert not slots(schedule, "forward") and not slots(schedule, "backward")


def test_residents_lie_outside_the_arena():
    schedule = after(8, Framed)
    assert "all_gather (root).1" not in slots(schedule, "forward")
    assert schedule.memory.resident_bytes == schedule.flats["(root).1"].full_bytes


@pytest.mark.parametrize("make", [Chain, Framed])
def test_idempotent(make):
    once, twice = after(8, make), after(8, make, extra=(PlanMemory(),))
    for phase in ("forward", "backward"):
        assert slots(once, phase) == slots(twice, phase)
    assert once.memory == twice.memory
