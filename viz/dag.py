"""The communication of a schedule as a graph in Graphviz's language, and as what a `dot` program makes of it.

A table in which a row is an FSDP unit and a column a kind of operation, forward on the left and backward on the right. A
run of a unit's operators is one node. Edges are

    data      solid: what one reads of another, and FREE after the readers; what others imply is left out
    order     dashed: one after the other on a queue, where no data says so
    limit     dotted: an AllGather held back until a FREE is reached
    resident  bold: gathered parameters kept from forward to backward

LIMIT is the edge and no node. Of a row of equal units the first two and the last are drawn, the others as one row with
counts, unless `every_unit`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import groupby

from torch import fx

from fxshard.ir import Phase, Schedule, ops
from fxshard.ir.nodes import bytes_text, info
from fxshard.viz import style
from fxshard.viz.lanes import NO_UNIT, TITLES
from fxshard.viz.page import sharding_text
from fxshard.viz.style import Palette
from fxshard.viz.timeline import ROOT, lay_out

PROGRAMS = ("dot", "graphviz-pure")
"""Programs that lay a graph out, the first one found; the second comes with the Python package of that name."""

DRAWN_FIRST, DRAWN_LAST = 2, 1
"""How many of a row of equal units are drawn; of those between, at least two, one row is made."""

VIA = "via"
"""Column of the points through which a limit edge passes the rows between its ends: dot would lead it around them."""

COLUMNS = (
    *("CAST", VIA, "AG", "WAIT AG", "FWD", "GRAD", "FREE", "FLAT", "RS", "WAIT RS", "AR", "WAIT AR"),
    *("ANY", "WAIT ANY", "ACC", "KEEP"),
)
"""Columns of a phase; those with no node are left out."""

HEADINGS = {"FWD": "operators", "GRAD": "operators"} | {ops.LABELS[kind]: title for kind, title in TITLES.items()}
FONT = "Helvetica,Arial"
STRENGTH = ("data", "resident", "limit", "order", "none")
"""Of several edges between the same ends, the first of these is drawn."""

EDGE_STYLES: dict[str, dict[str, str]] = {
    "data": {"style": "solid"},
    "order": {"style": "dashed", "color": style.EDGE},
    "limit": {"style": "dotted", "color": style.EXPOSED},
    "resident": {"style": "bold", "color": style.GATHERED, "penwidth": "2"},
}

LEGEND = {
    "data": "solid: data",
    "order": "dashed: order on a queue",
    "limit": "dotted: AllGather held back to a FREE",
    "resident": "bold: kept gathered from forward to backward",
}
MARK_FILL = "#f1f4f7"
NEXT_LINE = "\\n"


@dataclass
class Vertex:
    """A communication node, a run of operators, or what stands for several of them when units are folded."""

    phase: str
    row: str
    column: str
    queue: str
    num_bytes: int = 0
    num_operators: int = 0
    count: int = 1

    @property
    def label(self) -> str:
        word = self.column.split(" ")[0]
        if self.count > 1:
            return f"{self.count} {word}"
        if self.num_operators:
            return f"{word}{NEXT_LINE}{self.num_operators} operator{'s' if self.num_operators > 1 else ''}"
        return f"{word}{NEXT_LINE}{bytes_text(self.num_bytes)}" if self.num_bytes else word


@dataclass
class Graph:
    """Vertices by number, and the kind of each edge by its ends; `rows` from top to bottom."""

    vertices: list[Vertex] = field(default_factory=list)
    edges: dict[tuple[int, int], str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    """Name of each row, and what it is called in the picture."""


def draw_dot(schedule: Schedule, every_unit: bool = False) -> str:
    """The graph in the DOT language, for `dot`; the same schedule gives the same text."""
    graph = communication_graph(schedule)
    if not every_unit:
        graph = folded(graph)
    return _Text(schedule, routed(graph)).text()


def render_dot(text: str, form: str) -> bytes:
    """What a Graphviz program makes of DOT text; `form` is svg, pdf or png.

    Raises RuntimeError, with what to do, if there is no program or it fails.
    """
    program = find_program()
    made = subprocess.run([program, "-Kdot", f"-T{form}"], input=text.encode(), capture_output=True)
    if made.returncode or not made.stdout:
        said = made.stderr.decode(errors="replace").strip() or f"exit code {made.returncode}"
        pure = os.path.basename(program).startswith("graphviz-pure")
        advice = "; graphviz-pure makes svg and png, for pdf install Graphviz" if pure and form == "pdf" else ""
        raise RuntimeError(f"{program} made no {form}: {said}{advice}")
    return made.stdout


def find_program() -> str:
    """The path of a Graphviz program: on the PATH, or beside this Python, where packages put theirs."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    found = next(filter(None, (shutil.which(name, path=places) for name in PROGRAMS)), None)
    if found is None:
        raise RuntimeError(
            "no Graphviz program was found to lay the graph out: install Graphviz (its `dot`), or "
            "`pip install graphviz-pure`; a .dot or .gv file needs none"
        )
    return found


