"""What the tests name on a command line: factories, their inputs, and passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxshard.ir import Remarks, Schedule
from fxshard.passes import Pass


class Chain(nn.Module):
    """Three equal blocks and a head: forward gives the mean square of (B, 8)."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def chain(width: int = 8) -> nn.Module:
    return Chain(width)


def chain_inputs(batch: int = 4, width: int = 8) -> Tensor:
    return torch.zeros(batch, width)


def wide_inputs() -> tuple[Tensor]:
    return (torch.zeros(2, 16),)


def with_inputs() -> tuple[nn.Module, Any]:
    return Chain(), {"x": torch.zeros(4, 8)}


def without_inputs() -> nn.Module:
    return Chain()


def no_model() -> str:
    return "a string"


def fails() -> nn.Module:
    raise RuntimeError("no such weights\nand a second line")


def on_meta() -> nn.Module:
    """Refuses to be made where it would take memory."""
    model = Chain(1 << 20)  # four linears of 4 TiB
    assert all(p.device.type == "meta" for p in model.parameters())
    return model


def on_meta_inputs() -> Tensor:
    return torch.zeros(1, 1 << 20)


def one_linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(3, 2), torch.zeros(1, 3)


ready = Chain()


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


class Uncapturable(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(branching(x))


def uncapturable() -> nn.Module:
    return Uncapturable()


uncapturable_inputs = chain_inputs


class Owner:
    @staticmethod
    def make() -> nn.Module:
        return Chain()


@dataclass(frozen=True)
class NoOp(Pass):
    """Change nothing."""

    name: ClassVar[str] = "no-op"
    requires: ClassVar[tuple[str, ...]] = ("gathers-inserted",)

    times: int = 1

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        pass


@dataclass(frozen=True)
class EarlyFrees(Pass):
    """Free each gathered buffer of forward as soon as it is there, which is too early."""

    name: ClassVar[str] = "early-frees"

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        for free in schedule.forward.frees:
            free.args[0].append(free)
