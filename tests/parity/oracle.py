"""What sharded training is held to: one eager process that runs the W ranks' batches one after another.

Every rank has a state of the random generator and buffers of its own; the gradients are averaged; the optimizer steps once.
A gradient is None where it is None on every rank, and a rank without it counts as zeros. Micro-batches add up.

In mixed precision the process makes the casts fxshard makes: fp32 masters, a 16-bit copy of each parameter to compute with,
gradients cast to fp32, divided by W and summed in rank order, within each group of F ranks first and then over the groups;
what `no_sync` keeps is added where fxshard adds it. Only the clip norm, a sum of squares of pieces there, is another sum here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.parity.models import SUBJECTS

MODEL_SEED = 3
DRAW_SEED = 40
"""Rank r draws from `DRAW_SEED + r`."""
KEEPS = {"u": "unsharded", "s": "sharded"}
PATTERNS = ("uur", "ssr", "usr", "sur", "rur")
"""See `Case.pattern`."""


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
    micro: int = 1
    """Micro-batches a step: 1, or 3 of which the first two are kept by `no_sync` or reduced, by turns as `PATTERNS` says."""
    clip: float | None = None
    """Gradients are clipped to this norm before each step."""
    reshard: bool = True
    """`reshard_after_forward`."""

    def pattern(self, step: int) -> str:
        """What each micro-batch's backward does with its gradients: a key of `KEEPS`, or r, which reduces them."""
        return PATTERNS[step % len(PATTERNS)] if self.micro == 3 else "r"

    def __str__(self) -> str:
        kind = self.mixed or self.dtype
        end = "" if self.ragged else "-even"
        end += ("-accumulate" if self.micro > 1 else "") + ("" if self.reshard else "-gathered")
        return f"{self.subject}-W{self.W}-F{self.F}-{self.optimizer}-{str(kind).removeprefix('torch.')}{end}"


def worlds(sizes: tuple[int, ...] = (1, 2, 3, 4)) -> list[tuple[int, int]]:
    """(W, F) for every F that divides W."""
    return [(W, F) for W in sizes for F in range(1, W + 1) if W % F == 0]


@dataclass
class Record:
    """What one step left: losses (micro,), buffers and generator states by rank, the rest by parameter name."""

    losses: dict[int, Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor | None]
    """The optimizer's state, "name/key"."""
    buffers: dict[int, dict[str, Tensor]]
    random: dict[int, Tensor]
    norm: Tensor | None = None
    """Of all gradients before they were clipped; `gradients` are those after."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The model's state dict, whole, in its order, after the last step; buffers in it are rank 0's."""


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
    norm: Tensor | None = None,
    state: dict[str, Tensor] | None = None,
) -> Record:
    """After the optimizer's step. `whole(tensor)` is a plain copy of a parameter or a moment."""
    named = dict(model.named_parameters())
    moments = {
        f"{name}/{key}": None if value is None else whole(value)
        for name, p in named.items()
        for key, value in sorted(optimizer.state[p].items())
    }
    parameters = {name: whole(p) for name, p in named.items()}
    return Record(losses, gradients, parameters, moments, buffers, random, norm, state or {})


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


def train(case: Case, norms: Sequence[Tensor] | None = None) -> list[Record]:
    """The records of all steps, all ranks in each. Depends on F in mixed precision alone, by the order of the sum.

    norms: what to clip by in place of the norms found here, of which the records tell.
    """
    case = replace(case, reshard=True)
    return _train(case if case.mixed else replace(case, F=1), None if norms is None else tuple(norms))


