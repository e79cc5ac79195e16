"""What differs between two schedules: settings, units, the order of operations, memory."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from fxshard.ir.schedule import Schedule
from fxshard.ir.text import Columns, Row, header, memory_line, phase_rows

T = TypeVar("T")


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
            near = near_changes((change.mark for change in changes), context)
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
    plain = (
        "rate_limit",
        "rate_limit_bytes",
        "num_batches",
        "gradient_divisor",
        "held_shards",
        "direct_exchange",
        "offloaded",
    )
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
    changes = [Change(mark, phase, row) for mark, row in marked(before, after, _key)]
    # An operator segment that another operation now cuts elsewhere has not moved itself.
    return (
        [c for c in changes if not (c.row.op in ("FWD", "GRAD") and c.mark != " ")] if _only_cut(changes) else changes
    )


def marked(before: Sequence[T], after: Sequence[T], key: Callable[[T], Hashable]) -> list[tuple[str, T]]:
    """Everything of two sequences, in order, each with its mark, see `Change`; what has one key is the same thing."""
    entries: list[tuple[str, T]] = []
    matcher = difflib.SequenceMatcher(None, [key(x) for x in before], [key(x) for x in after], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            entries += [(" ", x) for x in after[k:m]]
        else:
            entries += [("-", x) for x in before[i:j]] + [("+", x) for x in after[k:m]]
    gone, come = (Counter(key(x) for mark, x in entries if mark == sign) for sign in "-+")
    moved = {"-": gone & come, "+": gone & come}
    for place, (mark, x) in enumerate(entries):
        if mark != " " and moved[mark][key(x)]:
            moved[mark][key(x)] -= 1
            entries[place] = ("<" if mark == "-" else ">", x)
    return entries


def near_changes(marks: Iterable[str], context: int) -> set[int]:
    """Places at most `context` from one that is marked."""
    return {i + d for i, mark in enumerate(marks) if mark != " " for d in range(-context, context + 1)}


def _only_cut(changes: Sequence[Change]) -> bool:
    """Whether no unit's operators come in another order."""

    def order(marks: str) -> list[str]:
        found: list[str] = []
        for c in changes:
            if c.row.op in ("FWD", "GRAD") and c.mark in marks and (not found or found[-1] != c.row.name):
                found.append(c.row.name)
        return found

    return order(" -<") == order(" +>")
