"""Rules about what was there before: the model as it was captured, and the order that ranks agreed on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxshard.ir import ops
from fxshard.ir.aliasing import has_effect, is_random
from fxshard.ir.nodes import describe, info
from fxshard.ir.phase import Phase
from fxshard.ir.rules import Problem
from fxshard.ir.schedule import Schedule, operator_marks


def effects_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Random operators and writes to buffers run once each, in the order in which they were captured."""
    wanted = schedule.origin[phase.name].effects
    there = [n for n in phase.graph.nodes if has_effect(n)]
    names = [n.name for n in there]
    if tuple(names) == wanted:
        return []
    problems: list[Problem] = []
    known, seen = set(wanted), set()
    for node in there:
        what = "random" if is_random(node) else "a write"
        if node.name not in known:
            problems.append((node, f"{describe(node)} is {what} and was not there when {phase.name} was captured"))
        seen.add(node.name)
    lost = [name for name in wanted if name not in seen]
    problems += [
        (phase.output, f"'{name}', random or a write, was captured in {phase.name} and is lost") for name in lost
    ]
    kept = [name for name in wanted if name in seen]
    for node, name in zip([n for n in there if n.name in known], kept):
        if node.name != name:
            problems.append((node, f"{describe(node)} runs where '{name}' ran when {phase.name} was captured"))
            break
    return problems


def operators_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """The model's operators are those that were captured, each with its own inputs; only their order may be another."""
    wanted = schedule.origin[phase.name].operators
    there = operator_marks(phase)
    problems: list[Problem] = []
    for node, mark in there.items():
        if (was := wanted.get(node.name)) is None:
            problems.append((node, f"{describe(node)} was not there when {phase.name} was captured"))
        elif was != mark:
            problems.append(
                (
                    node,
                    f"{describe(node)} is not what it was when {phase.name} was captured: other inputs, or another operator",
                )
            )
    names = {node.name for node in there}
    problems += [(phase.output, f"operator '{name}' of {phase.name} is lost") for name in wanted if name not in names]
    return problems


def results_as_captured(schedule: Schedule, phase: Phase) -> list[Problem]:
    """A phase returns what it was captured with: outputs, buffers' new values, saved values, gradients of inputs."""
    wanted, there = schedule.origin[phase.name].results, phase.results
    if len(there) != len(wanted):
        return [(phase.output, f"{phase.name} returns {len(there)} values, not the {len(wanted)} it was captured with")]
    problems: list[Problem] = []
    for position, (value, name) in enumerate(zip(there, wanted)):
        found = value.name if isinstance(value, fx.Node) else None
        handed_over = phase.name == "backward" and position in schedule.parameter_outputs and found is None
        if found != name and not handed_over:
            node = value if isinstance(value, fx.Node) else phase.output
            problems.append(
                (node, f"{phase.name} returns {found or 'nothing'} where it returned '{name}', value {position}")
            )
    return problems


def order_is_agreed_on(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Where ranks have agreed on the communication, it is in that order: same collectives, units, bytes and groups."""
    if schedule.agreed is None:
        return []
    wanted = [line for line in schedule.agreed if line.startswith(f"{phase.name} ")]
    return first_difference(schedule, phase, wanted, "was agreed on")


def first_difference(schedule: Schedule, phase: Phase, wanted: Sequence[str], said: str) -> list[Problem]:
    """Where the collectives of a phase part from `wanted`, lines of a skeleton; `said` tells what those are."""
    nodes = [n for n in phase.graph.nodes if info(n).kind in ops.GROUPS]
    lines = schedule.skeleton(phase.name)
    for node, line, other in zip(nodes, lines, wanted):
        if line != other:
            return [(node, f"'{line}' is issued where '{other}' {said}")]
    if len(lines) != len(wanted):
        node = nodes[len(wanted)] if len(lines) > len(wanted) else phase.output
        return [
            (
                node,
                f"{len(lines)} collectives are issued in {phase.name}, where {len(wanted)} {said.removeprefix('is ')}",
            )
        ]
    return []
