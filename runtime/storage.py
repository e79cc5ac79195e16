"""The memory of one FlatParameter on this process: its shard, its pieces as parameters, and its gradients."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.capture.torch_private import same_memory, storage_uses, tensor_uses
from fxshard.ir import FlatParameter
from fxshard.kept import KeptGradient
from fxshard.parameter import Binding, Generation, ShardedParameter
from fxshard.runtime.accumulation import KeptGradients
from fxshard.runtime.world import World


class FlatStorage:
    """`shard` (held * S,) in the master dtype; `parameters` maps fqn to its ShardedParameter, whose `local` is a view
    of it.

    The shard is on the world's device, or in host memory if it is offloaded, and never moves: lowered code holds views of it.
    """

    def __init__(self, flat: FlatParameter, world: World, shard: Tensor, generation: Generation):
        self.flat, self.world, self.shard = flat, world, shard
        self.pieces = world.pieces(flat)
        self.bindings = [self._binding(i, generation) for i in range(len(self.pieces))]
        self.parameters: dict[str, nn.Parameter] = {}
        for spec, view, binding in zip(flat.parameters, self.views(shard), self.bindings):
            wrapped = ShardedParameter(view, spec.shape, spec.stride, spec.fqn, binding)
            self.parameters[spec.fqn] = nn.Parameter(wrapped, requires_grad=spec.requires_grad)
        self.kept = KeptGradients(self)
        self._sums: dict[int, tuple[weakref.ref[ShardedParameter], int, Tensor]] = {}
        """Gradients accumulated in a wider dtype than theirs: of which `.grad`, as it was after how many edits, the sum."""
        self._gradient: Tensor | None = None
        self._wrappers: list[ShardedParameter] = []
        self._uses = 0
        """How many hold the storage of `_gradient` while nobody else does."""
        self.own: Tensor | None = None
        """The memory of `_gradient` where that is now: who is bound to it is not among those who hold `.grad`."""
        self.landed: Tensor | None = None
        """Where the gradient that is being reduced lies (held * S,): `own`, or memory for this once while that is in use."""

    def _binding(self, index: int, generation: Generation) -> Binding:
        # No reference to this storage: `.grad` is held from C++, where the garbage collector does not see a cycle.
        spec, piece, flat, world = self.flat.parameters[index], self.pieces[index], self.flat, self.world

        def gather(local: Tensor) -> Tensor:
            part = local.new_zeros(world.held_numel(flat))
            part[piece.shard_start : piece.shard_start + piece.length] = local
            full = world.gather_flat(flat, part)
            start = flat.offsets[index]
            return full[start : start + spec.numel].clone()

        owner, cut = weakref.ref(self), () if world.held == flat.F else flat.cut(index)
        return Binding(
            spec.fqn, spec.numel, piece.start, piece.length, generation, gather, world.reduce_small, owner, cut
        )

    def views(self, part: Tensor) -> list[Tensor]:
        """The pieces of a part (held * S,), each (length,)."""
        return [part[p.shard_start : p.shard_start + p.length] for p in self.pieces]

    def wholes(self, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From this rank's pieces (length,) of values of the parameters' shapes, of one dtype, the whole ones on the device of
        compute; None where a piece is None. A collective of the shard group."""
        part = next(piece for piece in pieces if piece is not None).new_zeros(self.world.held_numel(self.flat))
        for place, piece in zip(self.views(part), pieces, strict=True):
            if piece is not None:
                place.copy_(piece)
        wholes = self.flat.wholes(self.world.gather_flat(self.flat, part))
        return [None if piece is None else whole for piece, whole in zip(pieces, wholes)]

    def redistributed(self, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What `wholes` gives, as a state dict holds it, see `World.to_state`."""
        found = zip(pieces, self.wholes(pieces))
        return [None if p is None or w is None else self.world.to_state(w).to(p.device) for p, w in found]

    @torch.no_grad()
    def set_piece(self, index: int, piece: Tensor) -> None:
        """Give a parameter other values: its piece (length,), which is cast. It counts as a change of the parameters."""
        parameter: Any = self.parameters[self.flat.fqns[index]]
        parameter.copy_(parameter.like(piece))

    def land(self) -> Tensor:
        """Choose where this backward's gradient is reduced to: the memory of `.grad` unless that is in use."""
        if all(p.grad is None for p in self.parameters.values()):
            self._fresh_wrappers()
            self.landed = self.own
        else:
            with torch.inference_mode(False):
                self.landed = torch.empty_like(self.shard)
        assert self.landed is not None
        return self.landed

    def bind_accumulate(self, reduced: Tensor | None) -> Callable[[Sequence[bool] | None], None]:
        """Bind handing `reduced` (held * S,), or with None what has landed, to `.grad`; the flags say which parameters have a
        gradient anywhere.

        Accumulation is in `flat.accumulate_dtype`. Kept wrappers are reused when nobody else holds them: making one for each
        parameter each step costs about 30 us.
        """
        bound = None if reduced is None else self.views(reduced)
        leaves = list(self.parameters.values())
        everything = [True] * len(leaves)

        def accumulate(flags: Sequence[bool] | None) -> None:
            wanted = everything if flags is None else flags
            fresh = [p.grad is None for p in leaves]
            value, self.landed = self.landed if reduced is None else reduced, None
            assert value is not None
            in_place = value is self.own
            new = self._wrappers
            if not in_place and any(f and w for f, w in zip(fresh, wanted)):
                new = self._fresh_wrappers()
            if all(fresh) and all(wanted):
                self._sums.clear()
                if not in_place:
                    assert self.own is not None
                    self.own.copy_(value)
                for leaf, wrapper in zip(leaves, new):
                    leaf.grad = wrapper
            else:
                views = self.views(value) if bound is None else bound
                for i, leaf in enumerate(leaves):
                    if not wanted[i]:
                        if isinstance(leaf.grad, KeptGradient) and leaf.grad.absent_at == leaf.grad.edits[0]:
                            leaf.grad = None
                        continue
                    if fresh[i]:
                        self._sums.pop(i, None)
                        if not in_place:
                            new[i].local.copy_(views[i])
                        leaf.grad = new[i]
                    else:
                        self._add(i, leaf, views[i])
            for i, leaf in enumerate(leaves):
                if wanted[i] and self.bindings[i].hooks:
                    for hook in tuple(self.bindings[i].hooks.values()):
                        hook(leaf)

        return accumulate

    def _add(self, index: int, leaf: nn.Parameter, reduced: Tensor) -> None:
        """Add to `.grad`. Where it is narrower than the accumulation dtype the sum so far is kept beside it, from the second
        backward on, so that small terms are not lost one by one; it is void once `.grad` was changed by anyone else."""
        gradient = self.sharded_gradient(leaf)
        if isinstance(gradient, KeptGradient):
            gradient.absent_at = None
        if self.flat.accumulate_dtype.itemsize <= gradient.dtype.itemsize:
            gradient.local.add_(reduced)
            return
        known = self._sums.get(index)
        if known is not None and known[0]() is gradient and known[1] == gradient.edits[0]:
            total = known[2]
        else:
            total = gradient.local.to(self.flat.accumulate_dtype)
            self._sums[index] = (weakref.ref(gradient), gradient.edits[0], total)
        gradient.local.copy_(total.add_(reduced))

    def sharded_gradient(self, leaf: nn.Parameter) -> ShardedParameter:
        """`.grad` of a parameter. Raises TypeError where it is no sharded one."""
        gradient = leaf.grad
        if not isinstance(gradient, ShardedParameter):
            raise TypeError(
                f"parameter '{leaf.fqn}' has a plain tensor as .grad; "  # type: ignore[attr-defined]
                "a sharded gradient cannot be added to it. Set it to None before backward"
            )
        return gradient

    def _fresh_wrappers(self) -> list[ShardedParameter]:
        """Gradient wrappers over one flat buffer that nobody else holds."""
        if self._gradient is None or not self._kept_are_free():
            with torch.inference_mode(False):
                self._gradient = torch.empty_like(self.shard)
                self.own = same_memory(self._gradient)
            self._wrappers = [
                ShardedParameter(view, spec.shape, spec.stride, spec.fqn, binding, is_state=True)
                for spec, view, binding in zip(self.flat.parameters, self.views(self._gradient), self.bindings)
            ]
            self._uses = storage_uses(self._gradient)
        elif not (storage := self._gradient.untyped_storage()).nbytes():
            storage.resize_(self.shard.nbytes)
            if self.own is None or self.own.data_ptr() != storage.data_ptr():
                with torch.inference_mode(False):
                    self.own = same_memory(self._gradient)
        return self._wrappers

    def release(self) -> None:
        """Give the memory of gradients back if there are none, until the next are reduced."""
        if (
            self._gradient is not None
            and all(p.grad is None for p in self.parameters.values())
            and self._kept_are_free()
        ):
            self._gradient.untyped_storage().resize_(0)

    def _kept_are_free(self) -> bool:
        assert self._gradient is not None
        if storage_uses(self._gradient) != self._uses:
            return False
        return _references(self._wrappers) <= _UNSHARED and all(tensor_uses(w) == 1 for w in self._wrappers)


def _references(items: Sequence[object]) -> int:
    """The most references any item has, those of the list and of the asking included."""
    return max((sys.getrefcount(item) for item in items), default=0)


_UNSHARED = _references([object()])
"""What `_references` says of items that only their list holds; it differs between Python versions."""
