"""What differs between two schedules: settings, units, the order of operations, memory."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir.schedule import Schedule
from fxshard.ir.text import Columns, Row, header, memory_line, phase_rows


@dataclass(frozen=True)
class Change:
    """One operation that stands elsewhere (`<` from here, `>` to here), or only in one schedule (`-` in the first, `+` in
    the second); a space for what both have in the same place."""

    mark: str
    phase: str
    row: Row


@dataclass(frozen=True)
class ScheduleDiff:
    """`fxshard.diff(a, b)`. True where the schedules differ; `print` shows how, `render` draws it."""

    a: Schedule
    b: Schedule
    changes: tuple[Change, ...]
    """Every operation of both, in order."""
    settings: tuple[str, ...]
    """Lines of the headers and of the memory plan that differ, marked `-` and `+`."""

    renderer: ClassVar[Callable[[Schedule, Schedule, str], None] | None] = None

    def __bool__(self) -> bool:
        return bool(self.settings) or any(change.mark != " " for change in self.changes)

    def count(self, mark: str) -> int:
        """How many operations have this mark."""
        return sum(change.mark == mark for change in self.changes)

    def text(self, context: int = 2) -> str:
        """What differs, with `context` operations around each place."""
        if not self:
            return "no difference"
        moved, removed, added = (self.count(mark) for mark in "<-+")
        lines = [f"{moved} moved, {removed} removed, {added} added", *self.settings]
        for phase in dict.fromkeys(change.phase for change in self.changes):
            changes = [change for change in self.changes if change.phase == phase]
            near = {
                i + offset
                for i, change in enumerate(changes)
                if change.mark != " "
                for offset in range(-context, context + 1)
            }
            if not near:
                continue
            columns = Columns(change.row for change in changes)
            lines += [phase, f"    {columns.titles}"]
            last = -1
            for i, change in enumerate(changes):
                if i in near:
                    if i != last + 1:
                        lines.append("    ...")
                    lines.append(f"{change.mark}   {columns.line(change.row)}")
                    last = i
        if moved:
            lines.append("< moved from here, > to here")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def render(self, path: str | os.PathLike[str]) -> None:
        """Draw both schedules, what differs marked, into an SVG file."""
        assert ScheduleDiff.renderer is not None, "fxshard registers one when it is imported"
        ScheduleDiff.renderer(self.a, self.b, os.fspath(path))


def diff(a: Schedule, b: Schedule) -> ScheduleDiff:
    """Compare two schedules operation by operation, in issue order; operators of the model count as segments.

    Raises TypeError for what is no schedule.
    """
    for given in (a, b):
        if not isinstance(given, Schedule):
            raise TypeError(f"fxshard.diff takes two schedules, not {type(given).__name__}")
    changes: list[Change] = []
    names = dict.fromkeys(phase.name for s in (a, b) for phase in s.phases)
    for name in names:
        rows = [next((phase_rows(p) for p in s.phases if p.name == name), []) for s in (a, b)]
        changes += _compare(name, *rows)
    settings = [
        f"{line[0]} {line[2:]}"
        for line in difflib.ndiff([*header(a), memory_line(a)], [*header(b), memory_line(b)])
        if line[0] in "-+"
    ]
    settings += [line for name in names for line in _operators_differ(name, a, b)]
    plain = ("rate_limit", "rate_limit_bytes", "num_batches", "held_shards", "direct_exchange")
    for field in plain:
        if getattr(a, field) != getattr(b, field):
            settings += [f"- {field}={getattr(a, field)}", f"+ {field}={getattr(b, field)}"]
    return ScheduleDiff(a, b, tuple(changes), tuple(settings))


def _operators_differ(name: str, a: Schedule, b: Schedule) -> list[str]:
    """Two lines where a phase does not run the same operators of the model on the same shapes, whatever their order."""
    told = [
        [row.note.partition(" = ")[2] for p in s.phases if p.name == name for row in phase_rows(p, "all")]
        for s in (a, b)
    ]
    counts = [Counter(_shapes(note) for note in notes if note) for notes in told]
    if counts[0] == counts[1]:
        return []
    only = [sorted((one - other).elements()) for one, other in (counts, reversed(counts))]
    return [
        f"{mark} {name}: {sum(count.values())} operators" + (f", among them {', '.join(own[:3])}" if own else "")
        for mark, count, own in zip("-+", counts, only)
    ]


def _shapes(note: str) -> str:
    """`mm.default float32[8, 64]` of `mm.default(view, t) float32[8, 64]  model.py:41`."""
    function, _, rest = note.partition("(")
    return f"{function} {rest.partition(')')[2].partition('  ')[0].strip()}".strip()


def _key(row: Row) -> tuple[str, ...]:
    """What makes two rows the same operation; how many operators a segment has is where it was cut, not what it is."""
    return (row.queue, row.op, row.name) if row.op in ("FWD", "GRAD") else (row.queue, row.op, row.name, row.note)


def _compare(phase: str, before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    changes: list[Change] = []
    matcher = difflib.SequenceMatcher(None, [_key(r) for r in before], [_key(r) for r in after], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            changes += [Change(" ", phase, row) for row in after[k:m]]
        else:
            changes += [Change("-", phase, row) for row in before[i:j]]
            changes += [Change("+", phase, row) for row in after[k:m]]
    gone = Counter(_key(c.row) for c in changes if c.mark == "-")
    come = Counter(_key(c.row) for c in changes if c.mark == "+")
    both = {"-": gone & come, "+": gone & come}
    marked = []
    for change in changes:
        if change.mark != " " and both[change.mark][_key(change.row)]:
            both[change.mark][_key(change.row)] -= 1
            change = Change("<" if change.mark == "-" else ">", phase, change.row)
        marked.append(change)
    # An operator segment that another operation now cuts elsewhere has not moved itself.
    return [c for c in marked if not (c.row.op in ("FWD", "GRAD") and c.mark != " ")] if _only_cut(marked) else marked


def _only_cut(changes: Sequence[Change]) -> bool:
    """Whether no unit's operators come in another order."""

    def order(marks: str) -> list[str]:
        found: list[str] = []
        for c in changes:
            if c.row.op in ("FWD", "GRAD") and c.mark in marks and (not found or found[-1] != c.row.name):
                found.append(c.row.name)
        return found

    return order(" -<") == order(" +>")
