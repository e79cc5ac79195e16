"""Fewer and shorter calls for the same operators: views that come to nothing, and torch's own entry to an overload.

[Note: direct calls]
An OpOverload matches its arguments to the schema through Python; what torch generates for its users (`torch.mm`,
`Tensor.view`) is parsed in C and takes 1 to 3 us less, of 2 to 8 for a small operator. Which overload that reaches depends
on the kinds of the arguments, so it is not assumed: both are called once for each kinds, with tensors that have no memory,
and what is generated is taken only if exactly the same call of the same overload is dispatched. Operators that take no
tensor stay as they are: `torch.set_default_device` would make their results elsewhere.

[Note: views]
Backward is full of `t(t(x))` and of views of views, since each node of autograd writes its own, and forward has clones of
what nothing else reads, since no operator may return what it was given. They compute nothing, so a phase is run without
them; what the schedule says stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.capture.torch_private import GENERATED, OpOverload, pytree, what_dispatches
from fxshard.ir import Phase
from fxshard.ir.nodes import flatten_nodes, hint

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_TURNS = (aten.t.default, aten.transpose.int)
_ALIASES = (aten.detach.default, aten.alias.default)
_SHORTENED = (*_RESHAPES, *_TURNS, *_ALIASES, aten.clone.default)
_VIEWS = _SHORTENED[:-1]


class Simplified:
    """The nodes of a phase with their arguments: views of views taken of what they are views of."""

    def __init__(self, phase: Phase):
        self.same: dict[fx.Node, fx.Node] = {}
        """Nodes whose value is another's, and that other."""
        self.arguments: dict[fx.Node, tuple[Any, ...]] = {}
        self.inputs: dict[fx.Node, list[fx.Node]] = {}
        """What each node that is run reads; others are not in it."""
        for node in phase.graph.nodes:
            self.arguments[node] = fx.node.map_arg(node.args, self.resolve)
            if node.target in _SHORTENED:
                self._shorten(node)
        needed: set[fx.Node] = set()
        for node in reversed(phase.graph.nodes):
            idle = node in self.same or node.target in _VIEWS
            if not idle or node in needed:
                arguments = phase.results if node.op == "output" else (self.arguments[node], node.kwargs)
                self.inputs[node] = list(dict.fromkeys(map(self.resolve, flatten_nodes(arguments))))
                needed.update(self.inputs[node])

    def resolve(self, node: fx.Node) -> fx.Node:
        return self.same.get(node, node)

    def _shorten(self, node: fx.Node) -> None:
        source: fx.Node
        source, *how = self.arguments[node]
        while node.target is aten.view.default and source.target in _RESHAPES and _is_plain(self._source(source)):
            source = self._source(source)
        self.arguments[node] = (source, *how)
        if node.target is aten.clone.default:
            if node.args[0] is source and _dies_in(source, node):
                self.same[node] = source
            return
        if any(user.op == "output" for user in node.users):
            return  # what leaves a phase is another tensor
        if node.target in _ALIASES:
            self.same[node] = source
        elif node.target in _TURNS:
            if source.target is node.target and _turned(source) == _turned(node):
                self.same[node] = self._source(source)
        elif _is_plain(source) and _is_plain(node) and source.meta["val"].shape == node.meta["val"].shape:
            self.same[node] = source

    def _source(self, node: fx.Node) -> fx.Node:
        found: fx.Node = self.arguments[node][0]
        return found


def _dies_in(source: fx.Node, clone: fx.Node) -> bool:
    """Whether a clone is of a tensor of its own that nothing else reads, and has its strides."""
    fresh = isinstance(source.target, OpOverload) and not any(a.alias_info for a in source.target._schema.arguments)
    return fresh and len(source.users) == 1 and _strides(source) == _strides(clone) is not None


def _is_plain(node: fx.Node) -> bool:
    """Whether a value is contiguous and of a known shape: any view of a view of it is one of it."""
    return _strides(node) is not None and node.meta["val"].is_contiguous()


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    """Of the node's value; None where it is no tensor or its shape is only known when it runs."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(type(n) is not int for n in (*value.shape, *value.stride())):
        return None
    return value.stride()


def _turned(node: fx.Node) -> frozenset[int]:
    """Which dimensions change places."""
    if node.target is aten.t.default:
        return frozenset((0, 1))
    dims = node.meta["val"].dim()
    return frozenset(int(d) % dims for d in node.args[1:])  # type: ignore[arg-type]


def fixed_view(node: fx.Node, arguments: tuple[Any, ...], known: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The value of a node that is a view of values that never change their place; None if it is not."""
    target, leaves = node.target, list(flatten_nodes((arguments, node.kwargs)))
    is_view = isinstance(target, OpOverload) and target.is_view
    if not is_view or not leaves or not all(leaf in known for leaf in leaves):
        return None
    if any(user.op == "output" for user in node.users):
        return None
    with torch.inference_mode(False), torch.no_grad():
        found = target(*fx.node.map_arg(arguments, known.get), **fx.node.map_arg(node.kwargs, known.get))  # type: ignore[operator]
    return found if isinstance(found, Tensor) else None


_DIRECT: dict[Any, Callable[..., Any]] = {}
"""By operator and the kinds of its arguments, what to call."""


def direct(node: fx.Node, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """What to call for an operator's node, see [Note: direct calls]."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return target
    args, kwargs = fx.node.map_arg((arguments, node.kwargs), lambda n: n.meta.get("val"))
    leaves = pytree.tree_leaves((args, kwargs))
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if any(isinstance(leaf, symbolic) for leaf in leaves) or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return target
    if any(n.meta.get("val") is None for n in flatten_nodes((arguments, node.kwargs))):
        return target
    key = (target, _kinds(args), tuple((name, _kinds(value)) for name, value in kwargs.items()))
    if key not in _DIRECT:
        args, kwargs = pytree.tree_map_only(Tensor, _stand_in, (args, dict(kwargs)))
        _DIRECT[key] = _proved(target, args, kwargs)
    return _DIRECT[key]


def _stand_in(value: Tensor) -> Tensor:
    """A tensor without memory. A fake one would do, but that it dispatches operators of its own when it is looked at."""
    return torch.empty_strided(
        [*map(hint, value.shape)], [*map(hint, value.stride())], dtype=value.dtype, device="meta"
    )


def _kinds(value: Any) -> Any:
    """What decides which overload is taken: not numbers, but what they are."""
    if isinstance(value, Tensor):
        return (Tensor, value.dim() == 0, value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_kinds, value))
    return type(value)


def _proved(target: OpOverload, args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    name = target._schema.name.split("::")[1]
    expected = what_dispatches(target, args, kwargs)
    if expected is None or [call[0] for call in expected] != [target]:
        return target
    for holder in GENERATED:
        function: Callable[..., Any] | None = getattr(holder, name, None)
        if function is not None and _alike(what_dispatches(function, args, kwargs), expected):
            return function
    return target


def _alike(a: Any, b: Any) -> bool:
    """The same tensors and operators, equal numbers."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
