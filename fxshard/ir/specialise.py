"""Backward for the outputs that got a gradient: the part below a missing tangent is pruned, the communication stays.

AOTAutograd hands the backward zeros for an output the loss did not use. Zeros times infinity (a sqrt at 0) is NaN where
eager never computed anything, and a parameter that eager leaves without gradient would get zeros, and weight decay.

The backward graph is linear in its tangents; a custom autograd.Function may break that, a limit the README states. So a
node all of whose tangent-dependent inputs are known to be absent is absent itself; where an absent value meets a present
one, an addition takes the present one and any other operator real zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard.ir.aliasing import mutated_inputs
from fxshard.ir.nodes import flatten_nodes, info
from fxshard.ir.phase import Phase

aten = torch.ops.aten


def specialise(phase: Phase, given: Sequence[bool]) -> Phase:
    """A copy of a scheduled backward phase for tangents `given` (one flag each); every communication node is kept."""
    result, mapping = phase.copy()
    graph = result.graph
    tangents = result.nodes("tangent")
    assert len(tangents) == len(given), f"{len(tangents)} tangents, {len(given)} flags"
    absent: set[fx.Node] = {t for t, flag in zip(tangents, given) if not flag}
    depends: set[fx.Node] = set(tangents)
    for node in list(graph.nodes):
        if node.op == "output":
            node.args = (tuple(None if n in absent else n for n in node.args[0]),)
            continue
        if node.op != "call_function":
            continue
        inputs = set(flatten_nodes((node.args, node.kwargs)))
        kind = info(node).kind
        if kind in ("flatten_grads", "keep_grads"):
            node.update_arg(0, [None if g in absent else g for g in node.args[0]])
            continue
        if kind != "compute" or not inputs & depends:
            continue
        depends.add(node)
        moving = inputs & depends
        if moving <= absent:
            if not mutated_inputs(node):
                absent.add(node)
        elif moving & absent:
            _meet(graph, node, absent)
    for node in result.nodes("presence"):  # issued first, but about gradients that come later
        gradients = [None if g is None else mapping[g] for g in node.meta["gradients"]]
        node.update_arg(0, [g is not None and g not in absent for g in gradients])
    for node in reversed(graph.nodes):
        dead = node.op == "call_function" and not node.users and info(node).kind in ("compute", "param_view")
        if dead and not mutated_inputs(node):
            graph.erase_node(node)
    return result


def _meet(graph: fx.Graph, node: fx.Node, absent: set[fx.Node]) -> None:
    """An absent input beside a present one: an addition of equal shapes becomes the present one, else zeros are
    made."""
    if node.target is aten.add.Tensor and not node.kwargs:
        left, right = node.args[0], node.args[1]
        present = right if left in absent else left
        if isinstance(present, fx.Node) and _same_kind(present, node):
            node.replace_all_uses_with(present)
            return
    for source in [n for n in node.all_input_nodes if n in absent]:
        value = source.meta["val"]
        with graph.inserting_before(node):
            if all(isinstance(size, int) for size in value.shape):
                keywords = {"dtype": value.dtype, "device": value.device}
                zeros = graph.call_function(aten.zeros.default, (list(value.shape),), keywords)
            else:  # a symbolic size is only known from the value itself
                zeros = graph.call_function(aten.zeros_like.default, (source,))
        zeros.meta = {"val": value}
        node.replace_input_with(source, zeros)


def _same_kind(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype
