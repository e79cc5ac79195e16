"""Which unit's code an operator is: told by the module it was traced in, once, when it is captured.

An operator belongs to the unit that owns the parameters of its module, or of the nearest module around it whose
parameters are all of one unit. Where there is none (a loss, an addition between blocks) it belongs to the unit whose
parameter it reads, and else to the unit of the operator before it. A backward operator belongs to the unit of the
forward operator it differentiates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fxshard.capture import torch_private
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import INFO, NodeInfo, info


def stamp_units(
    forward: fx.Graph, backward: fx.Graph | None, modules: Mapping[int, str], flats: Iterable[FlatParameter]
) -> None:
    """Stamp every operator of both graphs with its unit. `modules` maps the `id` of each module to its name."""
    owners = _owners(flats)
    by_sequence: dict[int, str] = {}
    unit = ""
    before: list[fx.Node] = []  # operators ahead of the first one whose unit is known
    for node in forward.nodes:
        if node.op == "call_function":
            unit = _own(node, modules, owners) or unit
            if not unit:
                before.append(node)
                continue
            for waiting in before:
                _stamp(waiting, unit, by_sequence)
            before = []
            _stamp(node, unit, by_sequence)
    if backward is None:
        return
    for node in backward.nodes:
        if node.op == "call_function":
            sequence = torch_private.sequence_number(node)
            known = None if _sums_gradients(node) or sequence is None else by_sequence.get(sequence)
            unit = _own(node, modules, owners) or known or unit
            _stamp(node, unit, {})


def _owners(flats: Iterable[FlatParameter]) -> dict[str, set[str]]:
    """The units that own parameters under each module name; '' is the whole model."""
    owners: dict[str, set[str]] = {}
    for flat in flats:
        for p in flat.parameters:
            for name in (p.fqn, *p.aliases):
                while name:
                    name = name.rpartition(".")[0]
                    owners.setdefault(name, set()).add(flat.unit)
    return owners


def _own(node: fx.Node, modules: Mapping[int, str], owners: Mapping[str, set[str]]) -> str | None:
    """The unit by the operator's module, or by the parameters it reads; None if neither settles it."""
    name = next((modules[i] for i in reversed(torch_private.module_ids(node)) if i in modules), "")
    while name and len(owners.get(name, ())) == 0:
        name = name.rpartition(".")[0]
    found = owners.get(name, set())
    if len(found) != 1:
        found = {unit for i in node.all_input_nodes if info(i).kind == "parameter" and (unit := info(i).unit)}
    return next(iter(found)) if len(found) == 1 else None


def _sums_gradients(node: fx.Node) -> bool:
    """Whether autograd made it to add the gradients of a value used twice: it carries some other operator's number."""
    return node.target is torch.ops.aten.add.Tensor and not torch_private.module_ids(node)


def _stamp(node: fx.Node, unit: str, by_sequence: dict[int, str]) -> None:
    node.meta[INFO] = NodeInfo("compute", unit=unit or None)
    if (number := torch_private.sequence_number(node)) is not None:
        by_sequence[number] = unit
