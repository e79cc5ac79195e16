"""Optimizers that compute with whole matrices (Muon, Adafactor, Shampoo), over sharded parameters."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxshard.parameter import ShardedParameter

O = TypeVar("O", bound=torch.optim.Optimizer)


def gathered(kind: type[O]) -> type[O]:
    """`kind` with a step that sees parameters whole: `fxshard.gathered(torch.optim.Muon)(matrices, lr=0.02)`.

    Unit by unit, parameters, their gradients and what state has their shape are gathered, `kind` steps on plain whole tensors,
    and this rank keeps its pieces. So state of the parameters' shape stays sharded, beside one whole unit; state of other
    shapes is whole on every rank. Every rank of a shard group computes the same. Groups, hooks, schedules of the learning
    rate and state dicts are as `kind` has them. For optimizers that treat each parameter by itself; those that
    need a closure (LBFGS) do not.

    A step is a collective of the shard group. Raises TypeError for what is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"gathered({kind!r}): a class of optimizers was expected, as torch.optim.Muon")
    return _gathered(kind)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _gathered(kind: Any) -> Any:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plainly = kind.step
        if getattr(plainly, "hooked", False):  # hooks run around this step, not in it for every unit
            plainly = plainly.__wrapped__
        groups, state = self.param_groups, self.state
        before = [dict(group) for group in groups]  # every unit steps from these: a counter in a group counts steps
        try:
            for parameters in _together(groups) or [[]]:
                _step_whole(self, before, state, parameters, plainly)
            for group, stepped in zip(groups, self.param_groups):
                group.update({key: value for key, value in stepped.items() if key != "params"})
        finally:
            self.param_groups, self.state = groups, state
        return loss

    # Of the same name: a checkpoint knows an optimizer by it.
    return type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__, "__module__": kind.__module__})


def _together(groups: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """The parameters that have a gradient, those of one FlatParameter together; plain ones for themselves."""
    found: dict[Any, list[Any]] = {}
    for group in groups:
        for p in group["params"]:
            if p.grad is not None:
                found.setdefault(_owner(p), []).append(p)
    return list(found.values())


def _owner(parameter: Any) -> Any:
    if not isinstance(parameter, ShardedParameter) or parameter.binding is None:
        return None
    owner = parameter.binding.owner()
    if owner is None:
        raise RuntimeError(f"the model of parameter '{parameter.fqn}' is gone: an optimizer steps while it is there")
    return owner


@torch.no_grad()
def _step_whole(
    optimizer: Any,
    groups: Sequence[dict[str, Any]],
    state: defaultdict[Any, dict[str, Any]],
    parameters: Sequence[Any],
    plainly: Callable[[Any], Any],
) -> None:
    """`plainly(optimizer)` for these parameters of one owner alone, with whole ones in their place."""
    owner = _owner(parameters[0]) if parameters else None
    stand_ins: dict[Any, Any] = {p: p for p in parameters}
    held: dict[Any, dict[str, Any]] = {p: state[p] for p in parameters if p in state}
    if owner is not None:
        values = _wholes(owner, {p: p for p in parameters})
        gradients = _wholes(owner, {p: p.grad for p in parameters})
        for p in parameters:
            stand_ins[p] = nn.Parameter(values[p], requires_grad=p.requires_grad)
            stand_ins[p].grad = gradients[p]
        held = _whole_state(owner, held)
    optimizer.param_groups = [
        {**group, "params": [stand_ins[p] for p in group["params"] if p in stand_ins]} for group in groups
    ]
    optimizer.state = defaultdict(dict, {stand_ins[p]: values for p, values in held.items()})
    plainly(optimizer)
    for p, whole in stand_ins.items():
        after = optimizer.state.get(whole)
        if owner is not None:
            owner.set_piece(owner.flat.fqns.index(p.fqn), p.piece_of(whole.detach()))
            after = None if after is None else {key: _piece(p, value) for key, value in after.items()}
        if after is not None:
            state[p] = after


def _wholes(owner: Any, pieces: dict[Any, Any]) -> dict[Any, Tensor]:
    """Whole plain tensors of what is sharded as their parameters are, and of one dtype."""
    by_name = {p.fqn: value.local for p, value in pieces.items()}
    wholes = dict(zip(owner.flat.fqns, owner.wholes([by_name.get(fqn) for fqn in owner.flat.fqns])))
    return {p: wholes[p.fqn] for p in pieces}


def _whole_state(owner: Any, held: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """State with whole tensors for pieces, on the device of compute (counters stay where they are)."""
    pieces: dict[tuple[str, torch.dtype], dict[Any, Any]] = {}
    found: dict[Any, dict[str, Any]] = {}
    for p, values in held.items():
        found[p] = dict(values)
        for key, value in values.items():
            if isinstance(value, ShardedParameter):
                pieces.setdefault((key, value.dtype), {})[p] = value
            elif isinstance(value, Tensor) and value.dim():
                found[p][key] = value.to(owner.world.device)
    for (key, _), values in pieces.items():
        for p, whole in _wholes(owner, values).items():
            found[p][key] = whole
    return found


def _piece(parameter: Any, value: Any) -> Any:
    """This rank's piece of state that has the parameter's shape; a parameter without dims has counters of its shape."""
    if not isinstance(value, Tensor) or not parameter.dim() or value.shape != parameter.shape:
        return value
    return parameter.like(parameter.piece_of(value).to(parameter.local.device, copy=True), state=True)
