"""What trades memory for time: an activation budget, units that stay gathered, checkpoint wrappers. Values never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.ir.nodes import tensor_bytes
from tests.capture.compare import WIDTH, Chain, Framed, batches, check, events
from tests.parity.models import SUBJECTS

# -- activation_memory_budget


class Dropped(nn.Module):
    """Nothing but what is cheap to compute again, and dropout, which is never drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.dropout((x * self.first).sin(), 0.5).cos() * self.second).exp()


class Mixed(nn.Module):
    """Attention with dropout, BatchNorm, a checkpoint inside, and draws of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)[None, None]
        h = nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=0.5)[0, 0]
        h = nn.functional.gelu(self.norm(self.layers[1](h)))
        h = checkpoint(lambda y: nn.functional.dropout(torch.tanh(self.layers[2](y)), 0.3), h, use_reentrant=False)
        h = h + torch.rand_like(h) * torch.bernoulli(torch.full_like(h, 0.5))
        return self.layers[3](nn.functional.gelu(h))


def kept_bytes(schedule: fxshard.Schedule) -> int:
    """Of what forward keeps for backward, parameters and their pieces aside."""
    assert schedule.backward is not None
    arguments = schedule.backward.graph.find_nodes(op="placeholder")
    return sum(tensor_bytes(node) for node in arguments if node.meta["fxshard"].kind == "argument")


@pytest.mark.parametrize("make", [Dropped, Mixed])
def test_a_budget_keeps_less_and_changes_nothing(make: Callable[[], nn.Module]) -> None:
    kept = []
    for budget in (None, 1.0, 0.3, 0.0):
        model = check(make, units="none", activation_memory_budget=budget)
        kept.append(kept_bytes(model.schedule))
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[0]


def test_a_budget_of_a_transformer() -> None:
    subject = SUBJECTS["gpt"]
    inputs = subject.batch(0, 0, torch.float32, False)
    kept = {}
    for budget in (None, 0.5, 0.0):
        schedule = fxshard.trace(subject.build(0.1), inputs, F=2, activation_memory_budget=budget)
        kept[budget] = kept_bytes(schedule)
        assert schedule.backward is not None
        gathered = [n.meta["fxshard"].flat for n in schedule.backward.all_gathers]
        assert len(gathered) == len(set(gathered))  # computing again gathers nothing again
    assert kept[0.0] < 0.4 * kept[None] < kept[0.5] < 0.8 * kept[None]


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "half", True])
def test_a_budget_is_a_fraction(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"activation_memory_budget=.*a fraction from 0 to 1"):
        fxshard.compile(Framed(), F=2, activation_memory_budget=wrong)


# -- reshard_after_forward, unit by unit


def test_units_stay_gathered_by_name() -> None:
    model = check(lambda: Framed(4), reshard_after_forward={"layers.*": False, "layers.[01]": True})
    schedule = model.schedule
    assert schedule.resident == {"layers.2", "layers.3", "(root).1"}
    assert "keep-resident{reshard=(('layers.*', False), ('layers.[01]', True))}" in str(schedule)
    seen = events(model)
    model(batches(1)[0]).square().mean().backward()
    again = [flat for phase, kind, flat in seen if phase == "backward" and kind == "all_gather"]
    assert again == ["layers.1", "layers.0"]


def test_wrong_choices_of_units_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"reshard_after_forward: no unit is named 'layer.1', 'x'. Units here: \(root\)"
    ):
        fxshard.compile(Framed(), F=2, reshard_after_forward={"layer.1": False, "x": True, "layers.*": True})
    with pytest.raises(TypeError, match=r"reshard_after_forward=.*True, False or"):
        fxshard.compile(Framed(), F=2, reshard_after_forward={"layers.1": 1})


# -- checkpoint wrappers


class Wrapped(Chain):
    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            self.layers[i] = checkpoint_wrapper(layer)


def test_checkpoint_wrappers_keep_names_and_gather_once() -> None:
    model = check(Wrapped)
    plain = [n for n, _ in Chain().named_parameters()]
    assert list(model.state_dict()) == plain
    backward = model.schedule.backward
    gathered = [n.meta["fxshard"].flat for n in backward.all_gathers]
    assert len(gathered) == len(set(gathered)) == 3
    model.load_state_dict({n: torch.zeros_like(p.full_tensor()) for n, p in zip(plain, model.parameters())})
    assert all(not p.full_tensor().any() for p in model.parameters())