# -- from a schedule to a graph


def communication_graph(schedule: Schedule) -> Graph:
    """Every communication node of the schedule but LIMIT, its operators by runs of one unit, and what orders them.

    A row is a unit, by its first use; '' is the row of what belongs to none.
    """
    used = [schedule.flats[flat].unit for phase in schedule.phases for flat in phase.flats_in_use_order()]
    graph = Graph(rows={row: row for row in ("", *used, *schedule.units)})
    full: dict[str, int] = {}
    last: dict[str, int] = {}
    for phase in schedule.phases:
        with phase.indexed():
            _PhaseGraph(phase, graph, full, last)
    return graph


class _PhaseGraph:
    """Adds one phase to the graph. `full` has the vertex that each FlatParameter is read from, `last` the last vertex
    of each queue; both go on from phase to phase."""

    def __init__(self, phase: Phase, graph: Graph, full: dict[str, int], last: dict[str, int]):
        self.phase, self.graph, self.full, self.last = phase, graph, full, last
        self.first = len(graph.vertices)
        self.made: dict[fx.Node, int] = {}
        """The vertex of each node."""
        self.inputs: dict[int, set[int]] = defaultdict(set)
        limits: dict[str, int] = {}  # the FREE that the next AllGather of a FlatParameter is held back to
        for unit, nodes in phase.steps():
            found = info(nodes[0])
            if found.kind == "throttle":
                limits[found.flat or ""] = self.made[nodes[0].args[0]]  # type: ignore[index]
                continue
            number = self._place(unit or found.unit or "", nodes)
            self._connect(nodes, number)
            if found.kind == "all_gather" and found.flat in limits:
                graph.edges[limits.pop(found.flat), number] = "limit"
        self._reduce()

    def _place(self, row: str, nodes: list[fx.Node]) -> int:
        """The vertex of these nodes: a new one, or that of the operators before if they go on in the same unit."""
        found, number = info(nodes[0]), len(self.graph.vertices)
        if found.kind == "compute":
            before = self.last.get("compute", -1)
            if before >= self.first and self.graph.vertices[before].row == row and not self._behind(before, nodes):
                number = before
        if number == len(self.graph.vertices):
            self.graph.vertices.append(Vertex(self.phase.name, row, self._column(nodes[0]), found.queue))
        vertex = self.graph.vertices[number]
        if found.kind == "compute":
            vertex.num_operators += len(nodes)
        elif found.kind != "wait":
            vertex.num_bytes = found.num_bytes
        if found.kind == "compute" or found.kind in ops.COLLECTIVES:
            previous = self.last.get(found.queue, number)
            if previous != number:
                self.graph.edges[previous, number] = "order"
            self.last[found.queue] = number
        if vertex.column in ("WAIT AG", "CAST"):
            self.full[found.flat or ""] = number
        self.made.update(dict.fromkeys(nodes, number))
        return number

    def _column(self, node: fx.Node) -> str:
        if info(node).kind == "compute":
            return "GRAD" if self.phase.name == "backward" else "FWD"
        label = ops.LABELS[info(node).kind]
        return f"{label} {ops.LABELS[info(node.args[0]).kind]}" if info(node).kind == "wait" else label  # type: ignore[arg-type]

    def _connect(self, nodes: list[fx.Node], number: int) -> None:
        """Note what the nodes of a vertex read; a FREE comes after those that read what it frees."""
        found = info(nodes[0])
        sources = [source for node in nodes for source in node.all_input_nodes]
        if found.kind == "free":
            readers = [user for view in self.phase.views(found.flat or "") for user in view.users if user in self.made]
            sources = readers or sources
        for source in map(_read, sources):
            flat = info(source).flat or ""
            if info(source).kind == "resident" and flat in self.full:
                self.graph.edges[self.full[flat], number] = "resident"
            elif (made := self.made.get(source, number)) != number:
                self.inputs[number].add(made)

    def _behind(self, before: int, nodes: list[fx.Node]) -> bool:
        """Whether some input of `nodes` needs the vertex `before`, without being made by it."""
        seen = {before}
        found = {self.made.get(_read(source), before) for node in nodes for source in node.all_input_nodes} - seen
        while found:
            seen |= found
            needed = set().union(*(self.inputs[number] for number in found))
            if before in needed:
                return True
            found = needed - seen
        return False

    def _reduce(self) -> None:
        """Take over data edges, and keep order edges, where no path of data edges implies them."""
        reached: dict[int, int] = {}  # vertices that lead to each vertex, itself included, as bits
        order = list(TopologicalSorter(self.inputs).static_order())
        place = {number: i for i, number in enumerate(order)}
        for number in order:
            reached[number] = 1 << number
            for source in sorted(self.inputs[number], key=place.__getitem__, reverse=True):
                if not reached[number] >> source & 1:
                    self.graph.edges[source, number] = "data"
                reached[number] |= reached[source]
        for (source, number), kind in list(self.graph.edges.items()):
            if kind == "order" and number in reached and reached[number] >> source & 1:
                del self.graph.edges[source, number]


