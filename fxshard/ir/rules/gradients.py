"""Rules about gradients: reduced and divided once, and nothing of padding in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import describe, hint, info, takes_kept
from fxshard.ir.phase import Phase
from fxshard.ir.rules import Problem
from fxshard.ir.schedule import Schedule


def reduced_exactly_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """Each gradient enters one FLAT, one RS if F > 1, one AR if replicas > 1, one STORE if it goes to the host, one ACC, and
    leaves no other way. What stays behind for a later backward enters one KEEP instead: of whole gradients, or after the RS.
    What earlier backwards kept enters once too."""
    if phase.name != "backward":
        return []
    problems: list[Problem] = []
    entered: dict[str, int] = {}
    keep = schedule.accumulation.keep
    for node in _entries(phase):
        flat = schedule.flats[info(node).flat or ""]
        for fqn, gradient in zip(flat.fqns, node.args[0]):  # type: ignore[arg-type]
            if gradient is None:
                continue
            if gradient is not schedule.gradients.get(fqn):
                problems.append(
                    (node, f"what is reduced as the gradient of '{fqn}' is {describe(gradient)}, another value")
                )
            entered[fqn] = entered.get(fqn, 0) + 1
        kind = info(node).kind
        if (kind == "keep_grads") != (keep == "unsharded"):
            problems.append(
                (node, f"{describe(node)} is of a backward that {schedule.accumulation or 'keeps nothing'}")
            )
        if kind == "flatten_grads":
            problems += _chain(schedule, phase, flat, node)
    problems += _taken_once(schedule, phase)
    asked = [
        n.meta["gradients"]
        for n in phase.nodes("presence")
        if n.args[0] == [g is not None for g in n.meta["gradients"]]
    ]
    needed = schedule.needs_presence and not keep
    if needed != (len(asked) == 1) or len(phase.nodes("presence")) != len(asked):
        text = "outputs reach different parameters" if schedule.needs_presence else "outputs reach the same parameters"
        text = "nothing reaches .grad here" if keep else text
        problems.append((phase.output, f"{text}, and {len(asked)} right ANY ask which gradients exist"))
    names = {id(g): fqn for fqn, g in schedule.gradients.items()}
    for position in schedule.parameter_outputs:
        result = phase.results[position]
        if isinstance(result, fx.Node):
            problems.append(
                (result, f"the gradient of '{names.get(id(result), result.name)}' also leaves as an output")
            )
    for fqn in schedule.gradients:
        if entered.get(fqn, 0) != 1:
            problems.append((phase.output, f"the gradient of '{fqn}' is reduced {entered.get(fqn, 0)} times, not once"))
    return problems


def _chain(schedule: Schedule, phase: Phase, flat: FlatParameter, start: fx.Node) -> list[Problem]:
    """What is wrong between a FLAT and where its gradient ends."""
    problems: list[Problem] = []
    value = made = start
    keep = schedule.accumulation.keep == "sharded"
    for kind, needed in (("reduce_scatter", flat.F > 1), ("all_reduce", schedule.replicas > 1 and not keep)):
        found = phase.nodes(kind, flat.name)
        if len(found) != int(needed):
            problems.append((start, f"'{flat.name}' has {len(found)} {kind}, not {int(needed)}"))
            continue
        if needed:
            if found[0].args[0] is not value:
                problems.append((found[0], f"{kind} of '{flat.name}' does not read what comes before it"))
            made, value = found[0], next(iter(found[0].users), found[0])
    if schedule.offloaded and not keep:
        stores = phase.nodes("store_grad", flat.name)
        if len(stores) == 1 and stores[0].args[0] is made:
            value = next(iter(stores[0].users), stores[0])
        else:
            problems.append((start, f"the reduced gradient of '{flat.name}' is not brought to the host by one STORE"))
    accumulated, kept = phase.nodes("accumulate_grad", flat.name), phase.nodes("keep_shard", flat.name)
    if not keep:
        texts = ((n, _wrong_flags(schedule, n, list(start.args[0]))) for n in accumulated)  # type: ignore[arg-type]
        problems += [(n, text) for n, text in texts if text]
    ends, others = (kept, accumulated) if keep else (accumulated, kept)
    if len(ends) != 1 or others or ends[0].args[0] is not value:
        where = "what is kept of its shard" if keep else ".grad"
        problems.append((start, f"the reduced gradient of '{flat.name}' does not reach {where} exactly once"))
    return problems


def _taken_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """What earlier backwards kept is added by one FLAT, or one AR, and by nothing else."""
    problems: list[Problem] = []
    for kind, flats in (
        ("flatten_grads", schedule.accumulation.kept),
        ("all_reduce", schedule.accumulation.kept_shards),
    ):
        taking = [node for node in phase.nodes(kind) if takes_kept(node)]
        took = [info(node).flat for node in taking]
        problems += [
            (node, f"{describe(node)} adds what was kept of '{info(node).flat}', and nothing was")
            for node in taking
            if info(node).flat not in flats
        ]
        problems += [
            (phase.output, f"what earlier backwards kept of '{flat}' is added {took.count(flat)} times, not once")
            for flat in sorted(flats)
            if took.count(flat) != 1
        ]
    return problems


def _wrong_flags(schedule: Schedule, accumulate: fx.Node, gradients: list[object]) -> str:
    """What is wrong with where ACC looks up which of its gradients exist on any rank; '' if nothing."""
    if not schedule.needs_presence:
        return ""
    if len(accumulate.args) < 4:
        return f"{describe(accumulate)} does not ask which gradients exist on any rank"
    present: Any = accumulate.args[2]
    start: Any = accumulate.args[3]
    listed = present.args[0].meta["gradients"][start : start + len(gradients)]
    return "" if listed == gradients else f"{describe(accumulate)} asks about other gradients than its own"


def divided_exactly_once(schedule: Schedule, phase: Phase) -> list[Problem]:
    """FLAT, or KEEP, divides a gradient by the schedule's divisor. That no operator does, too, is another rule's."""
    wanted = f"the {schedule.num_batches} ranks that bring a batch"
    if schedule.gradient_divisor is not None:
        wanted = f"gradient_divisor={schedule.gradient_divisor}"
    return [
        (node, f"{describe(node)} divides by {node.args[4]}, not by {wanted}")
        for node in _entries(phase)
        if node.args[4] != schedule.divisor
    ]


def _entries(phase: Phase) -> list[fx.Node]:
    """Where gradients enter what fxshard does with them: a FLAT, or the KEEP of unsharded ones."""
    return [*phase.nodes("flatten_grads"), *phase.nodes("keep_grads")]


def padding_stays_outside(schedule: Schedule, phase: Phase) -> list[Problem]:
    """No gradient and no view reaches into padding or into another parameter's place."""
    problems = []
    ends = {p.fqn: o + p.numel for f in schedule.flats.values() for p, o in zip(f.parameters, f.offsets)}
    for view in phase.nodes("param_view"):
        place: Any = view.args
        _, fqn, offset, shape, stride = place
        end = offset + (1 + sum((n - 1) * step for n, step in zip(shape, stride)) if 0 not in shape else 0)
        if end > ends.get(str(fqn), 0):
            problems.append((view, f"{describe(view)} reaches to element {end}, its parameter to {ends.get(str(fqn))}"))
    for node in _entries(phase):
        flat = schedule.flats[info(node).flat or ""]
        for fqn, following in zip(flat.fqns, [*flat.offsets[1:], flat.padded_numel]):
            if ends[fqn] > following:
                text = f"'{fqn}' reaches to element {ends[fqn]} of '{flat.name}', over what begins at {following}"
                problems.append((node, text))
        for p, gradient in zip(flat.parameters, node.args[0]):  # type: ignore[arg-type]
            value = gradient.meta.get("val") if isinstance(gradient, fx.Node) else None
            if isinstance(value, torch.Tensor) and tuple(map(hint, value.shape)) != p.shape:
                shape = list(map(hint, value.shape))
                problems.append((node, f"the gradient of '{p.fqn}' has shape {shape}, the parameter {list(p.shape)}"))
    return problems
