"""Which parameters are gathered and freed together: from a model to named units, in registration order.

The default makes each element of a repeated ModuleList or Sequential of same-class blocks a unit; the rest is the root.
The root is split where units lie between its parameters (embeddings before the blocks, final norm and head after them):
as one FlatParameter the head's reduce would have to wait for the embedding's gradient.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxshard.ir.layout import FlatParameter, ParameterSpec, contiguous_stride, is_dense
from fxshard.options import FLOATS, MixedPrecision, listed

ROOT = "(root)"


@dataclass(frozen=True)
class BytesOfFirstUse:
    """Units of about `num_bytes` of parameters each, in order of first use in the captured graph.

    Units need not be modules: the graph knows the order. Needs `example_inputs`, since a graph is needed first.
    """

    num_bytes: int

    def __post_init__(self) -> None:
        if isinstance(self.num_bytes, bool) or not isinstance(self.num_bytes, int) or self.num_bytes < 1:
            raise ValueError(f"BytesOfFirstUse({self.num_bytes!r}): a positive number of bytes was expected")


UnitsOption = str | type | Sequence[Any] | Callable[[str, nn.Module], bool] | BytesOfFirstUse


@dataclass
class Unit:
    """`parameters` are (fqn, parameter) in registration order. The root may come in several of these, its parts."""

    name: str
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    is_root: bool = False


def named_parameters_with_aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter once, with all its names, in registration order."""
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(fqn)
    return names


def unit_modules(model: nn.Module, units: UnitsOption) -> list[str]:
    """Names of the modules that become units; outermost wins where one lies in another."""
    modules = dict(model.named_modules())
    modules.pop("", None)
    if units == "auto":
        chosen = _repeated_blocks(model)
    elif units == "none":
        chosen = []
    elif isinstance(units, (str, type, list, tuple, set, frozenset)):
        chosen = modules_named(modules, units, "units", "; alone, 'auto' and 'none' are allowed too.")
    elif callable(units):
        chosen = _by_callable(modules, units)
    else:
        raise TypeError(
            f"units={units!r} is not understood. Allowed: 'auto', 'none', an FQN pattern ('layers.*'), a module class, "
            "a list of patterns and classes, a callable (name, module) -> bool, or BytesOfFirstUse(num_bytes)"
        )
    outermost: list[str] = []
    for name in chosen:
        if not any(name.startswith(outer + ".") for outer in outermost):
            outermost.append(name)
    return outermost


def _repeated_blocks(model: nn.Module) -> list[str]:
    chosen = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        children = list(module)
        if len({type(c) for c in children}) == 1 and all(next(c.parameters(), None) is not None for c in children):
            chosen += [f"{name}.{key}" if name else key for key in module._modules]
    return chosen


def modules_named(modules: Mapping[str, nn.Module], wanted: Any, option: str, more: str = ".") -> list[str]:
    """Names of the modules that `wanted` chooses, in the order of `modules`: a class, an FQN pattern, or several of them.

    Raises TypeError or ValueError that names `option`, every one that matches no module, and what there is. `more` goes on
    where a pattern matches none.
    """
    found: set[str] = set()
    problems = []
    for item in [wanted] if isinstance(wanted, (str, type)) else wanted:
        if isinstance(item, type):
            names = [name for name, module in modules.items() if isinstance(module, item)]
            if not names:
                classes = sorted({type(m).__name__ for m in modules.values()})
                there = ", ".join(classes) or "none, the model has no submodules"
                problems.append(f"{option}={item.__name__}: no module of this class. Classes here: {there}")
        elif isinstance(item, str):
            names = [name for name in modules if fnmatch.fnmatchcase(name, item)]
            if not names:
                problems.append(f"{option}={item!r} matches no module{more}{_names_like(item, modules)}")
        else:
            raise TypeError(f"{option} holds {item!r}: a module class or an FQN pattern was expected")
        found.update(names)
    if problems:
        raise ValueError("\n".join(problems))
    return [name for name in modules if name in found]