def _read(source: fx.Node) -> fx.Node:
    """What is really read: for a view of a parameter, the gathered FlatParameter."""
    return source.args[0] if info(source).kind == "param_view" else source  # type: ignore[return-value]


def folded(graph: Graph) -> Graph:
    """The graph with one row for all but the first and last of a row of equal units, if these are at least two."""
    rows: dict[str, str] = {}
    place = {row: row for row in graph.rows}
    for _, group in groupby(graph.rows, key=lambda row: re.sub(r"\d+", "*", row)):
        equal = list(group)
        middle = equal[DRAWN_FIRST : len(equal) - DRAWN_LAST]
        if len(middle) > 1:
            place.update(dict.fromkeys(middle, middle[0]))
        for row in equal:
            more = f"{len(middle)} more like {equal[0]}" if row in middle and len(middle) > 1 else row
            rows.setdefault(place[row], more)
    small, numbers = Graph(rows=rows), []
    merged: dict[tuple[str, str, str], int] = {}
    for vertex in graph.vertices:
        alone = rows[place[vertex.row]] == vertex.row
        key = (vertex.phase, place[vertex.row], vertex.column)
        if alone or key not in merged:
            merged[key] = len(small.vertices)
            small.vertices.append(replace(vertex, row=key[1]))
        else:
            small.vertices[merged[key]].count += 1
        numbers.append(merged[key])
    for (tail, head), kind in graph.edges.items():
        ends = numbers[tail], numbers[head]
        if ends[0] != ends[1] and STRENGTH.index(kind) < STRENGTH.index(small.edges.get(ends, "none")):
            small.edges[ends] = kind
    return small


def routed(graph: Graph) -> Graph:
    """The graph with limit edges that pass rows cut into pieces, a VIA vertex in each row that is passed."""
    rows = list(graph.rows)
    cut = Graph(list(graph.vertices), {}, graph.rows)
    for (tail, head), kind in graph.edges.items():
        if kind == "limit":
            ends = [rows.index(graph.vertices[number].row) for number in (tail, head)]
            for row in rows[min(ends) + 1 : max(ends)][:: 1 if ends[0] < ends[1] else -1]:
                point = len(cut.vertices)
                cut.vertices.append(Vertex(graph.vertices[head].phase, row, VIA, "unshard"))
                cut.edges[tail, point] = kind
                tail = point
        cut.edges[tail, head] = kind
    return cut


# -- from a graph to DOT


