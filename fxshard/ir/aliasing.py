"""Which nodes share memory: views by operator schema, never by name."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fxshard.ir import ops

_UNMARKED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
"""Operators whose result shares memory with their first input although their schema does not say so."""

_PASS_THROUGH = frozenset({ops.wait, ops.param_view})


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs whose memory the node's result shares (views, in-place results, items of a multi-output view)."""
    if node.op != "call_function":
        return []
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        if isinstance(source, fx.Node) and aliased_inputs(source):
            return [source]
        return []
    if target in _PASS_THROUGH or target in _UNMARKED_VIEWS:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    shared = {name for r in schema.returns if r.alias_info is not None for name in r.alias_info.before_set}
    if not shared:
        return []
    inputs = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not (argument.alias_info.before_set & shared):
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        inputs += [v for v in values if isinstance(v, fx.Node)]
    return inputs


def aliases(node: fx.Node) -> Iterator[fx.Node]:
    """The node and everything downstream that shares its memory."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        yield current
        for user in current.users:
            if user not in seen and current in aliased_inputs(user):
                seen.add(user)
                stack.append(user)


def storage_users(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that reads the memory of `node`, through any chain of views."""
    for alias in aliases(node):
        yield from alias.users


def alias_roots(node: fx.Node) -> set[fx.Node]:
    """The nodes whose memory `node` may share, followed up to where it was made."""
    roots, stack, seen = set(), [node], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        sources = aliased_inputs(current)
        if sources:
            stack.extend(sources)
        else:
            roots.add(current)
    return roots


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs the node writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    written = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            written += [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, fx.Node)]
    return written


def is_random(node: fx.Node) -> bool:
    """Whether running the node twice may give two results."""
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_effect(node: fx.Node) -> bool:
    """Whether the node draws random numbers or writes: it runs once, and in its order."""
    return is_random(node) or bool(mutated_inputs(node))