def _names_like(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    if close := difflib.get_close_matches(pattern, modules, n=3):
        return f" Close names: {', '.join(close)}"
    return f" Modules here: {listed(modules, 8) or 'none, the model has no submodules'}"


def _by_callable(modules: dict[str, nn.Module], wanted: Callable[[str, nn.Module], bool]) -> list[str]:
    try:
        inspect.signature(wanted).bind("", nn.Module())
    except TypeError as error:
        raise TypeError(f"units={wanted!r} is called with (name, module): {error}") from None
    found = [name for name, module in modules.items() if wanted(name, module)]
    if not found:
        raise ValueError(f"units={wanted!r} chose none of the {len(modules)} modules; 'none' makes everything one unit")
    return found


def partition(model: nn.Module, units: UnitsOption) -> list[Unit]:
    """The model's parameters as units, registration order.

    A parameter tied across units belongs to the root, once. Raises ValueError for a
    model without parameters, and where units were asked for and no parameter belongs to one.
    """
    names = named_parameters_with_aliases(model)
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    modules = unit_modules(model, units)
    module_set = set(modules)

    def owner(fqn: str) -> str:
        parts = fqn.split(".")
        for end in range(1, len(parts)):
            if (prefix := ".".join(parts[:end])) in module_set:
                return prefix
        return ROOT

    result: dict[str, Unit] = {}
    part, last = 0, ROOT
    for parameter, fqns in names.items():
        owners = {owner(fqn) for fqn in fqns}
        unit = owners.pop() if len(owners) == 1 else ROOT
        if unit == ROOT and last != ROOT:
            part += 1
        key, last = f"{ROOT}.{part}" if unit == ROOT else unit, unit
        result.setdefault(key, Unit(unit, is_root=unit == ROOT)).parameters.append((fqns[0], parameter))
    if all(unit.is_root for unit in result.values()):
        if units == "auto":
            warnings.warn(
                f"units='auto' found no repeated blocks in {type(model).__name__}: all parameters are one unit, gathered as a "
                "whole. Say what to gather together, as in units=torch.nn.Linear or units='encoder.*', or units='none'",
                stacklevel=4,
            )
        elif units != "none":
            named = f"no parameter belongs to {', '.join(modules[:4])} alone" if modules else "it names no module"
            raise ValueError(f"units={units!r}: {named}; 'none' makes everything one unit")
    return list(result.values())


def units_by_bytes(model: nn.Module, order: Sequence[str], num_bytes: int) -> list[Unit]:
    """Units of about `num_bytes` in the given order of first use; parameters never used come last."""
    names = named_parameters_with_aliases(model)
    by_name = {fqns[0]: p for p, fqns in names.items()}
    ordered = [fqn for fqn in order if fqn in by_name]
    ordered += [fqn for fqn in by_name if fqn not in set(ordered)]
    result: list[Unit] = []
    size = num_bytes
    for fqn in ordered:
        parameter = by_name[fqn]
        if size >= num_bytes:
            result.append(Unit(f"bytes.{len(result)}"))
            size = 0
        result[-1].parameters.append((fqn, parameter))
        size += parameter.numel() * parameter.element_size()
    return result


def check_unit_patterns(option: str, patterns: Iterable[str], flats: Mapping[str, FlatParameter]) -> None:
    """Raise ValueError that names all patterns which no unit's name fits."""
    units = list(dict.fromkeys(flat.unit for flat in flats.values()))
    unmatched = [p for p in patterns if not any(fnmatch.fnmatchcase(unit, p) for unit in units)]
    if unmatched:
        shown = listed(units, 8)
        raise ValueError(f"{option}: no unit is named {', '.join(map(repr, unmatched))}. Units here: {shown}")


def storage_stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """The stride the whole parameter will have: its own where it is dense (channels_last stays), else contiguous."""
    shape, stride = tuple(parameter.shape), tuple(parameter.stride())
    return stride if is_dense(shape, stride) else contiguous_stride(shape)


def flat_parameters(
    model: nn.Module,
    units: Sequence[Unit],
    F: int,
    precision: MixedPrecision,
    full_precision: Collection[nn.Parameter] = (),
) -> dict[str, FlatParameter]:
    """One FlatParameter per (dtype, precision, requires_grad) in a unit (the root: in each of its parts), by name.

    A name is the unit's, with `[dtype, full precision, frozen]`, or those of them that tell the unit's apart, and `(root).1`
    for a second part. `full_precision` are the parameters to which `precision` does not apply.
    """
    aliases = named_parameters_with_aliases(model)
    root_parts = sum(unit.is_root for unit in units)
    flats: dict[str, FlatParameter] = {}
    part = 0
    for unit in units:
        base = unit.name
        if unit.is_root and root_parts > 1:
            base, part = f"{ROOT}.{part}", part + 1
        groups: dict[tuple[torch.dtype, bool, bool], list[ParameterSpec]] = {}
        for fqn, p in unit.parameters:
            spec = ParameterSpec(
                fqn, tuple(p.shape), storage_stride(p), p.dtype, p.requires_grad, tuple(aliases[p][1:])
            )
            full = p in full_precision and precision.of(p.dtype, True) != precision.of(p.dtype, False)
            groups.setdefault((p.dtype, full, p.requires_grad), []).append(spec)
        dtypes, precisions = {dtype for dtype, _, _ in groups}, {(dtype, full) for dtype, full, _ in groups}
        for (dtype, full, requires_grad), specs in groups.items():
            if requires_grad and dtype not in FLOATS:
                raise ValueError(
                    f"parameter '{specs[0].fqn}' is trainable and of {dtype}; gradients are reduced in "
                    f"{', '.join(map(str, FLOATS))}. Freeze it, or keep it as a real tensor"
                )
            marks = []
            if len(dtypes) > 1:
                marks.append(str(dtype).removeprefix("torch."))
            if full and (dtype, False) in precisions:
                marks.append("full precision")
            if len(groups) > len(precisions) and not requires_grad:
                marks.append("frozen")
            name = f"{base}[{', '.join(marks)}]" if marks else base
            flats[name] = FlatParameter.build(name, base, unit.is_root, tuple(specs), F, *precision.of(dtype, full))
    return flats
