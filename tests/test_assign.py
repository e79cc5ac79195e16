"""`model.schedule = edited`: what may run, and what is refused with nothing changed."""

import pytest
import torch
import torch.distributed as dist

import fxshard
from fxshard.ir.schedule import Schedule
from tests.capture.compare import Framed, batches


def compiled(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxshard.compile(Framed(), **options)
    loss(model).backward()
    return model


def loss(model, x=None):
    return model(batches(1)[0] if x is None else x).square().mean()


def refused(model, schedule, message, error=ValueError):
    before = model.schedule
    with pytest.raises(error, match=message):
        model.schedule = schedule
    assert model.schedule is before
    loss(model).backward()


def test_an_edited_copy_runs_and_the_old_one_does_not_come_back_by_itself():
    model = compiled(F=2)
    first, expected = model.schedule, loss(model).item()
    edited = first.copy()
    free = edited.backward.one("free", "layers.1")
    assert edited.backward.move_after(free, free.next)
    model.schedule = edited
    assert model.schedule is edited and loss(model).item() == expected
    refused(model, first, "runs, or ran before it was replaced")
    model.schedule = first.copy()
    assert loss(model).item() == expected


def test_a_schedule_read_from_its_file_runs():
    model = compiled(F=2)
    expected = loss(model).item()
    model.schedule = Schedule.from_json(model.schedule.to_json())
    assert loss(model).item() == expected


def test_of_another_world():
    other = fxshard.compile(Framed(), world=fxshard.VirtualWorld(2, contributors=4))
    with other_rank(other):
        loss(other).backward()
    refused(compiled(F=2), other.schedule.copy(), "for another world, W=4, 4 batches")


def other_rank(model):
    from contextlib import nullcontext

    return nullcontext() if model is None else model.__dict__["_fxshard"].executor.world.rank(0)


class Doubled(Framed):
    def forward(self, x):
        return super().forward(x) * 2


class Mean(Framed):
    """The number of elements is in the graph."""

    def forward(self, x):
        return super().forward(x).mean()


@pytest.mark.parametrize(("here", "there", "batch"), [(Framed, Doubled, 3), (Mean, Mean, 17)])
def test_of_another_model_and_of_other_shapes(here, there, batch):
    torch._dynamo.reset()
    model, other = fxshard.compile(here(), F=2), fxshard.compile(there(), F=2)
    loss(model).backward()
    loss(other, torch.zeros(batch, 8)).backward()
    refused(model, other.schedule.copy(), "of another model, or of inputs of other shapes")


def test_between_forward_and_backward():
    model = compiled(F=2)
    pending = loss(model)
    model.schedule = model.schedule.copy()
    with pytest.raises(RuntimeError, match="replaced between forward and backward"):
        pending.backward()
    loss(model).backward()


def test_what_is_no_schedule_or_is_broken():
    model = compiled(F=2)
    refused(model, "schedule", "a Schedule was expected", TypeError)
    broken = model.schedule.copy()
    broken.backward.first_use("layers.1").prepend(broken.backward.one("free", "layers.1"))
    refused(model, broken, "used_only_while_gathered", fxshard.ScheduleError)
    empty = model.schedule.copy()
    empty.established.discard("reduces-inserted")
    refused(model, empty, "lacks what it needs to run: reduces-inserted")


def test_a_running_schedule_is_not_edited_and_a_copy_keeps_the_order():
    model = compiled(F=2)
    phase = model.schedule.backward
    with pytest.raises(fxshard.ScheduleError, match="runs already"):
        phase.move_after(phase.frees[0], phase.frees[0].next)
    copy = model.schedule.copy()
    first, second = copy.forward.all_gathers[:2]
    with pytest.raises(
        fxshard.ScheduleError, match=r"AG layers\.0 may not move before AG \(root\)\.0: AG \(root\)\.0 pins"
    ):
        copy.forward.move_before(second, first)


def test_a_move_by_what_is_no_node_of_the_phase():
    copy = compiled(F=2).schedule.copy()
    free = copy.backward.frees[0]
    for anchor in (copy.forward.frees[0], None, "output"):
        with pytest.raises(fxshard.ScheduleError, match="is no node of phase 'backward'"):
            copy.backward.move_before(free, anchor)
    with pytest.raises(fxshard.ScheduleError, match="is no node of phase 'backward'"):
        copy.backward.move_after(free, copy.backward.output)


def rank_goes_back_alone() -> str:
    """Both ranks give another order, then rank 0 alone the first one again."""
    torch.manual_seed(0)
    model = fxshard.compile(Framed(), F=2, timeout_s=5.0)
    loss(model).backward()
    original = model.schedule
    edited = original.copy(reorder=True)
    gather = edited.backward.one("all_gather", "layers.1")
    wait = next(
        n for n in edited.backward.waits if n.args[1] == "layers.1" and n < edited.backward.one("free", "layers.1")
    )
    assert edited.backward.move_before(gather, wait)
    model.schedule = edited
    loss(model).backward()
    if dist.get_rank() == 0:
        try:
            model.schedule = original.copy()
        except fxshard.AgreementError as error:
            return f"AgreementError {error.absent}"
    return "runs" if model.schedule is edited else "changed"


def test_one_rank_alone_does_not_change_the_order(ranks):
    assert ranks.run(2, rank_goes_back_alone) == ["AgreementError (1,)", "runs"]
