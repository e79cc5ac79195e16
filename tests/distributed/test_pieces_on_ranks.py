"""Pieces of parameters on real ranks, where some ranks hold nothing of a parameter and others a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from tests.distributed.harness import Ranks


def two_layers(F: int) -> Any:
    """F = 4: a weight or a bias for each rank."""
    torch.manual_seed(0)
    return fxshard.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), F, units="none")


def other_memory(p: Any) -> None:
    p.data = p.data * 0.5


def refusals() -> list[str]:
    """What each of these raises, and whether the parameters are what they were; no rank may go on alone."""
    model, told = two_layers(4), []
    before = [p.full_tensor() for p in model.parameters()]
    attempts = (
        lambda: model[1].weight.copy_(model[0].weight),
        lambda: torch._foreach_add_([model[0].weight], [model[1].weight]),
        lambda: other_memory(model[0].weight),
        lambda: other_memory(model[1].bias),
    )
    for attempt in attempts:
        with pytest.raises((RuntimeError, TypeError)) as refused, torch.no_grad():
            attempt()
        told.append(str(refused.value).partition(" (by")[0])
    model[0].weight.data = model[0].weight.data
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))
    return told


def test_what_is_refused_is_refused_on_every_rank(ranks: Ranks) -> None:
    told = ranks.run(4, refusals)
    assert all(each == told[0] for each in told)
    assert ["another part" in text for text in told[0]] == [True, True, False, False]


def alike() -> list[bool]:
    """Parameters of one size that are cut at the same elements go together, on ranks that hold nothing of them too."""
    first, second = two_layers(4), two_layers(4)
    with torch.no_grad():
        for a, b in zip(first.parameters(), second.parameters()):
            a.mul_(0.5).add_(b)
    return [
        torch.equal(a.full_tensor(), 1.5 * b.full_tensor()) for a, b in zip(first.parameters(), second.parameters())
    ]


def test_parameters_that_are_cut_alike_go_together(ranks: Ranks) -> None:
    assert ranks.run(4, alike) == [[True] * 4] * 4


# -- optimizers of whole matrices


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def muon_steps(F: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and momentum after four steps, whole; the optimizer's state goes through a state dict half way."""
    model = fxshard.compile(net(), F)
    make = fxshard.gathered(torch.optim.Muon)
    optimizer = make(list(model.parameters()), lr=0.05)
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = make(list(model.parameters()), lr=0.05)
            optimizer.load_state_dict(state)
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters: list[Any] = list(model.parameters())
    momentum = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in parameters]
    return [p.full_tensor().detach().clone() for p in parameters], [m.clone() for m in momentum]


@pytest.mark.parametrize(("W", "F"), [(3, 3), (4, 2)])
def test_gathered_muon_steps_as_on_one_process(ranks: Ranks, W: int, F: int) -> None:
    plain = net()
    optimizer = torch.optim.Muon(list(plain.parameters()), lr=0.05)
    for step in range(4):
        for rank in range(W):
            (plain(batch(step, rank)).square().mean() / W).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameters, momentum in ranks.run(W, muon_steps, F):
        for mine, momentum_here, p in zip(parameters, momentum, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, p.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(momentum_here, optimizer.state[p]["momentum_buffer"], rtol=0, atol=1e-12)
