"""Text form of a schedule: one operation a line, in issue order, fixed columns. No ids, addresses, paths, ranks or
times."""

from __future__ import annotations

from torch import fx

from fxshard.ir import ops
from fxshard.ir.schedule import Phase, Schedule, bytes_text, describe, info

LEVELS = ("units", "communication", "all")


def schedule_text(schedule: Schedule, level: str = "communication") -> str:
    """The whole schedule. `level` is one of `units`, `communication`, `all`; raises ValueError for another."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: allowed are {', '.join(map(repr, LEVELS))}")
    lines = [f"schedule  W={schedule.W}  F={schedule.F}  replicas={schedule.replicas}"]
    lines += [f"# {record.text}" for record in schedule.history]
    width = max((len(flat) for flat in schedule.flats), default=4)
    lines.append("units")
    for flat in schedule.flats.values():
        dtype = str(flat.dtype).removeprefix("torch.")
        extra = (
            "" if flat.param_dtype == flat.dtype else f"  gathered as {str(flat.param_dtype).removeprefix('torch.')}"
        )
        extra += "  resident" if flat.name in schedule.resident else ""
        extra += "" if flat.requires_grad else "  frozen"
        lines.append(
            f"  {flat.name:<{width}}  {len(flat.parameters):>4} parameters  {flat.numel:>12,} {dtype}"
            f"  {bytes_text(flat.shard_numel * flat.dtype.itemsize)} a rank{extra}"
        )
    if level != "units":
        for phase in schedule.phases:
            lines += phase_lines(phase, width, every=level == "all")
    memory = schedule.memory
    lines.append(
        f"memory  arena {bytes_text(memory.arena_bytes)}  residents {bytes_text(memory.resident_bytes)}"
        f"  peak gathered {bytes_text(memory.peak_gathered_bytes)}"
        f"  peak gradients {bytes_text(memory.peak_gradient_bytes)}"
        + (f"  weights kept {bytes_text(memory.saved_weight_bytes)}" if memory.saved_weight_bytes else "")
    )
    return "\n".join(lines)


def phase_lines(phase: Phase, width: int, every: bool = False) -> list[str]:
    """One line a communication node; runs of the model's operators become one line named after the unit they read."""
    word = "GRAD" if phase.name == "backward" else "FWD"
    lines = [phase.name]
    for unit, nodes in phase.steps():
        if info(nodes[0]).kind in ops.LABELS:
            lines.append(_line(nodes[0], width))
        elif every:
            lines += [f"  {'compute':<9}  {'op':<5}  {unit:<{width}}  {n.name} = {describe(n)}" for n in nodes]
        else:
            lines.append(
                f"  {'compute':<9}  {word:<5}  {unit:<{width}}  {len(nodes)} operator{'s' if len(nodes) > 1 else ''}"
            )
    return lines


def _line(node: fx.Node, width: int) -> str:
    found = info(node)
    note = ""
    if found.kind == "throttle":
        note = f"after {describe(node.args[0])}"  # type: ignore[arg-type]
    elif found.kind == "wait":
        note = f"for {describe(node.args[0])}"  # type: ignore[arg-type]
    elif found.num_bytes:
        note = bytes_text(found.num_bytes)
    return f"  {found.queue:<9}  {ops.LABELS[found.kind]:<5}  {found.flat or '':<{width}}  {note}".rstrip()
