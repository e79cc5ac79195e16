"""Text form of a schedule: one operation a line, in issue order, in the column of its queue. No ids, addresses, paths,
ranks or times, so that it is the same on every machine and can be committed and compared."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.ir import ops
from fxshard.ir.nodes import bytes_text, describe, hint, info, takes_kept, user_line
from fxshard.ir.phase import Phase
from fxshard.ir.schedule import Schedule

LEVELS = ("units", "communication", "all")

WIDTH = 120
"""Events are wrapped to this many characters."""

WIDEST = 48
"""No column is wider; a longer cell runs into the next one, which is empty on its line."""


@dataclass(frozen=True)
class Row:
    """One line of a phase: an operation of a queue, the unit or FlatParameter it is of, and a note."""

    queue: str
    op: str
    name: str
    note: str = ""
    node: fx.Node | None = None
    """The (first) node it stands for."""

    def cell(self, name_width: int) -> str:
        return "  ".join(filter(None, (f"{self.op:<5}", f"{self.name:<{name_width}}", self.note))).rstrip()


def schedule_text(schedule: Schedule, level: str = "communication") -> str:
    """The whole schedule. `level` is one of `units`, `communication`, `all`; raises ValueError for another."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: allowed are {', '.join(map(repr, LEVELS))}")
    lines = header(schedule)
    if level == "units":
        for phase in schedule.phases:
            told = "  ".join(f"{label}\xa0{name}" for label, name in events(phase))  # a line never ends between the two
            lines += [phase.name, *(f"  {line}".replace("\xa0", " ") for line in textwrap.wrap(told, WIDTH - 2))]
    else:
        rows = {phase.name: phase_rows(phase, level) for phase in schedule.phases}
        columns = Columns(row for listed in rows.values() for row in listed)
        for name, listed in rows.items():
            lines += [name, f"  {columns.titles}", *(f"  {columns.line(row)}" for row in listed)]
    lines.append(memory_line(schedule))
    return "\n".join(lines)


def header(schedule: Schedule) -> list[str]:
    """World, passes and the table of units."""
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
    return lines


def memory_line(schedule: Schedule) -> str:
    memory = schedule.memory
    if "memory-planned" not in schedule.established:
        return "memory  not planned"
    return (
        f"memory  arena {bytes_text(memory.arena_bytes)}  residents {bytes_text(memory.resident_bytes)}"
        f"  peak gathered {bytes_text(memory.peak_gathered_bytes)}"
        f"  peak gradients {bytes_text(memory.peak_gradient_bytes)}"
        + (f"  arena on the host {bytes_text(memory.host_bytes)}" if schedule.offloaded else "")
        + (f"  weights kept {bytes_text(memory.saved_weight_bytes)}" if memory.saved_weight_bytes else "")
        + (f"  gradients kept {bytes_text(memory.kept_bytes)}" if memory.kept_bytes else "")
    )


def phase_rows(phase: Phase, level: str = "communication") -> list[Row]:
    """One row a communication node; the operators between them are one row a unit, or one each at level `all`."""
    word = "GRAD" if phase.name == "backward" else "FWD"
    rows = []
    for unit, nodes in phase.steps():
        if info(nodes[0]).kind in ops.LABELS:
            rows.append(_communication(nodes[0]))
        elif level == "all":
            rows += [Row("compute", word, unit, _operator(n), n) for n in nodes]
        else:
            rows.append(Row("compute", word, unit, f"{len(nodes)} op{'s' if len(nodes) > 1 else ''}", nodes[0]))
    return rows


def _communication(node: fx.Node) -> Row:
    found = info(node)
    note = ""
    if found.kind == "throttle":  # it holds back the AG on the next line
        return Row(found.queue, ops.LABELS[found.kind], "", f"after {describe(node.args[0])}", node)  # type: ignore[arg-type]
    if found.kind == "wait":
        note = f"for {ops.LABELS[info(node.args[0]).kind]}"  # type: ignore[arg-type]
    elif found.num_bytes:
        note = bytes_text(found.num_bytes) + ("  and what was kept" if takes_kept(node) else "")
    return Row(found.queue, ops.LABELS[found.kind], found.label, note, node)


def _operator(node: fx.Node) -> str:
    """`mm_1 = mm.default(view, t) float32[8, 64]  model.py:41`."""
    inputs = ", ".join(n.name for n in node.all_input_nodes)
    value = node.meta.get("val")
    shape = ""
    if isinstance(value, torch.Tensor):
        shape = f" {str(value.dtype).removeprefix('torch.')}{[hint(size) for size in value.shape]}"
    line = user_line(node)
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({inputs}){shape}" + (line and f"  {line}")


class Columns:
    """Where the columns of some rows stand: a column a queue, as wide as its widest cell."""

    def __init__(self, rows: Iterable[Row]):
        rows = list(rows)
        self.names = {q: max((len(r.name) for r in rows if r.queue == q), default=0) for q in ops.QUEUE_ORDER}
        self.starts: dict[str, int] = {}
        start = 0
        for queue in [q for q in ops.QUEUE_ORDER if any(r.queue == q for r in rows)] or ["compute"]:
            self.starts[queue] = start
            cells = [len(r.cell(self.names[queue])) for r in rows if r.queue == queue]
            start += min(max([len(queue), *cells]), WIDEST) + 2

    @property
    def titles(self) -> str:
        line = ""
        for queue, start in self.starts.items():
            line = f"{line:<{start}}{queue}"
        return line

    def line(self, row: Row) -> str:
        return " " * self.starts[row.queue] + row.cell(self.names[row.queue])


def around(phase: Phase, node: fx.Node, context: int = 2) -> list[str]:
    """The lines of the phase around a node, the node's own marked with `>`; nothing for a placeholder or the output."""
    rows: list[Row] = []
    place = None
    for row, (_, nodes) in zip(phase_rows(phase), phase.steps()):
        if node in nodes or (place is None and info(node).kind == "param_view" and row.name == info(node).flat):
            place = len(rows)
        rows.append(row)
    if place is None:
        return []
    first = max(0, place - context)
    near = rows[first : place + context + 1]
    columns = Columns(near)
    return [f"{'>' if first + i == place else ' '} {columns.line(row)}" for i, row in enumerate(near)]


def events(phase: Phase) -> list[tuple[str, str]]:
    """The phase as the FSDP paper's Figure 5 tells it: collectives and the work of units, in issue order.

    `("AG", "layers.0"), ("F", "layers.0"), ...`; F is forward, B backward. The work of a unit is told once a visit, at its
    WAIT if it has one: operators of the unit that come before, as they read no parameter, are not told apart.
    """
    word = "B" if phase.name == "backward" else "F"
    told: list[tuple[str, str]] = []
    waits = [n for n in phase.waits if info(n.args[0]).kind == "all_gather"]  # type: ignore[arg-type]
    to_come = {info(n).unit for n in waits}
    last: str | None = None
    for unit, nodes in phase.steps():
        found = info(nodes[0])
        if found.kind in ops.COLLECTIVES:
            told.append((ops.LABELS[found.kind], found.label))
            continue
        starts = nodes[0] in waits and found.unit in to_come
        if starts:
            to_come.discard(found.unit)
            unit = found.unit or ""
        if starts or (found.kind == "compute" and unit and unit != last and unit not in to_come):
            told.append((word, unit))
            last = unit
    return told
