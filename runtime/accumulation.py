"""Gradients of one FlatParameter that stay behind until a later backward reduces them, see `passes/defer_reduces.py`.

They are kept per rank whose batch runs (one, except in a virtual world of several contributors): the whole gradients
(padded,) of each, or the sums of the shard group (held * S,), one for each replica this process stands for; divided, in the
accumulation dtype. Each parameter has a `KeptGradient` in `.grad` meanwhile: when it is gone or was set to zero, what was
kept of that parameter is dropped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard.ir import Accumulation
from fxshard.kept import KeptGradient

if TYPE_CHECKING:
    from fxshard.runtime.storage import FlatStorage

NOTHING_KEPT = Accumulation()

Flatten = Callable[[Sequence[Tensor | None], Tensor, bool], None]
"""Puts gradients, divided, into a flat buffer, or adds them to it."""


class KeptGradients:
    """`whole` by contributor and `shards` by replica; `live` holds those of a model that keep anything."""

    def __init__(self, storage: FlatStorage):
        self.storage = storage
        self.live: dict[str, KeptGradients] = {}
        self.whole: dict[int, Tensor] = {}
        self.shards: list[Tensor] = []
        self.flags: dict[int, list[bool]] = {}
        """By contributor, of which parameters it brought a gradient."""
        self.standing: dict[int, KeptGradient] = {}
        """What stands in `.grad`, by position of the parameter."""
        _watch_optimizers()

    def keep_whole(self, gradients: Sequence[Tensor | None], flatten: Flatten) -> None:
        """Add this contributor's gradients to what is kept of its own."""
        flat, world = self.storage.flat, self.storage.world
        self.note([g is not None for g in gradients])
        total = self.whole.get(world.contributor)
        accumulate = total is not None
        if total is None:
            total = torch.empty(flat.padded_numel, dtype=flat.accumulate_dtype, device=world.device)
            self.whole[world.contributor] = total
        flatten(gradients, total, accumulate)

    def take_whole(self) -> Tensor:
        """This contributor's gradients (padded,); they are not kept any more."""
        return self.whole.pop(self.storage.world.contributor)

    def keep_shards(self, values: Sequence[Tensor]) -> None:
        """Add what a ReduceScatter summed, a tensor for each replica."""
        if not self.shards:
            self.shards = [value.to(self.storage.flat.accumulate_dtype, copy=True) for value in values]
        else:
            for total, value in zip(self.shards, values, strict=True):
                total.add_(value)

    def note(self, present: Sequence[bool]) -> None:
        """Remember that this contributor brought these gradients, and put what stands for them into `.grad`: of every
        parameter, for another rank may have brought what this one did not."""
        leaves = list(self.storage.parameters.values())
        for leaf in leaves:
            if leaf.grad is not None:
                self.storage.sharded_gradient(leaf)
        self.live[self.storage.flat.name] = self
        _STANDING.add(self)
        flags = self.flags.setdefault(self.storage.world.contributor, [False] * len(present))
        for i, (leaf, here) in enumerate(zip(leaves, present)):
            flags[i] |= here
            if i not in self.standing:
                leaf.grad = self.standing[i] = KeptGradient.of(leaf, leaf.grad)  # type: ignore[arg-type]

    def present(self, index: int) -> bool:
        """Whether this contributor brought a gradient of the parameter at `index`."""
        flags = self.flags.get(self.storage.world.contributor)
        return flags is not None and flags[index]

    def settle(self) -> None:
        """Drop what was kept of parameters whose `.grad` was set to None, to zero or to another tensor since."""
        leaves = list(self.storage.parameters.values())
        for i, standing in list(self.standing.items()):
            if leaves[i].grad is standing and not standing.dropped:
                continue
            del self.standing[i]
            flat = self.storage.flat
            for total in self.whole.values():
                total[flat.offsets[i] : flat.offsets[i] + flat.parameters[i].numel].zero_()
            for total in self.shards:
                self.storage.views(total)[i].zero_()
            for flags in self.flags.values():
                flags[i] = False
        if not self.standing:
            self.clear()

    def clear(self) -> None:
        """Give back what was in `.grad` before; nothing is kept any more."""
        for i, leaf in enumerate(self.storage.parameters.values()):
            if i in self.standing and leaf.grad is self.standing[i]:
                leaf.grad = self.standing[i].base
        self.whole.clear()
        self.shards.clear()
        self.flags.clear()
        self.standing.clear()
        self.live.pop(self.storage.flat.name, None)
        _STANDING.discard(self)


_STANDING: weakref.WeakSet[KeptGradients] = weakref.WeakSet()
"""All that keep anything."""


@functools.cache
def _watch_optimizers() -> None:
    """Refuse a step with gradients that are not complete before it changes anything: weight decay comes first in many."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    closure = next(filter(callable, (*args[1:], kwargs.get("closure"))), None)
    if closure is None:
        _refuse_kept(optimizer)
        return None

    @functools.wraps(closure)
    def checked() -> Any:
        loss = closure()  # which may hold the last backward
        _refuse_kept(optimizer)
        return loss

    args, kwargs = tuple(checked if a is closure else a for a in args), dict(kwargs)
    return args, (kwargs | {"closure": checked} if "closure" in kwargs else kwargs)


def _refuse_kept(optimizer: torch.optim.Optimizer) -> None:
    if not _STANDING:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p.grad, KeptGradient) and not p.grad.dropped:
                p.grad.refuse("an optimizer's step")