@lru_cache(maxsize=4)
def _train(case: Case, norms: tuple[Tensor, ...] | None) -> list[Record]:
    model = build(case)
    optimizer = make_optimizer(case, model)
    ranks = [EagerRank(model, r) for r in range(case.W)]
    records = []
    for step in range(case.steps):
        losses: dict[int, list[Tensor]] = {r: [] for r in range(case.W)}
        found = []
        for micro in range(case.micro):
            gradients = []
            for r, rank in enumerate(ranks):
                with rank:
                    loss, own = one_batch(case, model, step * case.micro + micro, r)
                    losses[r].append(loss)
                    gradients.append(own)
            found.append(gradients)
        for name, p in model.named_parameters():
            p.grad = combined(case, step, [[own[name] for own in gradients] for gradients in found])
        norm = clip(case, model, None if norms is None else norms[step])
        kept = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        buffers = {r: rank.buffers for r, rank in enumerate(ranks)}
        random = {r: rank.random for r, rank in enumerate(ranks)}
        with ranks[0]:
            state = {n: copy_of(v) for n, v in model.state_dict().items()} if step == case.steps - 1 else {}
        records.append(record(model, optimizer, kept, stacked(losses), buffers, random, copy_of, norm, state))
    return records


def stacked(losses: dict[int, list[Tensor]]) -> dict[int, Tensor]:
    return {rank: torch.stack(found) for rank, found in losses.items()}


def clip(case: Case, model: nn.Module, by: Tensor | None) -> Tensor | None:
    """Clip `.grad` of a plain model, by another norm than its own if given; returns its own."""
    if case.clip is None:
        return None
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, case.clip, norm if by is None else by)
    return norm


def one_batch(case: Case, model: nn.Module, number: int, rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one rank's batch."""
    subject = SUBJECTS[case.subject]
    computed: dict[str, Any] = dict(model.named_parameters())
    if case.mixed:
        norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
        computed = {
            n: p.detach()
            .to(case.mixed if p.is_floating_point() and n.rpartition(".")[0] not in norms else p.dtype)
            .requires_grad_(p.requires_grad)
            for n, p in computed.items()
        }
    for p in computed.values():
        p.grad = None
    inputs = subject.batch(number, rank, case.mixed or case.dtype, case.ragged)
    with in_own_dtype(norms.values() if case.mixed else ()):
        output = torch.func.functional_call(model, computed, (), inputs) if case.mixed else model(**inputs)
    loss = subject.loss(output, number, rank)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in computed.items()}


@contextlib.contextmanager
def in_own_dtype(norms: Iterable[nn.Module]) -> Iterator[None]:
    """BatchNorms compute in the dtype of their statistics, and their outputs are again of their inputs' dtype."""
    norms = list(norms)
    for norm in norms:
        forward = norm.forward
        norm.forward = lambda x, forward=forward, norm=norm: forward(x.to(norm.running_mean.dtype)).to(x.dtype)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def combined(case: Case, step: int, gradients: list[list[Tensor | None]]) -> Tensor | None:
    """One parameter's gradients, by micro-batch and rank -> the sum of the micro-batches' means, in its dtype."""
    present = [g for of_ranks in gradients for g in of_ranks if g is not None]
    if not present:
        return None
    if case.mixed is None:
        return torch.stack(present).sum(0) / case.W
    scale = 1.0 / case.W  # fp32 may round a division and a product by the reciprocal apart
    zeros = torch.zeros_like(present[0], dtype=case.dtype)
    kept, kept_sums, total = [zeros] * case.W, [zeros] * (case.W // case.F), zeros
    for how, of_ranks in zip(case.pattern(step), gradients, strict=True):
        parts = [k if g is None else k + g.to(case.dtype) * scale for k, g in zip(kept, of_ranks)]
        if how == "u" or (how == "s" and case.F == 1):
            kept = parts
            continue
        kept = [zeros] * case.W
        sums = [_in_order(parts[i : i + case.F]) + k for i, k in zip(range(0, case.W, case.F), kept_sums)]
        if how == "s" and case.F < case.W:
            kept_sums = sums
            continue
        kept_sums = [zeros] * len(sums)
        total = total + _in_order(sums)
    return total


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
