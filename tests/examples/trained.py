"""What the tests of example passes share: small models of several kinds, and a training run in a virtual world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from examples.models import GPT, EncoderDecoder, GPTConfig
from fxshard.ir import Phase, Schedule, ops
from fxshard.ir.nodes import info

CONFIG = GPTConfig(layers=4, width=16, heads=2, vocabulary=32, length=8, dropout=0.1)


def gpt() -> nn.Module:
    return GPT(CONFIG)


def encoder_decoder() -> nn.Module:
    return EncoderDecoder(layers=2, width=16, heads=2, vocabulary=32, length=8)


@dataclass(frozen=True)
class Case:
    """A model, the world it trains in, and options for compile and trace."""

    build: Callable[[], nn.Module] = gpt
    W: int = 4
    F: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, step: int = 0, rank: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        names = ("tokens", "targets") if self.build is gpt else ("source", "tokens", "targets")
        return {name: torch.randint(32, (2, 8), generator=generator) for name in names}

    def trace(self, passes: Any = None, **options: Any) -> Schedule:
        torch.manual_seed(0)
        model = self.build()
        return fxshard.trace(model, self.inputs(), self.F, self.W, passes=passes, **{**self.options, **options})


CASES = {
    "gpt": Case(),
    "encoder-decoder": Case(encoder_decoder),
    "hybrid": Case(F=2),
    "mixed precision": Case(
        options={"mixed_precision": fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)}
    ),
}

EACH = [pytest.param(c, marks=() if c in ("hybrid", "mixed precision") else pytest.mark.full) for c in CASES]
"""The names of the cases for `parametrize`: two in every run, the others in the full one."""

DEEP: dict[str, Any] = {"forward_prefetch": 3, "backward_prefetch": 3, "rate_limit": None}


def train(case: Case, passes: Any = None, steps: int = 4, **options: Any) -> tuple[list[Tensor], Any]:
    """Some AdamW steps of W ranks' batches in a virtual world: losses, then gradients and parameters, whole; the model."""
    torch.manual_seed(0)
    world = fxshard.VirtualWorld(case.F, contributors=case.W)
    model = fxshard.compile(case.build(), world=world, passes=passes, **{**case.options, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    seen: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(case.W):
            torch.manual_seed(100 * step + rank)
            with world.rank(rank):
                loss = model(**case.inputs(step, rank))
                loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
    return seen + [p.full_tensor().detach().clone() for p in model.parameters()], model


@functools.cache
def traced(name: str, passes: Any = None, deep: bool = False) -> Schedule:
    """The schedule of a case, made once; prefetched three units ahead without a rate limit if `deep`. Not to be changed."""
    return CASES[name].trace(passes, **(DEEP if deep else {}))


def story(phase: Phase, *labels: str) -> str:
    """The operations with these labels in issue order, each with the last part of its unit's name: `AG:0 WAIT:0 FREE:0`."""
    found = [(ops.LABELS.get(info(node).kind), info(node).flat or "") for node in phase.graph.nodes]
    return " ".join(f"{label}:{flat.split('.')[-1]}" for label, flat in found if label in labels)


def gathered_bytes(schedule: Schedule, phase: str = "backward") -> int:
    """Bytes of the buffers that a phase gathers."""
    return sum(schedule.flats[str(n.args[1])].full_bytes for n in getattr(schedule, phase).all_gathers)


class Ladder(nn.Module):
    """Linear layers of the given numbers of rows, each a unit."""

    def __init__(self, rows: list[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, n) for n in rows)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sum(-1, keepdim=True).tanh()
        return x


def ladder(rows: list[int], passes: Any = None, F: int = 2, **options: Any) -> Schedule:
    x = torch.zeros(2, 4, requires_grad=True)  # so that backward reads every layer
    return fxshard.trace(Ladder(rows), x, F=F, passes=passes, units=nn.Linear, **options)
