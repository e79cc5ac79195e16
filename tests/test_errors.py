"""Errors: one base class, and words a user can act on."""

import pytest
import torch
from torch import nn

import fxshard
from fxshard import errors
from tests.capture.compare import Chain, Framed, batches, pair


@pytest.mark.parametrize("name", ["CaptureError", "ScheduleError", "PassError", "AgreementError"])
def test_every_error_has_one_base_and_is_exported(name):
    kind = getattr(errors, name)
    assert issubclass(kind, fxshard.FxshardError) and issubclass(kind, RuntimeError) and getattr(fxshard, name) is kind


def test_a_schedule_before_any_call():
    _, model = pair(Framed)
    for ask in (lambda: model.schedule, model.lowered):
        with pytest.raises(RuntimeError, match="not captured yet: call it once, or give example_inputs"):
            ask()
    assert model.schedules == []


def test_a_schedule_without_backward():
    _, model = pair(Framed)
    with torch.no_grad():
        model(batches(1)[0])
    assert model.schedule.backward is None
    with pytest.raises(ValueError, match=r"no backward.*no_grad"):
        model.lowered("backward")


def test_an_unknown_phase_or_level():
    _, model = pair(Framed)
    model(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"level='half'.*'units'"):
        model.schedule.text("half")
    with pytest.raises(ValueError, match=r"sideways.*forward.*backward"):
        model.lowered("sideways")


def test_a_model_whose_forward_reads_no_parameter_communicates_nothing():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * 2

    assert fxshard.trace(Idle(), (torch.ones(2),), F=2, units="none").skeleton() == []


def test_a_capture_error_points_at_the_users_line_even_inside_the_standard_library():
    class Sorts(Chain):
        def forward(self, x):
            import random

            random.SystemRandom().random()  # the system's randomness cannot be captured
            return super().forward(x)

    with pytest.raises(fxshard.CaptureError) as caught:
        fxshard.trace(Sorts(), (batches(1)[0],), F=2)
    assert "test_errors.py" in str(caught.value) and "to do" in str(caught.value)


def test_a_value_that_is_new_at_each_call_is_told_by_the_limit():
    class Scaled(Chain):
        word = ""

        def forward(self, x):
            return super().forward(x) * len(self.word)

    model = fxshard.compile(Scaled(), F=2)
    with torch._dynamo.config.patch(recompile_limit=3):
        for count in range(3):
            model.word = "a" * count
            model(batches(1)[0])
        model.word = "aaa"
        with pytest.raises(fxshard.CaptureError, match=r"Scaled was captured 3 times and asks for one more") as caught:
            model(batches(1)[0])
        assert "recompile_limit" in str(caught.value)
        model.word = ""
        assert model(batches(1)[0]).eq(0).all()  # what was captured still runs


def test_a_lost_position_is_no_half_sharded_model():
    """A pass that fails during compile with example inputs leaves the model plain."""

    class Broken(fxshard.passes.Pass):
        name = "broken"

        def apply(self, schedule, remarks):
            raise KeyError("lost")

    model = Framed()
    with pytest.raises(fxshard.PassError, match=r"pass 8 of 9, 'broken', failed: KeyError: 'lost'"):
        fxshard.compile(model, F=2, passes=[Broken()], example_inputs=(batches(1)[0],))
    assert type(model) is Framed and all(type(p) is nn.Parameter for p in model.parameters())
