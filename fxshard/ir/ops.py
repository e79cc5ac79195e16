"""The node kinds of a schedule: plain functions, each with the meaning it has in a world of one rank.

Executing a node means calling the runtime's implementation; these bodies say what that equals, dtypes aside, for one
rank that holds everything (F = 1; a cast or load is on `compute` then) and brings the only batch. `flat` is always the name
of a FlatParameter; its layout and dtypes are in `Schedule.flats`. A *bucket* is an `all_gather` of several FlatParameters at
once: it takes a tuple of shards and one of names, and each member has a `wait`, views and a `free` of its own.

| kind | queue | meaning |
|---|---|---|
| cast_shard | unshard | one cast per FlatParameter to its parameter dtype |
| load_shard | unshard | the same of a shard in host memory: copied to the device, cast if need be |
| all_gather | unshard | issue; a pending full buffer (padded numel,), or one for each member of a bucket |
| wait | compute, replicate | the queue waits for a pending result and returns it |
| param_view | - | zero-copy view of one parameter: offset, shape, stride |
| free | compute | after the last use: the slot may be reused once this point is reached |
| flatten_grads | compute | gradients to the flat buffer (padded numel,), cast, divided by `divisor`, with what was `kept` |
| reduce_scatter | reduce | issue; sum within the shard group, this rank's (S,) |
| all_reduce | replicate | issue; sum across the replicate group, with what was `kept` |
| store_grad | reduce, replicate | issue; the reduced shard in host memory, on the queue of the collective before it |
| accumulate_grad | compute | the reduced shard becomes, or is added to, `.grad` |
| keep_grads | compute | gradients, divided, are added to what is kept unsharded until a later backward reduces it |
| keep_shard | compute | the sum of the shard group is added to what is kept until a later backward's AllReduce |
| presence | replicate | which gradients exist on any rank; where outputs reach different parameters, or kept ones are taken |
| throttle | unshard | the next issue may not happen before that free is reached |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def cast_shard(shard: Tensor, flat: str, dtype: torch.dtype) -> Tensor:
    return shard.to(dtype)


def load_shard(shard: Tensor, flat: str, dtype: torch.dtype) -> Tensor:
    return shard.to(dtype, copy=True)


def all_gather(shard: Tensor | tuple[Tensor, ...], flat: str | tuple[str, ...]) -> Tensor | dict[str, Tensor]:
    if isinstance(shard, Tensor):
        return shard.clone()
    return {name: member.clone() for name, member in zip(flat, shard, strict=True)}


def wait(pending: Any, flat: str) -> Any:
    return pending[flat] if isinstance(pending, dict) else pending


def param_view(full: Tensor, fqn: str, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return full.as_strided(shape, stride, full.storage_offset() + offset)


def free(full: Tensor, flat: str) -> None:
    return None


def flatten_grads(
    grads: Sequence[Tensor | None],
    flat: str,
    offsets: Sequence[int],
    padded_numel: int,
    divisor: float,
    kept: bool = False,
) -> Tensor:
    example = next(g for g in grads if g is not None)
    out = example.new_zeros(padded_numel)
    for grad, offset in zip(grads, offsets):
        if grad is not None:
            out[offset : offset + grad.numel()] = grad.reshape(-1) / divisor
    return out


def reduce_scatter(buffer: Tensor, flat: str) -> Tensor:
    return buffer


def all_reduce(shard: Tensor, flat: str, kept: bool = False) -> Tensor:
    return shard


def store_grad(shard: Tensor, flat: str) -> Tensor:
    return shard.clone()


def accumulate_grad(shard: Tensor, flat: str, present: Any = None, start: int = 0) -> None:
    return None


def keep_grads(
    grads: Sequence[Tensor | None], flat: str, offsets: Sequence[int], padded_numel: int, divisor: float
) -> None:
    return None


def keep_shard(shard: Tensor, flat: str) -> None:
    return None


def presence(flags: Sequence[bool]) -> Any:
    return tuple(flags)


def throttle(freed: Any, flat: str | tuple[str, ...]) -> None:
    return None


KINDS: dict[Callable[..., Any], str] = {
    f: f.__name__
    for f in (
        cast_shard,
        load_shard,
        all_gather,
        wait,
        param_view,
        free,
        flatten_grads,
        reduce_scatter,
        all_reduce,
        store_grad,
        accumulate_grad,
        keep_grads,
        keep_shard,
        presence,
        throttle,
    )
}
"""Function to kind name."""

MODEL_KINDS = ("argument", "tangent", "parameter", "compute")
"""Kinds of the captured model: what a phase is called with (`tangent`: the gradient of an output), and operators."""

NODE_KINDS = (*sorted(KINDS.values()), "shard", "resident", *MODEL_KINDS)
"""Every kind a node may have; `shard` and `resident` are placeholders for memory the runtime holds."""

UNSHARDS_LOCALLY = ("cast_shard", "load_shard")
"""What a shard goes through before its gather; with F = 1, which has none, it is the whole unshard."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

GROUPS = {
    "all_gather": "shard group",
    "reduce_scatter": "shard group",
    "all_reduce": "replicate group",
    "presence": "all ranks",
}
"""Who takes part in each collective. A group's collectives run in the order of issue, which is the same on its ranks."""

QUEUES = {
    "cast_shard": "unshard",
    "load_shard": "unshard",
    "all_gather": "unshard",
    "throttle": "unshard",
    "reduce_scatter": "reduce",
    "all_reduce": "replicate",
    "presence": "replicate",
}
"""Queue of each kind; everything else is on the compute queue, a `wait` and a `store_grad` on the queue its info names."""

QUEUE_ORDER = ("unshard", "compute", "reduce", "replicate")
"""Columns of text from left to right and lanes of pictures from top to bottom: what feeds compute before it, what compute
feeds behind it."""

COMMUNICATORS = {QUEUES[kind]: GROUPS[kind] for kind in COLLECTIVES}
"""Group of each queue with collectives of the schedule: two queues of one group share its communicator."""

LABELS = {
    "cast_shard": "CAST",
    "load_shard": "LOAD",
    "all_gather": "AG",
    "wait": "WAIT",
    "free": "FREE",
    "flatten_grads": "FLAT",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "store_grad": "STORE",
    "accumulate_grad": "ACC",
    "keep_grads": "KEEP",
    "keep_shard": "KEEP",
    "presence": "ANY",
    "throttle": "LIMIT",
}
"""How each kind is written in schedule text."""
