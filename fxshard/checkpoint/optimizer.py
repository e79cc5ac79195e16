"""The state dict of an optimizer over sharded parameters: `optimizer.state_dict()` holds DTensors where the state is sharded.

fxshard does not make the optimizer. It meets it at its first step, in a hook that torch calls for every optimizer, and
stays with it by hooks of its own: on making a state dict, and on having loaded one. A state that was loaded before the first
step becomes pieces right before that step. All of these are collectives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard.parameter import ShardedParameter

if TYPE_CHECKING:
    from fxshard.runtime.storage import FlatStorage

MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta"}
)
"""What torch's optimizers call state of their parameters' shape."""

_MET: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_OTHERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers without a sharded parameter, and how many they had when they last stepped: groups may be added."""


_AS_PIECES: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def state_in_pieces(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict with sharded state as the pieces that it holds; no collective, no copy."""
    _AS_PIECES.add(optimizer)
    try:
        return optimizer.state_dict()
    finally:
        _AS_PIECES.discard(optimizer)


def watch() -> None:
    """Meet every optimizer at its next step, one that was met as another's included: a model was sharded just now."""
    _OTHERS.clear()
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    meet(optimizer)


def meet(optimizer: torch.optim.Optimizer) -> None:
    """From now on its state dicts hold DTensors, and it takes them; state that is whole is cut to pieces. Once is enough."""
    if optimizer in _MET:
        return
    number = sum(len(group["params"]) for group in optimizer.param_groups)
    if _OTHERS.get(optimizer) == number:
        return
    if next(_sharded(optimizer), None) is None:
        _OTHERS[optimizer] = number
    else:
        _MET.add(optimizer)
        optimizer.register_state_dict_post_hook(_to_dtensors)
        optimizer.register_load_state_dict_post_hook(_to_pieces)
        _to_pieces(optimizer)


def _sharded(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, ShardedParameter]]:
    """The sharded parameters of an optimizer, with their numbers in its state dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return ((i, p) for i, p in enumerate(parameters) if isinstance(p, ShardedParameter) and p.binding is not None)


def _to_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Cut what is of a parameter's shape and is whole, or a DTensor, to this rank's piece."""
    held = [(p, optimizer.state.get(p, {})) for _, p in _sharded(optimizer)]
    # Of a parameter without dims a moment and a counter look the same.
    moments = {key for p, state in held for key, v in state.items() if p.dim() and _shape(v) == p.shape} | MOMENTS
    for parameter, state in held:
        for key, value in state.items():
            loaded = isinstance(value, Tensor) and not isinstance(value, ShardedParameter)
            if loaded and _shape(value) == parameter.shape and (key in moments or hasattr(value, "full_tensor")):
                state[key] = parameter.like(parameter.piece_of(value).to(parameter.local.device, copy=True), state=True)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _to_dtensors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state dict with sharded state as DTensors; the optimizer's own is left alone."""
    if optimizer in _AS_PIECES:
        return state_dict
    numbers = dict(_sharded(optimizer))
    state = {n: dict(values) if n in numbers else values for n, values in state_dict["state"].items()}
    todo: dict[tuple[FlatStorage, str, torch.dtype], dict[str, tuple[int, Tensor]]] = {}
    for n, parameter in numbers.items():
        for key, value in state.get(n, {}).items():
            if isinstance(value, ShardedParameter):
                storage = parameter.binding.owner() if parameter.binding is not None else None
                if storage is None:
                    raise RuntimeError(
                        f"the model of parameter '{parameter.fqn}' is gone: make state dicts while it is there"
                    )
                todo.setdefault((storage, key, value.dtype), {})[parameter.fqn] = n, value.local
    for (storage, key, _), held in todo.items():
        pieces = [held[fqn][1] if fqn in held else None for fqn in storage.flat.fqns]
        for fqn, whole in zip(storage.flat.fqns, storage.redistributed(pieces)):
            if fqn in held:
                state[held[fqn][0]][key] = whole
    return {**state_dict, "state": state}
