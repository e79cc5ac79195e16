"""Where dtypes change inside a forward: modules in full precision, and the casts where a unit or one of them is entered.

[Note: entrances]
During a call, and only then, the module of each unit and each module in full precision has a `forward` of its own, which
casts and calls the one there was. It is traced with the user's code: a cast is an operator of the schedule. Outside of calls
nothing is to be seen of it, and `model.unsharded()` runs the plain modules. Hooks would have to hand the inputs' dtype
from one to the other through state that Dynamo guards on, and torch's own modules take other paths where they find hooks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.capture.torch_private import BatchNorm, pytree
from fxshard.options import FLOATS, MixedPrecision
from fxshard.units import BytesOfFirstUse, UnitsOption, modules_named, named_parameters_with_aliases, unit_modules


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `values` in `dtype`, at any depth of containers that pytree knows and of dataclasses.

    What holds none of another dtype is returned as it is, the same object.
    """
    leaves, structure = pytree.tree_flatten(values)
    changed = {}
    for i, leaf in enumerate(leaves):
        if _is_float(leaf):
            if leaf.dtype != dtype:
                changed[i] = leaf.to(dtype)
        elif _is_dataclass(leaf):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
            new = {name: cast(value, dtype) for name, value in fields.items()}
            if any(new[name] is not value for name, value in fields.items()):
                changed[i] = _replaced(leaf, new)
    if not changed:
        return values
    return pytree.tree_unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)], structure)


def _floats(values: Any) -> list[Tensor]:
    """The floating tensors that `cast` reaches."""
    found = []
    for leaf in pytree.tree_leaves(values):
        if _is_float(leaf):
            found.append(leaf)
        elif _is_dataclass(leaf):
            for f in dataclasses.fields(leaf):
                found += _floats(getattr(leaf, f.name))
    return found


def _replaced(instance: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass instance with these values of its fields, those that its constructor does not take included."""
    given = {f.name: values[f.name] for f in dataclasses.fields(instance) if f.init}
    made = dataclasses.replace(instance, **given)
    for f in dataclasses.fields(instance):
        if not f.init:
            object.__setattr__(made, f.name, values[f.name])  # it may be frozen
    return made


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in FLOATS


def _is_dataclass(x: Any) -> bool:
    # dataclasses.is_dataclass asks by hasattr, which Dynamo of torch 2.11 refuses for many classes, torch.dtype for one.
    return getattr(type(x), "__dataclass_fields__", None) is not None


def full_precision_modules(model: nn.Module, precision: MixedPrecision) -> dict[nn.Module, torch.dtype]:
    """The modules that `precision` does not apply to, each with the dtype of its own: of its parameters, else of its buffers,
    else of the model's parameters; the wider where there are two.

    Beside those that are named, BatchNorms whose statistics are not in the dtype of the parameters: torch computes them with
    parameters of the statistics' dtype alone.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    del modules[""]
    chosen = [modules[name] for name in modules_named(modules, precision.full_precision, "full_precision")]
    if precision.param is not None:
        for module in modules.values():
            statistics = module.running_mean if isinstance(module, BatchNorm) else None
            if statistics is not None and (precision.buffers or statistics.dtype) != precision.param:
                chosen.append(module)
    return {module: _own_dtype(model, module) for module in chosen}


def _own_dtype(model: nn.Module, module: nn.Module) -> torch.dtype:
    for tensors in (module.parameters(), module.buffers(), model.parameters()):
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype in FLOATS}
        if dtypes:
            return functools.reduce(torch.promote_types, dtypes)
    return torch.float32


def full_precision_parameters(model: nn.Module, full_precision: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters of these modules and of what is below them.

    Raises ValueError for those that are tied to a parameter of another module: code there would meet another dtype.
    """
    inside = {m for module in full_precision for m in module.modules()}
    found = {p for module in inside for p in module._parameters.values() if p is not None}
    modules = dict(model.named_modules(remove_duplicate=False))
    outside = {
        fqn
        for names in named_parameters_with_aliases(model).values()
        for fqn in names
        if modules[fqn.rpartition(".")[0]] not in inside
    }
    torn = [
        " and ".join(f"'{fqn}'" for fqn in sorted(names, key=outside.__contains__))
        for parameter, names in named_parameters_with_aliases(model).items()
        if parameter in found and not outside.isdisjoint(names)
    ]
    if torn:
        raise ValueError(
            f"full_precision chooses some of the modules that share a parameter and not all: {'; '.join(torn)}. It has one "
            "dtype everywhere: choose all modules that hold it, or none"
        )
    return found


class Entrance:
    """The `forward` that stands for a module's own during a call, see [Note: entrances].

    Floating inputs are cast to `dtype`; where it `returns`, floating outputs are cast to the dtype of the first floating input
    that had another.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, returns: bool):
        self.module, self.dtype, self.returns = module, dtype, returns
        self._entered: Callable[..., Any] | None = None
        self._own: Callable[..., Any] | None = None
        """A forward that was set on the module itself, not on its class."""

    def open(self) -> None:
        own = self.module.__dict__.get("forward")
        if self._entered is None or own is not self._own:  # the same function every time: Dynamo guards on it
            self._own, self._entered = own, _entered(self.module.forward, self.dtype, self.returns)
        self.module.__dict__["forward"] = self._entered

    def close(self) -> None:
        if self.module.__dict__.get("forward") is not self._entered:
            return  # it was not opened
        if self._own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._own


def _entered(forward: Callable[..., Any], dtype: torch.dtype, returns: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def entered(*args: Any, **kwargs: Any) -> Any:
        others = [x.dtype for x in _floats((args, kwargs)) if x.dtype != dtype] if returns else []
        args, kwargs = cast((args, kwargs), dtype)
        outputs = forward(*args, **kwargs)
        return cast(outputs, others[0]) if others else outputs

    return entered


def entrances(
    model: nn.Module, units: UnitsOption, precision: MixedPrecision, full_precision: Mapping[nn.Module, torch.dtype]
) -> list[Entrance]:
    """One for each module in full precision, and one for each unit's module that lies in none of them."""
    found = [Entrance(module, dtype, returns=True) for module, dtype in full_precision.items()]
    if precision.param is not None and precision.cast_forward_inputs and not isinstance(units, BytesOfFirstUse):
        inside = {m for module in full_precision for m in module.modules()}
        chosen = dict.fromkeys(model.get_submodule(name) for name in unit_modules(model, units))
        found += [Entrance(module, precision.param, returns=False) for module in chosen if module not in inside]
    return found
