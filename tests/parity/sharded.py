"""The same training through fxshard: on real ranks, in a virtual world, and plainly, without sharding."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.capture import torch_private
from tests.parity.models import SUBJECTS
from tests.parity.oracle import (
    DRAW_SEED,
    KEEPS,
    MODEL_SEED,
    Case,
    Record,
    build,
    copy_of,
    make_optimizer,
    record,
    stacked,
)


def whole(tensor: Tensor) -> Tensor:
    """A plain copy; of a sharded tensor a collective."""
    return tensor.full_tensor() if isinstance(tensor, fxshard.ShardedParameter) else copy_of(tensor)


def options(case: Case) -> dict[str, Any]:
    chosen = {"reshard_after_forward": case.reshard, **SUBJECTS[case.subject].options}
    if case.mixed:
        chosen["mixed_precision"] = fxshard.MixedPrecision(param=case.mixed, reduce=case.dtype)
    return chosen


def backward(case: Case, model: Any, step: int, micro: int, rank: int) -> Tensor:
    """The loss of one micro-batch, its gradients kept or reduced."""
    subject, number, how = SUBJECTS[case.subject], step * case.micro + micro, case.pattern(step)[micro]
    with model.no_sync(KEEPS[how]) if how in KEEPS else contextlib.nullcontext():
        loss = subject.loss(model(**subject.batch(number, rank, case.dtype, case.ragged)), number, rank)
        loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def clipped(case: Case, model: Any) -> Tensor | None:
    return None if case.clip is None else model.clip_grad_norm_(case.clip)


def state_of(case: Case, model: nn.Module, step: int) -> dict[str, Tensor]:
    """The whole state dict after the last step. A collective."""
    if step < case.steps - 1:
        return {}
    state = model.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else copy_of(v) for name, v in state.items()}


def _steps(case: Case, model: nn.Module, rank: int) -> list[Record]:
    """Train as one rank."""
    optimizer = make_optimizer(case, model)
    torch.manual_seed(DRAW_SEED + rank)
    records = []
    for step in range(case.steps):
        optimizer.zero_grad()
        losses = stacked({rank: [backward(case, model, step, micro, rank) for micro in range(case.micro)]})
        norm = clipped(case, model)
        gradients, buffers, random = gradients_of(model), {rank: buffers_of(model)}, {rank: torch.get_rng_state()}
        optimizer.step()
        state = state_of(case, model, step)
        records.append(record(model, optimizer, gradients, losses, buffers, random, whole, norm, state))
    return records


def train_rank(case: Case) -> list[Record]:
    """On a real rank. Models start differently on each; rank 0's values count."""
    rank = dist.get_rank()
    model = fxshard.compile(build(case, MODEL_SEED + rank), F=case.F, **options(case))
    return _steps(case, model, rank)


def train_virtual(case: Case, **more: Any) -> list[Record]:
    """In a virtual world of F shards that trains on rank 0's batches."""
    return _steps(case, fxshard.compile(build(case), F=case.F, **options(case), **more), 0)


def train_contributors(case: Case) -> list[Record]:
    """In a virtual world of W contributors: each rank's batch in turn, one optimizer step."""
    world = fxshard.VirtualWorld(case.F, contributors=case.W)
    model = fxshard.compile(build(case), world=world, **options(case))
    optimizer = make_optimizer(case, model)
    random = {r: torch.Generator().manual_seed(DRAW_SEED + r).get_state() for r in range(case.W)}
    records = []
    for step in range(case.steps):
        optimizer.zero_grad()
        losses: dict[int, list[Tensor]] = {r: [] for r in range(case.W)}
        buffers = {}
        for micro, r in itertools.product(range(case.micro), range(case.W)):
            torch.set_rng_state(random[r])
            with world.rank(r):
                losses[r].append(backward(case, model, step, micro, r))
                buffers[r] = buffers_of(model)
            random[r] = torch.get_rng_state()
        norm = clipped(case, model)
        gradients = gradients_of(model)
        optimizer.step()
        state = state_of(case, model, step)
        records.append(record(model, optimizer, gradients, stacked(losses), buffers, dict(random), whole, norm, state))
    return records


def train_eager(case: Case) -> list[Record]:
    """The plain model on rank 0's batches."""
    return _steps(case, build(case), 0)


def train_captured(case: Case) -> list[Record]:
    """The captured graphs run plainly: what fxshard starts from, without passes, schedule or runtime."""
    model = build(case)
    model.compile(backend=_plainly, fullgraph=True)
    return _steps(case, model, 0)


def _plainly(graph_module: fx.GraphModule, examples: list[Any]) -> Any:
    def interpret(module: fx.GraphModule, _: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return module(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return torch_private.aot(graph_module, examples, interpret, interpret, interpret, torch_private.default_partition)
