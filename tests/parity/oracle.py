"""What sharded training is held to: one eager process that runs the W ranks' batches one after another.

Every rank has a state of the random generator and buffers of its own; the gradients are averaged; the optimizer steps once.
A gradient is None where it is None on every rank, and a rank without it counts as zeros.

In mixed precision the process makes the casts fxshard makes: fp32 masters, a 16-bit copy of each parameter to compute with,
gradients cast to fp32, divided by W and summed in rank order, within each group of F ranks first and then over the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.parity.models import SUBJECTS

MODEL_SEED = 3
DRAW_SEED = 40
"""Rank r draws from `DRAW_SEED + r`."""


@dataclass(frozen=True)
class Case:
    """One training run. `mixed`: parameters computed with in this dtype, gradients reduced in fp32."""

    subject: str
    W: int
    F: int
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    mixed: torch.dtype | None = None
    ragged: bool = True
    """Whether every fifth batch is smaller, where the model follows it."""
    steps: int = 10

    def __str__(self) -> str:
        kind = self.mixed or self.dtype
        end = "" if self.ragged else "-even"
        return f"{self.subject}-W{self.W}-F{self.F}-{self.optimizer}-{str(kind).removeprefix('torch.')}{end}"


def worlds(sizes: tuple[int, ...] = (1, 2, 3, 4)) -> list[tuple[int, int]]:
    """(W, F) for every F that divides W."""
    return [(W, F) for W in sizes for F in range(1, W + 1) if W % F == 0]


@dataclass
class Record:
    """What one step left: losses, buffers and generator states by rank, the rest by parameter name."""

    losses: dict[int, Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor | None]
    """The optimizer's state, "name/key"."""
    buffers: dict[int, dict[str, Tensor]]
    random: dict[int, Tensor]


def build(case: Case, seed: int = MODEL_SEED) -> nn.Module:
    """The model, the same for a seed.

    In 16 bits there is no dropout and transformers computes attention itself: captured, dropout is `native_dropout` and the
    fused attention gets a mask and repeated heads where eager code does without; exact in fp32, these round differently.
    """
    torch.manual_seed(seed)
    model = SUBJECTS[case.subject].build(0.0 if case.mixed else 0.1).to(case.dtype).train()
    if case.mixed and isinstance(model, PreTrainedModel):
        model.set_attn_implementation("eager")
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: dict[str, Tensor | None],
    losses: dict[int, Tensor],
    buffers: dict[int, dict[str, Tensor]],
    random: dict[int, Tensor],
    whole: Callable[[Tensor], Tensor],
) -> Record:
    """After the optimizer's step. `whole(tensor)` is a plain copy of a parameter or a moment."""
    named = dict(model.named_parameters())
    moments = {
        f"{name}/{key}": None if value is None else whole(value)
        for name, p in named.items()
        for key, value in sorted(optimizer.state[p].items())
    }
    parameters = {name: whole(p) for name, p in named.items()}
    return Record(losses, gradients, parameters, moments, buffers, random)


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class EagerRank:
    """The random state and the buffers of one rank, lent to a model that all ranks share."""

    def __init__(self, model: nn.Module, rank: int):
        self.model = model
        self.buffers = {name: b.clone() for name, b in model.named_buffers()}
        self.random = torch.Generator().manual_seed(DRAW_SEED + rank).get_state()

    def __enter__(self) -> None:
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                b.copy_(self.buffers[name])
        torch.set_rng_state(self.random)

    def __exit__(self, *exception: object) -> None:
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.random = torch.get_rng_state()


def train(case: Case) -> list[Record]:
    """The records of all steps, all ranks in each. Depends on F in mixed precision alone, by the order of the sum."""
    return _train(case if case.mixed else replace(case, F=1))


@lru_cache(maxsize=4)
def _train(case: Case) -> list[Record]:
    model = build(case)
    optimizer = make_optimizer(case, model)
    ranks = [EagerRank(model, r) for r in range(case.W)]
    records = []
    for step in range(case.steps):
        losses, gradients = {}, []
        for r, rank in enumerate(ranks):
            with rank:
                losses[r], found = one_batch(case, model, step, r)
                gradients.append(found)
        average = {name: mean(case, [g[name] for g in gradients]) for name in gradients[0]}
        for name, p in model.named_parameters():
            p.grad = average[name]
        kept = {name: None if g is None else g.clone() for name, g in average.items()}
        optimizer.step()
        buffers = {r: rank.buffers for r, rank in enumerate(ranks)}
        random = {r: rank.random for r, rank in enumerate(ranks)}
        records.append(record(model, optimizer, kept, losses, buffers, random, copy_of))
    return records


def one_batch(case: Case, model: nn.Module, step: int, rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one rank's batch."""
    subject = SUBJECTS[case.subject]
    computed: dict[str, Any] = dict(model.named_parameters())
    if case.mixed:
        computed = {n: p.detach().to(case.mixed).requires_grad_(p.requires_grad) for n, p in computed.items()}
    for p in computed.values():
        p.grad = None
    inputs = subject.batch(step, rank, case.mixed or case.dtype, case.ragged)
    output = torch.func.functional_call(model, computed, (), inputs) if case.mixed else model(**inputs)
    loss = subject.loss(output, step, rank)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in computed.items()}


def mean(case: Case, gradients: list[Tensor | None]) -> Tensor | None:
    """Of the ranks' gradients, in the parameter's dtype."""
    present = [g for g in gradients if g is not None]
    if not present:
        return None
    if case.mixed is None:
        return torch.stack(present).sum(0) / case.W
    scale = 1.0 / case.W  # fp32 may round a division and a product by the reciprocal apart
    parts = [
        torch.zeros_like(present[0], dtype=case.dtype) if g is None else g.to(case.dtype) * scale for g in gradients
    ]
    groups = [_in_order(parts[i : i + case.F]) for i in range(0, case.W, case.F)]
    return _in_order(groups)


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
