"""A phase as straight-line Python: one line an operator, in issue order; every value is deleted after its last use.

The text can be printed and stepped through in a debugger. Communication nodes are calls of functions bound to their
buffers (`AG_all_gather_layers_1()`); views of parameters and constants are globals, made once.
"""

from __future__ import annotations

import linecache
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxshard.capture.torch_private import OpOverload
from fxshard.ir import Phase, ops
from fxshard.ir.nodes import describe, identifier, info
from fxshard.runtime.calls import Simplified, direct, fixed_view

_COUNT = 0


class Lowered:
    """`function(arguments)` runs the phase; `source` is its text; `globals` what its names mean."""

    def __init__(self, source: str, names: dict[str, Any], title: str):
        global _COUNT
        _COUNT += 1
        self.source = source
        self.globals = names
        filename = f"<fxshard {title} {_COUNT}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec"), names)
        self.function: Callable[[list[Any]], Any] = names[title]
        weakref.finalize(self, linecache.cache.pop, filename, None)


def lower(phase: Phase, root: nn.Module, bound: Mapping[fx.Node, Any]) -> Lowered:
    """Write and compile a phase. `bound` gives a function for each communication node and a value for each view."""
    names: dict[str, Any] = {
        "torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan, "operator": operator,
    }  # fmt: skip
    lines: list[str] = []
    arguments: list[str] = []
    last_use: dict[fx.Node, fx.Node] = {}
    simplified, views = Simplified(phase), dict[fx.Node, torch.Tensor]()
    for node in phase.graph.nodes:
        for source in simplified.inputs.get(node, ()):
            last_use[source] = node
    static = {n for n in phase.graph.nodes if n.op == "get_attr" or not _is_variable(n)}

    def name_of(node: fx.Node) -> str:
        return identifier(node.name)

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return name_of(simplified.resolve(value))
        if isinstance(value, (list, tuple)):
            inner = ", ".join(text(v) for v in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{text(k)}: {text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        if value is None or isinstance(
            value, (bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format)
        ):
            return repr(value)
        key = f"constant_{len(names)}"
        names[key] = value
        return key

    def drop(node: fx.Node) -> None:
        if dead := [name_of(s) for s in simplified.inputs[node] if last_use.get(s) is node and s not in static]:
            lines.append(f"    del {', '.join(dead)}")

    for node in phase.graph.nodes:
        found, inputs = info(node), simplified.inputs.get(node)
        if inputs is None:
            continue  # a view that nothing reads
        if node.op == "placeholder":
            if not _is_variable(node):
                continue
            arguments.append(name_of(node))
        elif node.op == "get_attr":
            names[name_of(node)] = _attribute(root, str(node.target))
        elif node.op == "output":
            lines.append(f"    return {text(list(phase.results))}")
        elif found.kind == "param_view":
            names[name_of(node)] = bound[node]
            if isinstance(bound[node], torch.Tensor):
                views[node] = bound[node]
        elif found.kind != "compute":
            key = f"{describe(node).split(' ')[0]}_{name_of(node)}"
            names[key] = bound[node]
            lines.append(f"    {_communication(node, key, text)}")
            drop(node)
        elif (view := fixed_view(node, simplified.arguments[node], views)) is not None:
            names[name_of(node)] = views[node] = view
            static.add(node)
        else:
            target, arguments_ = f"{name_of(node)} = " if node.users else "", simplified.arguments[node]
            if node.target is operator.getitem:
                lines.append(f"    {target}{text(arguments_[0])}[{text(arguments_[1])}]")
            else:
                call = ", ".join([text(a) for a in arguments_] + [f"{k}={text(v)}" for k, v in node.kwargs.items()])
                lines.append(f"    {target}{name_of_target(node, direct(node, arguments_), names)}({call})")
            drop(node)
    unused = [name_of(n) for n in phase.graph.find_nodes(op="placeholder") if n not in last_use and n not in static]
    head = [f"def {phase.name}(arguments):"]
    if arguments:
        head.append(f"    {', '.join(arguments)}{',' if len(arguments) == 1 else ''} = arguments")
    head.append("    arguments.clear()")
    if unused:
        head.append(f"    del {', '.join(unused)}")
    return Lowered("\n".join(head + lines) + "\n", names, phase.name)


def _is_variable(node: fx.Node) -> bool:
    """Whether the node's value is a local of the lowered function; buffers and views are bound beforehand."""
    found = info(node)
    if found.kind == "wait":
        return found.queue == "replicate" or found.flat is None
    return found.kind in (*ops.MODEL_KINDS, *ops.COLLECTIVES, "store_grad", "presence")


def _communication(node: fx.Node, key: str, text: Callable[[Any], str]) -> str:
    """What each kind passes at run time; its buffers are bound."""
    kind = info(node).kind
    if kind in ("flatten_grads", "keep_grads"):
        return f"{key}({text(list(node.args[0]))})"  # type: ignore[arg-type]
    if kind in ("all_gather", "reduce_scatter", "presence"):
        return f"{identifier(node.name)} = {key}()"
    if kind == "all_reduce":
        source = node.args[0]
        chained = isinstance(source, fx.Node) and info(source).kind == "wait"
        return f"{identifier(node.name)} = {key}({text(source) if chained else ''})"
    if kind == "store_grad":
        source = node.args[0]
        reduced = isinstance(source, fx.Node) and info(source).kind in ops.COLLECTIVES
        return f"{identifier(node.name)} = {key}({text(source) if reduced else ''})"
    if kind == "wait":
        target = f"{identifier(node.name)} = " if _is_variable(node) else ""
        return f"{target}{key}({text(node.args[0])})"
    if kind == "accumulate_grad":
        return f"{key}({text(node.args[2]) if len(node.args) > 2 else ''})"
    return f"{key}()"


def name_of_target(node: fx.Node, function: Callable[..., Any], names: dict[str, Any]) -> str:
    """A short global name for what is called for an operator: `aten_mm_default`."""
    target = node.target
    overload = isinstance(target, OpOverload)
    key = identifier(str(target) if overload else f"call_{getattr(target, '__name__', 'function')}")
    if names.get(key, function) is not function:
        key = f"{key}_{len(names)}"
    names[key] = function
    return key


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
