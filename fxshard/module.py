"""What a compiled model can do: the mixin, and the class that a module gets with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxshard.passes as passes
from fxshard.capture import torch_private
from fxshard.ir import Schedule
from fxshard.options import check_choice
from fxshard.parameter import ShardedParameter
from fxshard.state import State

STATE = "_fxshard"
"""The name under which a compiled module keeps its State."""


class ShardedModule:
    """Mixed into the class of a compiled module: what fxshard adds to it. The module object stays the user's own."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest training capture (of the latest capture if there is none).

        Assign an edited `schedule.copy()` to it and the model runs that from its next forward on, the memory planned anew
        where the edits ask for it. It is verified first; where it changes the order of collectives every rank assigns the
        same one. Raises ScheduleError, AgreementError, TypeError or ValueError (the schedule of another model) with nothing
        changed, RuntimeError where nothing was captured yet.
        """
        return _state(self).latest_schedule()

    @schedule.setter
    def schedule(self, edited: Schedule) -> None:
        _state(self).replace_schedule(edited)

    @property
    def schedules(self) -> list[Schedule]:
        """All captured schedules, oldest first, each with those that `no_sync` made of it behind it."""
        return _state(self).all_schedules()

    def lowered(self, phase: str = "forward") -> str:
        """The Python code that runs a phase (`forward` or `backward`) of the latest training capture.

        Raises ValueError for another phase, or where there is no backward, RuntimeError before the first call.
        """
        return _state(self).latest_program().source(phase)

    @contextlib.contextmanager
    def no_sync(self, keep: str = "unsharded") -> Iterator[None]:
        """Backwards inside keep their gradients; the first one outside reduces them together with its own.

        keep: "unsharded" communicates no gradient, every rank keeps its own whole ones (in the accumulation dtype).
        "sharded" reduces them in the shard group and keeps the sums: with replicas (F < W) the AllReduce is put off, without
        (F = W) it is what happens outside too, with F = 1 it is "unsharded".

        Where backward runs decides, not where forward ran. Every rank does the same. Meanwhile `.grad` of a parameter
        stands for something no rank has, and nothing can be computed with it; `zero_grad` drops what was kept, of the
        parameters it is for. Contexts nest, the innermost counts; after an exception it is as before the context.
        Source: FSDP paper, 3.3.4; FSDP1's `no_sync`, FSDP2's `set_requires_gradient_sync`.
        """
        check_choice("keep", keep, passes.KEEPS)
        executor = _state(self).executor
        assert executor is not None
        before, executor.keep = executor.keep, keep
        try:
            yield
        finally:
            executor.keep = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all parameters, with one small reduction a dtype in place of one a parameter.

        Each parameter counts once, wherever its pieces are and however often it is tied. Returns the total norm before,
        a plain 0-d tensor, the same on all ranks. A collective of the shard group. Raises RuntimeError where the norm is not
        finite and `error_if_nonfinite`.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
        norms = [n for grads in by_dtype.values() for n in torch_private.norms(grads, float(norm_type))]
        total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type)) if norms else torch.tensor(0.0)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}, and "
                "error_if_nonfinite=True; nothing was clipped"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, True if foreach is None else foreach)
        return total

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"this {type(self).__name__} is sharded: it can neither be copied nor pickled. "
            "Copy the model before fxshard.compile; save its `state_dict()`; keep averages of weights by element-wise "
            "operators on `parameters()`"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`.to`, `.float` and the like: refused where they would change a parameter, and else for buffers only."""
        tables = [module._parameters for module in self.modules()]  # type: ignore[attr-defined]
        with torch.no_grad():
            for p in self.parameters():  # type: ignore[attr-defined]
                if isinstance(p, ShardedParameter) and (converted := fn(p)) is not p:
                    raise p.conversion_error(converted)
        held = [dict(table) for table in tables]
        for table in tables:
            table.update({n: None for n, p in table.items() if isinstance(p, ShardedParameter)})
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for table, parameters in zip(tables, held):
                table.update({n: p for n, p in parameters.items() if isinstance(p, ShardedParameter)})

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """The module with plain, whole parameters without gradients, whose forward runs uncaptured. Changes
        of parameters are not kept, changes of buffers are.

        A collective: every rank enters, and holds the whole model inside.
        """
        state = _state(self)
        with state.plain_parameters():
            yield self  # type: ignore[misc]


def _state(module: Any) -> State:
    return module.__dict__[STATE]


def is_compiled(model: nn.Module) -> bool:
    """Whether `fxshard.compile` was applied to this module object."""
    return STATE in model.__dict__


_CLASSES: dict[type, type] = {}


def sharded_class(original: type) -> type:
    """`original` with the mixin; one for each class. It holds no model: Dynamo keeps classes for good."""
    if original in _CLASSES:
        return _CLASSES[original]

    @functools.wraps(original.forward)  # type: ignore[attr-defined]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _state(self).run(*args, **kwargs)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)  # a slice of a Sequential is made by calling its class: it is a plain one

    names = {"__module__": original.__module__, "forward": forward, "__new__": new}
    _CLASSES[original] = type(original.__name__, (ShardedModule, original), names)
    return _CLASSES[original]
