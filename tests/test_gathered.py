"""Optimizers of whole matrices over sharded parameters step as the plain ones do over the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard import checkpoint
from tests.capture.compare import Framed, batches, pair
from tests.test_state_dicts import through_a_file

Make = Callable[..., torch.optim.Optimizer]


class Whitened(torch.optim.Optimizer):
    """After Shampoo: a step is whitened from the left by all gradients so far; a counter, and state of two shapes."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    rows = p.shape[0] if p.dim() else 1
                    state.update(step=torch.tensor(0.0), left=torch.eye(rows), last=torch.zeros_like(p))
                g = p.grad.reshape(state["left"].shape[0], -1)
                state["left"] += g @ g.T
                state["step"] += 1
                state["last"].mul_(0.5).add_(torch.linalg.solve(state["left"], g).reshape(p.shape))
                p.sub_(state["last"], alpha=group["lr"] / float(state["step"]))


def muon(parameters: list[Any], through: Callable[[Any], Any]) -> torch.optim.Optimizer:
    return through(torch.optim.Muon)([p for p in parameters if p.dim() == 2], lr=0.05)


def adafactor(parameters: list[Any], through: Callable[[Any], Any]) -> torch.optim.Optimizer:
    return through(torch.optim.Adafactor)(parameters, lr=0.05)


def whitened(parameters: list[Any], through: Callable[[Any], Any]) -> torch.optim.Optimizer:
    half = len(parameters) // 2
    return through(Whitened)([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02}])


def both(make: Make, F: int, **options: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models = list(pair(Framed, F, **options))
    kinds = (lambda kind: kind, fxshard.gathered)
    return models, [make(list(m.parameters()), kind) for m, kind in zip(models, kinds)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor]) -> None:
    for x in xs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def apart(plain: nn.Module, sharded: nn.Module) -> float:
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return max((p - q.full_tensor()).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("make", [muon, adafactor, whitened])
@pytest.mark.parametrize("F", [1, 3])
def test_steps_are_those_of_the_plain_model(make: Make, F: int) -> None:
    models, optimizers = both(make, F)
    start = Framed()
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, batches(4))
    assert apart(*models) < 1e-6
    assert max((p - q).abs().max().item() for p, q in zip(models[0].parameters(), start.parameters())) > 1e-2
    assert type(optimizers[1]).__name__ == type(optimizers[0]).__name__ and isinstance(
        optimizers[1], type(optimizers[0])
    )


def test_state_of_a_parameters_shape_stays_sharded() -> None:
    models, (plain, optimizer) = both(whitened, 3)
    for model, o in zip(models, (plain, optimizer)):
        train(model, o, batches(2))
    for p in models[1].parameters():
        state = optimizer.state[p]
        square = state["left"].shape == p.shape  # as good as a value of the parameter's
        assert isinstance(state["last"], fxshard.ShardedParameter)
        assert isinstance(state["left"], fxshard.ShardedParameter) == square
    assert not all(optimizer.state[p]["left"].shape == p.shape for p in models[1].parameters())
    assert len(optimizer.state) == len(plain.state)
    assert [g["steps"] for g in optimizer.param_groups] == [g["steps"] for g in plain.param_groups]


@pytest.mark.parametrize("make", [muon, adafactor, whitened])
def test_saved_and_resumed(make: Make, tmp_path: Any) -> None:
    """By its own state dict into the plain one, and by a checkpoint into another F."""
    models, optimizers = both(make, 3)
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, batches(2))
    again = Framed()
    again.load_state_dict(through_a_file(models[1].state_dict()))
    resumed = make(list(again.parameters()), lambda kind: kind)
    resumed.load_state_dict(through_a_file(optimizers[1].state_dict()))
    checkpoint.save(tmp_path, models[1], optimizers[1], step=2)
    other = fxshard.compile(Framed(), F=2)
    loaded = make(list(other.parameters()), fxshard.gathered)
    checkpoint.load(tmp_path, other, loaded)
    for model, optimizer in ((models[0], optimizers[0]), (again, resumed), (other, loaded)):
        train(model, optimizer, batches(4)[2:])
    assert apart(models[0], other) < 1e-6
    assert max((p - q).abs().max().item() for p, q in zip(models[0].parameters(), again.parameters())) < 1e-6


def test_hooks_run_once_and_schedules_of_the_learning_rate_count() -> None:
    model = fxshard.compile(Framed(), F=2)
    optimizer = muon(list(model.parameters()), fxshard.gathered)
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, batches(1))
    schedule.step()
    assert told == ["before", "after"] and optimizer.param_groups[0]["lr"] == 0.025


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    models, optimizers = both(whitened, 2)
    losses = []
    for model, optimizer in zip(models, optimizers):

        def closure(model: nn.Module = model) -> Tensor:
            loss = model(batches(1)[0]).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure) if model is models[1] else closure())
    optimizers[0].step()
    assert torch.equal(losses[0], losses[1]) and apart(*models) < 1e-6


def test_gradients_that_no_sync_kept_are_refused_and_plain_parameters_go_along() -> None:
    model, extra = fxshard.compile(Framed(), F=2), nn.Linear(2, 2)
    optimizer = whitened([*model.parameters(), *extra.parameters()], fxshard.gathered)
    before = [p.full_tensor() for p in model.parameters()]
    with model.no_sync():
        model(batches(1)[0]).square().mean().backward()
    extra(torch.ones(1, 2)).sum().backward()
    values = [p.detach().clone() for p in extra.parameters()]
    with pytest.raises(RuntimeError, match="is not complete"):
        optimizer.step()
    assert all(torch.equal(p, v) for p, v in zip(extra.parameters(), values, strict=True))
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(p, v) for p, v in zip(extra.parameters(), values, strict=True))


def test_a_step_that_fails_leaves_groups_and_state() -> None:
    model = fxshard.compile(Framed(), F=2)
    optimizer = whitened(list(model.parameters()), fxshard.gathered)
    groups = [list(g["params"]) for g in optimizer.param_groups]
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    state = {p: dict(values) for p, values in optimizer.state.items()}
    assert state
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.state.keys() == state.keys()
    assert all(values.keys() == state[p].keys() for p, values in optimizer.state.items())
    assert [[p is q for p, q in zip(g["params"], old)] for g, old in zip(optimizer.param_groups, groups)] == [
        [True] * len(old) for old in groups
    ]


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    for wrong in (torch.optim.SGD([torch.zeros(1)]), nn.Linear, "Muon"):
        with pytest.raises(TypeError, match="a class of optimizers was expected"):
            fxshard.gathered(wrong)  # type: ignore[type-var]
