"""From AOTAutograd's partitioned graphs to phases: parameters marked, saved values mended, gradients found.

[Note: saved values]
The partitioner may save anything forward computed. Four rules are put on top of it.
(a) Nothing saved aliases gathered storage: it would keep a unit's full weights alive from forward to backward.
(b) A value that depends on parameters and constants alone (`w.t()`, a cast) is computed again in backward from the
    parameter, unless it is small beside it (the norm of a weight norm).
(c) Buffers are never constants (spectral norm mutates them) and random operators are never run twice.
(d) A weight made from data, `(w * x.mean()).t()`, cannot be computed again from the parameter: it is saved, and said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.capture import torch_private
from fxshard.capture.attribution import stamp_units
from fxshard.errors import CaptureError
from fxshard.ir.aliasing import alias_roots, aliased_inputs, is_random, mutated_inputs
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import INFO, NodeInfo, flatten_nodes, hint, info, tensor_bytes, user_line
from fxshard.ir.phase import Phase

SMALL_FRACTION = 16
"""A parameter-only value at least this many times smaller than its largest parameter is saved, not recomputed."""


@dataclass
class Captured:
    """The phases of one call signature before any pass.

    In both phases a parameter is a placeholder of kind `parameter`. `gradients` maps each trainable parameter that the
    outputs reach to its gradient node in backward; `reach` to the indices of the tangents it depends on. `made_weights`
    are the values of (d) in [Note: saved values]: the parameter's name, bytes, and the user's line.
    """

    forward: Phase
    backward: Phase | None
    gradients: dict[str, fx.Node]
    reach: dict[str, frozenset[int]]
    parameter_outputs: frozenset[int]
    made_weights: list[tuple[str, int, str]]


def mark_parameters(
    graph: fx.Graph, names: Mapping[int, str], index_of: Mapping[fx.Node, int | None]
) -> dict[str, fx.Node]:
    """Stamp the placeholders of a forward graph; returns the parameter placeholders by name."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        fqn = names.get(index_of[node]) if index_of[node] is not None else None  # type: ignore[arg-type]
        if fqn is None:
            node.meta[INFO] = NodeInfo("argument")
        else:
            node.meta[INFO] = NodeInfo("parameter", fqn=fqn)
            found[fqn] = node
    return found


def refuse_parameter_effects(forward: fx.Graph, num_outputs: int) -> None:
    """A parameter may be neither written to in forward nor returned, nor any view of it: there is no whole one to hand
    out."""
    for node in forward.nodes:
        for target in mutated_inputs(node):
            for root in alias_roots(target):
                if info(root).kind == "parameter":
                    raise CaptureError(
                        f"parameter '{info(root).fqn}' is changed in place by forward{_where(node)}. "
                        "Change parameters outside forward, under torch.no_grad()"
                    )
    output = next(iter(reversed(forward.nodes)))
    for value in output.args[0][:num_outputs]:
        if isinstance(value, fx.Node):
            for root in alias_roots(value):
                if info(root).kind == "parameter":
                    raise CaptureError(
                        f"forward returns parameter '{info(root).fqn}' or a view of it{_where(value)}; its gathered "
                        "memory is freed after use. Return a clone, or use parameter.full_tensor() outside forward"
                    )


def _where(node: fx.Node) -> str:
    line = user_line(node)
    return f" ({line})" if line else ""


