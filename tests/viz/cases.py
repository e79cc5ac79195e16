"""Schedules to draw; each is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fxshard
from fxshard.ir import Remarks, Schedule
from fxshard.passes import Pass

WIDTH = 64


@dataclass(frozen=True)
class LateAccumulation(Pass):
    """Every ACC at the end of backward, so that it is not next to the WAIT before it."""

    name: ClassVar[str] = "late-accumulation"

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        assert schedule.backward is not None
        for node in schedule.backward.nodes("accumulate_grad"):
            schedule.backward.move_before(node, schedule.backward.output, self.name)


class Chain(nn.Module):
    """`layers` equal ones between an embedding of the input and a head, which both belong to the root."""

    def __init__(self, layers: int):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh().square().tanh()
        return self.last(x).square().mean()


class Deep(Chain):
    """With as few operators as it takes, for many units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).sum()


class Silent(Chain):
    """Without gradients."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Heads(Chain):
    """Two outputs that reach different parameters."""

    def __init__(self, layers: int):
        super().__init__(layers)
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](self.first(x))
        return self.last(x), self.other(x)


class Named(nn.Module):
    """Units with names that XML reserves, or cannot hold."""

    NAMES = (
        'a<b&"c">',
        "tab\tand bell\x07",
        "snow☃man",
        "a_name_too_long_for_any_bar",
        "another_name_that_is_too_long" * 2,
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = self._modules[name](x).tanh()  # type: ignore[misc]
        return x.square().mean()


def chain(F: int, W: int, layers: int = 4, model: type[Chain] = Chain, **options: Any) -> Schedule:
    torch._dynamo.reset()
    return fxshard.trace(model(layers), (torch.randn(16, 8),), F=F, W=W, **options)


BF16 = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)

CASES: dict[str, Callable[[], Schedule]] = {
    "hybrid": lambda: chain(4, 8),
    "full": lambda: chain(4, 4),
    "replicated": lambda: chain(1, 4),
    "replicated-bf16": lambda: chain(1, 4, mixed_precision=BF16),
    "one-rank": lambda: chain(1, 1),
    "one-unit": lambda: chain(2, 2, units="none"),
    "no-prefetch": lambda: chain(4, 4, forward_prefetch=0, backward_prefetch=0),
    "no-limit": lambda: chain(4, 4, rate_limit=None, forward_prefetch=3, backward_prefetch=3),
    "resident": lambda: chain(4, 8, reshard_after_forward=False),
    "late-accumulation": lambda: chain(4, 8, passes=[LateAccumulation()]),
    "presence": lambda: chain(2, 4, model=Heads),
    "forward-only": lambda: chain(4, 8, model=Silent),
    "no-plan": lambda: chain(4, 8, passes=lambda passes: passes[:-1]),
    "gathers-only": lambda: chain(4, 8, passes=lambda passes: passes[:1]),
    "no-passes": lambda: chain(4, 8, passes=lambda passes: []),
    "names": lambda: fxshard.trace(Named(), (torch.randn(4, 8),), F=2, W=4, units=nn.Linear),
    "96-units": lambda: chain(8, 16, layers=96, model=Deep),
    "96-late": lambda: chain(8, 16, layers=96, model=Deep, forward_prefetch=0, backward_prefetch=0),
}


@functools.cache
def traced(name: str) -> Schedule:
    """The schedule of a case; pictures leave it as it is."""
    return CASES[name]()
