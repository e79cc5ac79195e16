"""Errors: one base class, and words a user can act on."""

import pytest
import torch
from torch import nn

import fxshard
from fxshard import errors
from tests.capture.compare import Chain, Framed, batches, full, pair, train_both


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


def test_what_a_pass_may_not_do_names_the_pass():
    class Early(fxshard.passes.Pass):
        name = "early"

        def apply(self, schedule, remarks):
            forward = schedule.forward
            forward.move_before(forward.waits[0], forward.all_gathers[0], self.name)

    with pytest.raises(fxshard.ScheduleError, match=r"pins it\n  in      early, pass 8 of 9"):
        fxshard.trace(Framed(), (batches(1)[0],), F=2, passes=[Early()])
    with pytest.raises(fxshard.ScheduleError, match=r"(?s)'layers.0'.*in      rate-limit\{limit=1, .*, pass 7 of 8"):
        fxshard.trace(Both(), (batches(1)[0],), F=2, rate_limit=1)


class Both(Framed):
    """One operator reads two units."""

    def forward(self, x):
        return super().forward(x) + (self.layers[0].linear.weight * self.layers[1].linear.weight).sum()


def test_a_throttled_gather_used_too_early_is_told_with_the_users_line():
    class Late(fxshard.passes.Pass):
        name = "late"

        def apply(self, schedule, remarks):
            wait = schedule.forward.waits[1]
            max(v for v in wait.users if v.op == "call_function").append(wait)

    with pytest.raises(fxshard.ScheduleError, match=r"view of 'layers.0.linear.weight'.*\n.*compare\.py:\d+"):
        fxshard.trace(Framed(), (batches(1)[0],), F=2, passes=[Late()])


def test_a_failed_first_call_leaves_the_model_sharded_and_usable():
    """A loop that skips a bad batch goes on training what its optimizer holds."""

    class Prints(Framed):
        prints = True

        def forward(self, x):
            if self.prints:
                print(float(x.sum()))
            return super().forward(x)

    plain, model = pair(Prints)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        fxshard.CaptureError, match=r"test_errors.py:\d+ in forward\n.*model.unsharded\(\).*stays sharded"
    ):
        model(batches(1)[0])
    with pytest.raises(fxshard.CaptureError, match="captured whole"):
        model(torch.ones(2, 5))
    with model.unsharded():
        assert torch.equal(model(batches(1)[0]), plain(batches(1)[0]))
    plain.prints = model.prints = False
    assert all(isinstance(p, fxshard.ShardedParameter) for p in optimizer.param_groups[0]["params"])
    train_both(plain, model, batches(2))


@pytest.mark.parametrize("options", [{}, {"mixed_precision": fxshard.MixedPrecision(param=torch.bfloat16)}], ids=str)
def test_parameters_put_into_a_compiled_model_are_refused_by_name(options):
    """Their gradients would stay each rank's own."""
    _, model = pair(Framed, **options)
    model(batches(1)[0]).sum().backward()
    head = model.head
    model.head = nn.Linear(8, 5)
    with pytest.raises(fxshard.CaptureError, match=r"'head.weight' is not sharded: it was put into the model after"):
        model(batches(1)[0])
    model.head = head
    model(batches(1)[0])
    plain = {name: full(value) for name, value in model.state_dict().items()}
    model.load_state_dict(plain, assign=True)
    for _ in range(2):
        with pytest.raises(fxshard.CaptureError, match=r"'embed.weight' is not sharded.*assign=False"):
            model(batches(1)[0])
        assert not isinstance(model.embed.weight, fxshard.ShardedParameter)


def test_arguments_that_do_not_fit_are_told_as_python_does():
    _, model = pair(Framed)
    with pytest.raises(TypeError, match="forward of the model: missing a required argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'y'"):
        model(batches(1)[0], y=1)
    model(batches(1)[0]).sum().backward()


def test_gradients_of_parameters_by_autograd_grad_are_refused():
    _, model = pair(Framed)
    loss = model(batches(1)[0]).sum()
    with pytest.raises(
        RuntimeError, match=r"autograd.grad cannot ask for parameters of a sharded model.*loss.backward"
    ):
        torch.autograd.grad(loss, list(model.parameters()))


def test_parameters_given_to_forward_are_no_parameters_of_the_model():
    class Scaled(Framed):
        def forward(self, x, scale):
            return super().forward(x) * scale

    plain, model = pair(Scaled)
    scales = [nn.Parameter(torch.full((5,), 2.0)) for _ in range(2)]
    for m, scale in zip((plain, model), scales):
        m(batches(1)[0], scale).square().mean().backward()
    assert torch.equal(scales[0].grad, scales[1].grad)


def test_a_lost_position_is_no_half_sharded_model():
    """A pass that fails during compile with example inputs leaves the model plain."""

    class Broken(fxshard.passes.Pass):
        name = "broken"

        def apply(self, schedule, remarks):
            raise KeyError("lost")

    model = Framed()
    with pytest.raises(fxshard.PassError, match=r"broken, pass 8 of 9, failed: KeyError: 'lost'"):
        fxshard.compile(model, F=2, passes=[Broken()], example_inputs=(batches(1)[0],))
    assert type(model) is Framed and all(type(p) is nn.Parameter for p in model.parameters())
