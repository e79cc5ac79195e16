"""What stands in `.grad` while gradients are kept for a later reduce: nothing can be computed with it, it can be dropped."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxshard.capture.torch_private import pytree
from fxshard.parameter import KEEPS_IDENTITY, ShardedParameter

aten = torch.ops.aten


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)


class KeptGradient(ShardedParameter):
    """The gradient of a parameter of which a part was kept by `no_sync` and not reduced yet.

    Its value is on no rank, so every operator refuses it by the parameter's name. What drops a gradient drops it: `.grad =
    None` and `zero_()`, so `zero_grad` with either of its settings. `base` is the reduced gradient from before, if any.
    """

    base: ShardedParameter | None
    dropped: bool
    """Whether it was set to zero: it is a reduced gradient like any other then."""

    absent_at: int | None
    """Set to zero where nothing was reduced before: after how many edits. The next reduce that has no gradient of the
    parameter sets `.grad` to None, which plain training has there."""

    _alias_of: KeptGradient | None

    @staticmethod
    def of(parameter: ShardedParameter, base: ShardedParameter | None) -> KeptGradient:
        nothing = _zero(parameter.local.dtype, parameter.local.device).expand(parameter.local.shape)
        made: Any = ShardedParameter.__new__(
            KeptGradient, nothing, parameter.shape, parameter.stride(), parameter.fqn, parameter.binding, is_state=True
        )
        made.base, made.dropped, made.absent_at, made._alias_of = base, False, None, None
        return made

    @property
    def _original(self) -> KeptGradient:
        return self if self._alias_of is None else self._alias_of

    def _alias(self) -> KeptGradient:
        made = KeptGradient.of(self, self.base)
        made._alias_of = self._original
        return made

    def _drop(self) -> None:
        kept = self._original
        if kept.base is None:
            kept.local, kept.absent_at = torch.zeros_like(kept.local), kept.edits[0]
        else:
            kept.local = kept.base.local.zero_()
        kept.dropped, kept.base = True, None

    def refuse(self, what: object) -> NoReturn:
        raise RuntimeError(
            f"the gradient of '{self.fqn}' is not complete: no_sync kept a part of it, which no rank has reduced yet, and it "
            f"was used by {what}. Run one backward outside of no_sync first; zero_grad drops what was kept"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        return super().__deepcopy__(memo) if self._original.dropped else self.refuse("deepcopy")

    def full_tensor(self) -> Tensor:
        return super().full_tensor() if self._original.dropped else self.refuse("full_tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._original.dropped:
            return super().__repr__()
        return f"KeptGradient('{self.fqn}', shape={tuple(self.shape)}, dtype={self.dtype}, not reduced yet)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = [
            x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, KeptGradient) and not x._original.dropped
        ]
        if not kept:
            return super().__torch_dispatch__(func, types, args, kwargs)
        first = kept[0]
        if func in KEEPS_IDENTITY or (func is aten.view.default and tuple(args[1]) == tuple(first.shape)):
            return first._alias()
        if func is aten.zero_.default:
            first._drop()
            return args[0]
        if func is aten._foreach_zero_.default:
            for gradient in args[0]:
                gradient.zero_()
            return None
        first.refuse(func)