def _parameter_only(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Nodes computed from parameters, constants and symbolic sizes alone, with the parameters they read."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if info(node).kind == "parameter":
                sources[node] = {node}
            elif _is_symbol(node):
                sources[node] = set()
        elif node.op == "get_attr":
            sources[node] = set()
        elif node.op == "call_function" and not is_random(node) and not mutated_inputs(node):
            inputs = node.all_input_nodes
            if all(i in sources for i in inputs):
                sources[node] = set().union(*(sources[i] for i in inputs))
            elif _is_symbol(node):
                sources[node] = set()
    return sources


def _like_a_weight(graph: fx.Graph) -> dict[fx.Node, str]:
    """Values of a parameter's shape made from it element by element, transposed or not, with the parameter's name."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if info(node).kind == "parameter":
            found[node] = info(node).fqn or ""
        elif aliased_inputs(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            sources = [i for i in node.all_input_nodes if i in found and _sizes(i) == _sizes(node)]
            if sources:
                found[node] = found[sources[0]]
    return found


def _sizes(node: fx.Node) -> list[int]:
    """The sizes of a node's value without their order."""
    value = node.meta.get("val")
    return sorted(map(hint, value.shape)) if isinstance(value, torch.Tensor) else []


def _is_symbol(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def mend_saved_values(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> list[tuple[str, int, str]]:
    """Apply [Note: saved values]: rewrite what forward hands to backward, in place in both graphs.

    Returns what (d) says is saved.
    """
    output = next(iter(reversed(forward.nodes)))
    results = list(output.args[0])
    saved = results[num_outputs:]
    holders = list(backward.find_nodes(op="placeholder"))
    by_name = {n.name: n for n in holders}
    sources = _parameter_only(forward)
    copied: dict[fx.Node, fx.Node] = {}
    anchor = next(n for n in backward.nodes if n.op != "placeholder")
    symbols = [v for v in saved if isinstance(v, fx.Node) and _is_symbol(v)]

    def parameter_in_backward(node: fx.Node) -> fx.Node:
        with backward.inserting_before(anchor):
            holder = backward.create_node("placeholder", node.name + "_bw", name=node.name + "_bw")
        holder.meta = {**node.meta, INFO: NodeInfo("parameter", fqn=info(node).fqn)}
        return holder

    def in_backward(node: fx.Node) -> fx.Node:
        if node in copied:
            return copied[node]
        if info(node).kind == "parameter":
            copied[node] = parameter_in_backward(node)
        elif _is_symbol(node) and node.name in by_name:
            copied[node] = by_name[node.name]
        elif _is_symbol(node):
            with backward.inserting_before(next(h for h in holders if not _is_symbol(h))):
                holder = backward.create_node("placeholder", node.name, name=node.name)
            holder.meta = dict(node.meta)
            symbols.append(node)
            by_name[node.name] = copied[node] = holder
        else:
            for source in node.all_input_nodes:
                in_backward(source)
            with backward.inserting_before(anchor):
                copied[node] = backward.node_copy(node, lambda n: copied[n])
            copied[node].meta = dict(node.meta)
        return copied[node]

    kept = []
    for value in saved:
        if not isinstance(value, fx.Node) or _is_symbol(value):
            continue
        read = sources.get(value)
        roots = {info(r).fqn for r in alias_roots(value) if info(r).kind == "parameter"}
        if read:
            largest = max(tensor_bytes(p) for p in read)
            if not roots and tensor_bytes(value) * SMALL_FRACTION <= largest:
                kept.append(value)
                continue
            holder = by_name[value.name]
            holder.replace_all_uses_with(in_backward(value))
            backward.erase_node(holder)
        elif roots:
            raise CaptureError(
                f"a value kept for backward{_where(value)} is a view of parameter {sorted(map(str, roots))} that "
                "depends on data; it would keep the gathered unit alive. Clone it in forward"
            )
        else:
            kept.append(value)
    for node in reversed(list(copied.values())):  # next to its first use: the parameter is gathered no earlier
        if node.op != "placeholder" and node.users:
            min(node.users).prepend(node)
    # AOTAutograd's order: forward hands out tensors then sizes; backward takes sizes then tensors.
    output.args = (tuple(results[:num_outputs] + kept + symbols),)
    weights = _like_a_weight(forward)
    return [(weights[v], tensor_bytes(v), user_line(v)) for v in kept if v in weights and not sources.get(v)]


def build_phases(
    forward_graph: fx.Graph,
    backward_graph: fx.Graph | None,
    names: Mapping[int, str],
    index_of: Mapping[fx.Node, int | None],
    num_outputs: int,
    flats: Mapping[str, FlatParameter],
    modules: Mapping[int, str],
) -> Captured:
    """Mark, mend and collect. `names` maps argument index to parameter fqn, `modules` the id of a module to its name."""
    parameters = mark_parameters(forward_graph, names, index_of)
    refuse_parameter_effects(forward_graph, num_outputs)
    flat_of = {fqn: flat for flat in flats.values() for fqn in flat.fqns}
    for fqn, node in parameters.items():
        _stamp(node, fqn, flat_of)
    forward = Phase("forward", forward_graph, flats)
    if backward_graph is None:
        stamp_units(forward_graph, None, modules, flats.values())
        forward.name = "inference"
        return Captured(forward, None, {}, {}, frozenset(), [])
    made_weights = mend_saved_values(forward_graph, backward_graph, num_outputs)
    for node in backward_graph.find_nodes(op="placeholder"):
        if info(node).kind == "parameter":
            _stamp(node, info(node).fqn or "", flat_of)
        else:
            node.meta[INFO] = NodeInfo("tangent" if torch_private.is_tangent(node) else "argument")
    _erase_unused(backward_graph)
    stamp_units(forward_graph, backward_graph, modules, flats.values())
    backward = Phase("backward", backward_graph, flats)
    gradients = {}
    results = backward.results
    order = [n for n in forward_graph.find_nodes(op="placeholder") if torch_private.may_get_gradient(n)]
    positions = set()
    for position, (placeholder, gradient) in enumerate(zip(order, results)):
        if info(placeholder).kind == "parameter":
            positions.add(position)
            if isinstance(gradient, fx.Node):
                gradients[info(placeholder).fqn or ""] = gradient
    depends = tangent_dependence(backward_graph, backward.nodes("tangent"))
    reach = {fqn: depends.get(node, frozenset()) for fqn, node in gradients.items()}
    return Captured(forward, backward, gradients, reach, frozenset(positions), made_weights)


def _stamp(node: fx.Node, fqn: str, flat_of: Mapping[str, FlatParameter]) -> None:
    flat = flat_of[fqn]
    node.meta[INFO] = NodeInfo("parameter", flat.name, flat.unit, fqn=fqn)


def _erase_unused(graph: fx.Graph) -> None:
    """Drop dead operators; writes (a buffer updated in backward) stay."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not mutated_inputs(node):
            graph.erase_node(node)


def tangent_dependence(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """Which tangents (by position) each node depends on."""
    result: dict[fx.Node, frozenset[int]] = {t: frozenset({i}) for i, t in enumerate(tangents)}
    for node in graph.nodes:
        if node.op == "call_function":
            found = frozenset().union(*(result.get(n, frozenset()) for n in flatten_nodes((node.args, node.kwargs))))
            if found:
                result[node] = found
    return result
