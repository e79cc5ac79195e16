"""State dicts in one process: plain whole tensors, under plain names, in and out."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard import checkpoint
from tests.capture.compare import Framed, adamw, batches, differences, pair


def train(model: nn.Module, optimizer: torch.optim.Optimizer, xs) -> None:
    for x in xs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("F", [1, 3])
def test_saved_and_resumed_here_and_plainly(F: int) -> None:
    """A run that is saved and loaded, into another F and into the plain model, goes on as one that was not."""
    plain, sharded = pair(Framed, F)
    optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
    for model, optimizer in zip((plain, sharded), optimizers):
        train(model, optimizer, batches(3))
    saved = through_a_file((sharded.state_dict(), optimizers[1].state_dict()))
    assert list(saved[0]) == list(plain.state_dict())
    assert all(type(t) is torch.Tensor for t in saved[0].values())
    other = fxshard.compile(Framed(), F=2)
    again = Framed()
    for model in (other, again):
        model.load_state_dict(saved[0])
        optimizer = adamw(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch steps in the tensors it is given
        train(model, optimizer, batches(5)[3:])
        moments = [s["exp_avg"] for s in optimizer.state.values()]
        assert all(isinstance(m, fxshard.ShardedParameter) == (model is other) for m in moments)
    train(plain, optimizers[0], batches(5)[3:])
    assert differences(plain, other) == []
    assert differences(plain, again) == []


def test_a_state_dict_holds_copies() -> None:
    _, sharded = pair(Framed, 2)
    before = sharded.state_dict()
    kept = copy.deepcopy(before)
    train(sharded, adamw(sharded.parameters()), batches(1))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert not torch.equal(sharded.state_dict()["layers.0.linear.weight"], kept["layers.0.linear.weight"])
    sizes = {t.untyped_storage().nbytes() - t.nbytes for t in before.values()}
    assert sizes == {0}
    normed = fxshard.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), F=2, units="none")
    state = normed.state_dict()
    normed(torch.randn(4, 4))
    assert not state["1.running_mean"].any()
    kept = normed.state_dict(keep_vars=True)
    assert kept["1.running_mean"] is normed[1].running_mean


def test_the_optimizers_own_state_stays_sharded() -> None:
    _, sharded = pair(Framed, 2)
    optimizer = adamw(sharded.parameters())
    train(sharded, optimizer, batches(1))
    first = optimizer.state_dict()
    assert all(type(t) is torch.Tensor for s in first["state"].values() for t in s.values())
    assert all(isinstance(s["exp_avg"], fxshard.ShardedParameter) for s in optimizer.state.values())
    assert first["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_model_inside_another() -> None:
    """The names of a compiled part have their prefix, and what is beside it is left alone."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fxshard.compile(Framed(), F=2)
            self.other = nn.Linear(2, 2)

    outer = Outer()
    state = outer.state_dict()
    assert list(state) == [f"inner.{n}" for n in Framed().state_dict()] + ["other.weight", "other.bias"]
    assert all(type(t) is torch.Tensor for t in state.values())
    assert state["other.weight"].data_ptr() == outer.other.weight.data_ptr()
    other = Outer()
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), other.state_dict().values()))


def test_an_optimizer_that_stepped_before_its_model_was_sharded() -> None:
    fxshard.compile(Framed(), F=2)  # from here on fxshard watches
    model = Framed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, batches(1))
    fxshard.compile(model, F=2)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, batches(1))
    assert all(type(s["momentum_buffer"]) is torch.Tensor for s in optimizer.state_dict()["state"].values())
    assert all(isinstance(s["momentum_buffer"], fxshard.ShardedParameter) for s in optimizer.state.values())


def test_an_optimizer_that_is_given_a_sharded_model_later() -> None:
    """It stepped with plain parameters before, after a model was sharded."""
    _, sharded = pair(Framed, 2)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters(), 0.01)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(sharded.parameters())})
    train(sharded, optimizer, batches(1))
    state = optimizer.state_dict()["state"]
    assert [type(s["exp_avg"]) for s in state.values()] == [torch.Tensor] * (2 + len(list(sharded.parameters())))


def test_inside_unsharded_it_is_the_plain_models() -> None:
    _, sharded = pair(Framed, 2)
    with sharded.unsharded():
        state = sharded.state_dict()
        assert all(state[name].data_ptr() == p.data_ptr() for name, p in sharded.named_parameters())


def test_moments_and_counters_of_a_parameter_without_dims() -> None:
    """NAdam's `mu_product` has the shape of the parameter, and is no moment of it."""

    class Scaled(Framed):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(x) * self.scale

    for kind in (torch.optim.NAdam, torch.optim.AdamW):
        plain, sharded = pair(Scaled, 2)
        steppers = [kind(m.parameters(), lr=0.01) for m in (plain, sharded)]
        for model, stepper in zip((plain, sharded), steppers):
            train(model, stepper, batches(2))
        other = fxshard.compile(Scaled(), F=3)
        other.load_state_dict(sharded.state_dict())
        again = kind(other.parameters(), lr=0.01)
        again.load_state_dict(through_a_file(steppers[1].state_dict()))
        for model, stepper in ((plain, steppers[0]), (other, again)):
            train(model, stepper, batches(4)[2:])
        assert differences(plain, other) == []


@pytest.mark.parametrize(
    ("state_of", "load"),
    [(nn.Module.state_dict, nn.Module.load_state_dict), (checkpoint.full_state_dict, checkpoint.load_full_state_dict)],
)
def test_buffers_of_several_contributors(state_of: Callable[..., Any], load: Callable[..., Any]) -> None:
    """A state dict has rank 0's; loading one gives them to all."""
    world = fxshard.VirtualWorld(2, contributors=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    plain[2].running_mean = plain[1].running_mean
    model = fxshard.compile(plain, world=world, units="none")
    means = []
    for r in range(2):
        with world.rank(r):
            model(torch.randn(8, 4) + r).sum().backward()
            means.append(model[1].running_mean.clone())
    state = state_of(model)
    assert torch.equal(state["1.running_mean"], means[0]) and torch.equal(state["2.running_mean"], means[0])
    assert not torch.equal(means[0], means[1])
    load(model, state)
    for r in range(2):
        with world.rank(r):
            assert torch.equal(model[1].running_mean, means[0]) and model[2].running_mean is model[1].running_mean