class _Text:
    """Each row is a rank, and every row has something, if unseen, in every column: so dot keeps the table as it is."""

    def __init__(self, schedule: Schedule, graph: Graph):
        self.schedule, self.graph = schedule, graph
        timeline = lay_out(schedule)
        self.palette = Palette(timeline.kinds, ROOT)
        self.kinds, self.sharding = timeline.kinds, sharding_text(timeline)
        used = {vertex.row for vertex in graph.vertices}
        self.rows = [row for row in graph.rows if row in used]
        cells: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for number, vertex in enumerate(graph.vertices):
            cells[vertex.row, vertex.phase, vertex.column].append(number)
        self.columns: list[tuple[str, str]] = []
        """Phase and kind of each column; a kind of which one row has several has as many columns."""
        self.table: list[list[int | None]] = [[] for _ in self.rows]
        """The vertex in each row and column."""
        for phase in schedule.phases:
            for column in COLUMNS:
                found = [cells[row, phase.name, column] for row in self.rows]
                width = max(map(len, found), default=0)
                self.columns += [(phase.name, column)] * width
                for line, numbers in zip(self.table, found):
                    line += [*numbers, *[None] * (width - len(numbers))]
        self.place = {n: (i, j) for i, line in enumerate(self.table) for j, n in enumerate(line) if n is not None}

    def text(self) -> str:
        schedule = self.schedule
        step = "forward call" if schedule.backward is None else "training step"
        drawn = [words for kind, words in LEGEND.items() if kind in self.graph.edges.values()]
        title = f"Communication of one {step}: {self.sharding}{NEXT_LINE}{'; '.join(drawn)}"
        lines = [
            "digraph schedule {",
            f'graph [newrank=true, nodesep=0.2, ranksep=0.22, fontname="{FONT}", fontsize=13, labelloc=t, pad=0.2, '
            f'label="{title}", fontcolor="{style.INK}", bgcolor="{style.PAPER}"];',
            f'node [shape=box, style="filled,rounded", fontname="{FONT}", fontsize=10, height=0.36, width=0.62, '
            f'margin="0.07,0.03", penwidth=0.8, color="{style.FAINT}", fontcolor="{style.INK}"];',
            f'edge [arrowsize=0.5, penwidth=0.9, color="{style.FAINT}", fontname="{FONT}", fontsize=9, constraint=false];',
            *self._headings(),
            *(line for i in range(len(self.rows)) for line in self._row(i)),
            *(self._column(j) for j in range(len(self.columns))),
            *(self._edge(tail, head, kind) for (tail, head), kind in self.graph.edges.items()),
            "}",
        ]
        return "\n".join(lines) + "\n"

    def _headings(self) -> Iterator[str]:
        yield "{ rank=same;"
        before = ("", "")
        for j, (phase, column) in enumerate(self.columns):
            label, narrow = "", "width=0.01, "
            if column != VIA:
                heading = HEADINGS.get(column, column) if (phase, column) != before else ""
                label, narrow = f"{phase if phase != before[0] else ''}{NEXT_LINE}{heading}", ""
                before = phase, column
            yield f'h{j} [label="{label}", shape=plaintext, style="", {narrow}fontcolor="{style.FAINT}"];'
        yield self._chain([f"h{j}" for j in range(len(self.columns))])
        yield "}"

    def _row(self, i: int) -> Iterator[str]:
        row = self.rows[i]
        yield f"subgraph {f'cluster_{i}' if row else f'row_{i}'} {{"
        if row:
            label = quoted(style.shortened(self.graph.rows[row], 48))
            looks = f'fontsize=11, labeljust=l, style="rounded", margin=7, color="{style.EDGE}", penwidth=1'
            yield f"graph [label={label}, {looks}];"
        yield "{ rank=same;"
        for j, number in enumerate(self.table[i]):
            narrow = ", width=0.01" if self.columns[j][1] == VIA else ""
            unseen = f'e{i}_{j} [style=invis, label=""{narrow}];'
            yield self._node(number) if number is not None else unseen
        yield self._chain([self._name(i, j) for j in range(len(self.columns))])
        yield "}"
        yield "}"

    def _column(self, j: int) -> str:
        names = [f"h{j}", *(self._name(i, j) for i in range(len(self.rows)))]
        return self._chain(names, ", weight=100")

    def _chain(self, names: list[str], more: str = "") -> str:
        return f"{' -> '.join(names)} [style=invis, constraint=true{more}];" if len(names) > 1 else ""

    def _name(self, i: int, j: int) -> str:
        number = self.table[i][j]
        return f"e{i}_{j}" if number is None else f"n{number}"

    def _node(self, number: int) -> str:
        vertex = self.graph.vertices[number]
        if vertex.column == VIA:
            return f'n{number} [label="", shape=point, width=0.01, height=0.01, color="{style.EXPOSED}"];'
        about = f"{vertex.column} {self.graph.rows[vertex.row] or NO_UNIT}, {vertex.phase}, {vertex.queue} queue"
        hue = self.palette.hues[self.kinds[vertex.row]] if vertex.row in self.kinds else style.OTHER_HUE
        if vertex.num_operators:
            looks = f'fillcolor="{style.tint(hue, 0.6)}", color="{style.shade(hue)}"'
        elif vertex.column in ("AG", "RS", "AR"):
            looks = f'fillcolor="{style.PAPER}", color="{style.shade(hue)}", penwidth=2, style=filled'
        else:
            looks = f'fillcolor="{MARK_FILL}"'
        return f'n{number} [label="{vertex.label}", tooltip={quoted(about)}, {looks}];'

    def _edge(self, tail: int, head: int, kind: str) -> str:
        """Every edge is written from left to right and downwards, and one that goes back as reversed."""
        looks = dict(EDGE_STYLES[kind])
        if self.graph.vertices[head].column == VIA:
            looks["dir"] = "none"
        if self.place[head] < self.place[tail]:
            tail, head = head, tail
            looks.setdefault("dir", "back")
        listed = ", ".join(f'{name}="{value}"' for name, value in looks.items())
        return f"n{tail} -> n{head} [{listed}];"


def quoted(text: str) -> str:
    """A string of the DOT language that shows `text`: `&` would start an entity, and a backslash an escape."""
    shown = style.plain(text).replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
    escaped = " ".join(re.split(r"[\t\n\r]", shown)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
