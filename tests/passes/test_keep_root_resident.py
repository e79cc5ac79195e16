"""keep-root-resident: no FREE in forward and no AG in backward for what backward reads of the root."""

import torch

import fxshard
from fxshard.passes import KeepRootResident
from tests.capture.compare import Chain, Framed, batches
from tests.passes.golden import after, golden, node_names, remarks, text


def root_lines(schedule: fxshard.Schedule, phase: str) -> str:
    wanted = ("AG ", "for AG", "FREE")
    return "\n".join(l for l in text(schedule, phase).splitlines() if "(root)" in l and any(w in l for w in wanted))


def test_golden():
    # The head is used last in forward and first in backward: one gather serves both. The embedding's weight is not read
    # in backward, so it is freed as before.
    schedule = after(4, Framed)
    assert schedule.resident == {"(root).1"}
    assert root_lines(schedule, "forward") == golden("""
        AG     (root).0  288 B
                                WAIT   (root).0  for AG
                                FREE   (root).0
        AG     (root).1  192 B
                                WAIT   (root).1  for AG
    """)
    assert root_lines(schedule, "backward").strip() == "FREE   (root).1"


def test_what_is_not_kept_is_remarked():
    (missed,) = remarks(after(4, Framed), "keep-root-resident", "missed")
    assert (missed.unit, missed.text) == ("(root).0", "backward does not read '(root).0': freed after forward")
    missed = remarks(after(4, Framed, F=1), "keep-root-resident", "missed")
    assert [(r.unit, r.text) for r in missed] == [
        (f"(root).{i}", f"'(root).{i}' is not gathered in forward") for i in range(2)
    ]


def test_a_model_without_root_parameters_is_left_alone():
    assert node_names(after(4, Chain)) == node_names(after(3, Chain))


def test_everything_keeps_every_unit_that_backward_reads():
    schedule = after(3, Framed, extra=(KeepRootResident(everything=True),))
    assert schedule.resident == {"layers.0", "layers.1", "layers.2", "(root).1"}
    assert not schedule.backward.all_gathers and len(schedule.backward.frees) == 4


def test_a_forward_only_schedule_keeps_nothing():
    with torch.no_grad():
        schedule = fxshard.trace(Framed(), (batches(1)[0],), F=2)
    assert not schedule.resident and not remarks(schedule, "keep-root-resident")


def test_idempotent():
    assert node_names(after(4, Framed, extra=(KeepRootResident(),))) == node_names(after(4, Framed))
