"""The graph of the communication: compared with the schedule's own nodes, and as a Graphviz program lays it out."""

from __future__ import annotations

import functools
import re
import shutil
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import fx

from fxshard.ir import Phase, Schedule, ops
from fxshard.viz import dag, render
from fxshard.viz.dag import COLUMNS, VIA, Graph, communication_graph, draw_dot, folded, quoted, render_dot, routed
from tests.viz.cases import CASES, Named, traced
from tests.viz.test_html import Hostile, hostile

every_case = pytest.mark.parametrize("name", CASES)

SHELL, CAT = shutil.which("sh"), shutil.which("cat")  # before a test takes the PATH away
SVG = "{http://www.w3.org/2000/svg}"


@functools.cache
def graph_of(name: str) -> Graph:
    return communication_graph(traced(name))


def kind_of(node: fx.Node) -> str:
    found = node.meta.get("fxshard")
    return found.kind if found is not None else "compute"


def communication(phase: Phase) -> list[fx.Node]:
    return [n for n in phase.graph.nodes if kind_of(n) in ops.LABELS]


def key(phase: Phase, node: fx.Node) -> tuple[str, str, str]:
    """Where a node stands: these schedules have one FlatParameter a unit, so only one node does."""
    label = ops.LABELS[kind_of(node)]
    if kind_of(node) == "wait":
        label = f"WAIT {ops.LABELS[kind_of(node.args[0])]}"  # type: ignore[arg-type]
    return phase.name, node.meta["fxshard"].unit or "", label


def numbers(graph: Graph) -> dict[tuple[str, str, str], int]:
    return {(v.phase, v.row, v.column): n for n, v in enumerate(graph.vertices) if not v.num_operators}


def behind(edges: dict[int, set[int]]) -> dict[int, set[int]]:
    """All that lead to each number; fails on a cycle."""
    found: dict[int, set[int]] = {}

    def visit(number: int, path: tuple[int, ...] = ()) -> set[int]:
        assert number not in path, "a cycle"
        if number not in found:
            sources = edges.get(number, set())
            found[number] = sources.union(*(visit(source, (*path, number)) for source in sources))
        return found[number]

    for number in edges:
        visit(number)
    return found


def edges_into(graph: Graph, *kinds: str) -> dict[int, set[int]]:
    into: dict[int, set[int]] = {number: set() for number in range(len(graph.vertices))}
    for (tail, head), kind in graph.edges.items():
        if kind in kinds:
            into[head].add(tail)
    return into


@every_case
def test_a_vertex_for_each_communication_node_and_all_operators(name: str) -> None:
    schedule, graph = traced(name), graph_of(name)
    expected = Counter(key(p, n) for p in schedule.phases for n in communication(p) if kind_of(n) != "throttle")
    assert Counter((v.phase, v.row, v.column) for v in graph.vertices if not v.num_operators) == expected
    assert {v.column for v in graph.vertices} <= set(COLUMNS)
    for phase in schedule.phases:
        operators = sum(v.num_operators for v in graph.vertices if v.phase == phase.name)
        assert operators == sum(n.op == "call_function" for n in phase.nodes("compute"))
        for node in (n for kind in ops.COLLECTIVES for n in phase.nodes(kind)):
            found = node.meta["fxshard"]
            vertex = graph.vertices[numbers(graph)[key(phase, node)]]
            assert (vertex.num_bytes, vertex.queue) == (found.num_bytes, found.queue)
    assert [v.row for v in graph.vertices if v.row not in graph.rows] == []


@pytest.mark.parametrize("name", [name for name in CASES if name != "96-units"])  # which has too many pairs of nodes
def test_what_a_node_needs_leads_to_it(name: str) -> None:
    """Every path of the fx graph between two communication nodes is one of data edges; LIMIT and FREE have their own."""
    schedule, graph = traced(name), graph_of(name)
    place, reached = numbers(graph), behind(edges_into(graph, "data"))
    checked = 0
    for phase in schedule.phases:
        needs: dict[fx.Node, set[fx.Node]] = {}
        for node in phase.graph.nodes:
            needs[node] = set(node.all_input_nodes).union(*(needs[source] for source in node.all_input_nodes))
        nodes = [n for n in communication(phase) if kind_of(n) != "throttle"]
        for node in nodes:
            for source in (n for n in nodes if n in needs[node]):
                assert place[key(phase, source)] in reached[place[key(phase, node)]], (source, node)
                checked += 1
    assert checked or name in ("no-passes",)


@every_case
def test_a_free_comes_after_the_operators_that_read(name: str) -> None:
    graph = graph_of(name)
    into = edges_into(graph, "data")
    for number, vertex in enumerate(graph.vertices):
        if vertex.column == "FREE":
            readers = [graph.vertices[source] for source in into[number]]
            assert {(r.row, r.phase) for r in readers if r.num_operators} == {(vertex.row, vertex.phase)}


@every_case
def test_no_edge_is_implied_by_others(name: str) -> None:
    graph = graph_of(name)
    into = edges_into(graph, "data")
    reached = behind(into)
    for number, sources in into.items():
        for source in sources:
            assert not any(source in reached[other] for other in sources - {source}), (number, source)
    order = [edge for edge, kind in graph.edges.items() if kind == "order"]
    assert all(tail not in reached[head] for tail, head in order)


@every_case
def test_the_order_of_each_queue_is_drawn(name: str) -> None:
    schedule, graph = traced(name), graph_of(name)
    place = numbers(graph)
    reached = behind(edges_into(graph, "data", "order"))
    for kind in ops.COLLECTIVES:
        issued = [place[key(phase, node)] for phase in schedule.phases for node in phase.nodes(kind)]
        assert all(before in reached[after] for before, after in pairwise(issued))
    work = [n for n, v in enumerate(graph.vertices) if v.num_operators]
    assert all(before in reached[after] for before, after in pairwise(work))


@every_case
def test_limits_and_residents(name: str) -> None:
    schedule, graph = traced(name), graph_of(name)
    place = numbers(graph)
    limits = set()
    for phase in schedule.phases:
        for node in phase.nodes("throttle"):
            gather = phase.one("all_gather", node.args[1])  # type: ignore[arg-type]
            assert gather is not None
            limits.add((place[key(phase, node.args[0])], place[key(phase, gather)]))  # type: ignore[arg-type]
    assert {edge for edge, kind in graph.edges.items() if kind == "limit"} == limits
    kept = [(graph.vertices[a], graph.vertices[b]) for (a, b), kind in graph.edges.items() if kind == "resident"]
    gathered = {schedule.flats[flat].unit for flat in schedule.resident if numbers_of(graph, schedule.flats[flat].unit)}
    assert {tail.row for tail, _ in kept} == gathered
    assert all((tail.phase, head.phase) == ("forward", "backward") for tail, head in kept)


def numbers_of(graph: Graph, row: str) -> list[int]:
    """Vertices that a resident of this row may be read from: at F = 1 without a cast there is none."""
    return [n for n, v in enumerate(graph.vertices) if v.row == row and v.column in ("WAIT AG", "CAST")]


def test_many_equal_units_are_folded() -> None:
    whole, small = graph_of("96-units"), folded(graph_of("96-units"))
    assert [row for row in small.rows.values() if row] == [
        "(root).0",
        "layers.0",
        "layers.1",
        "93 more like layers.0",
        "layers.95",
        "(root).1",
    ]
    count: Counter[tuple[str, str]] = Counter()
    for vertex in small.vertices:
        count[vertex.phase, vertex.column] += vertex.count
    assert count == Counter((v.phase, v.column) for v in whole.vertices)
    behind(edges_into(small, "data"))  # fails on a cycle
    assert all("layers.50" not in text for text in draw_dot(traced("96-units")).splitlines())
    every = draw_dot(traced("96-units"), every_unit=True)
    assert all(f'"layers.{i}"' in every for i in range(96))


def test_few_units_are_not_folded() -> None:
    whole, small = graph_of("hybrid"), folded(graph_of("hybrid"))
    assert small.rows["layers.1"] == "layers.1"
    assert (len(small.vertices), small.edges.keys()) == (len(whole.vertices), whole.edges.keys())


def plain_layout(schedule: Schedule, every_unit: bool = False) -> dict[int, tuple[float, float]]:
    """Where the program puts the middle of each vertex, y downwards."""
    lines = render_dot(draw_dot(schedule, every_unit), "plain").decode().splitlines()
    found = (line.split(" ") for line in lines if re.match(r"node n\d+ ", line))
    return {int(fields[1][1:]): (float(fields[2]), -float(fields[3])) for fields in found}


@every_case
def test_rows_are_units_and_columns_are_kinds(name: str) -> None:
    graph = routed(folded(graph_of(name)))
    places = plain_layout(traced(name))
    assert set(places) == set(range(len(graph.vertices)))
    by_row: dict[str, list[int]] = {row: [] for row in graph.rows}
    for number, vertex in enumerate(graph.vertices):
        by_row[vertex.row].append(number)
    heights = []
    for members in filter(None, by_row.values()):
        assert len({round(places[n][1], 2) for n in members}) == 1
        heights.append(places[members[0]][1])
        order = sorted(members, key=lambda n: (graph.vertices[n].phase == "backward", _column(graph, n), n))
        assert [places[n][0] for n in order] == sorted(places[n][0] for n in members)
    assert heights == sorted(heights)


def _column(graph: Graph, number: int) -> int:
    return COLUMNS.index(graph.vertices[number].column)


@every_case
def test_the_picture_shows_every_row_and_vertex(name: str) -> None:
    graph = routed(folded(graph_of(name)))
    root = ElementTree.fromstring(render_dot(draw_dot(traced(name)), "svg"))
    groups = list(root.iter(f"{SVG}g"))
    texts = [" ".join(t.text or "" for t in g.iter(f"{SVG}text")) for g in groups if g.get("class") == "node"]
    words = Counter(text.split(" ")[0] for text in texts if text and text.split(" ")[0] in ops.LABELS.values())
    expected = Counter(v.column.split(" ")[0] for v in graph.vertices if v.count == 1 and v.column != VIA)
    assert all(words[word] >= expected[word] for word in expected if word not in ("FWD", "GRAD"))
    clusters = [g.find(f"{SVG}text") for g in groups if g.get("class") == "cluster"]
    used = {vertex.row for vertex in graph.vertices}
    if name != "names":
        drawn = [text.text.strip() for text in clusters if text is not None and text.text]
        assert drawn == [title for row, title in graph.rows.items() if row and row in used]


def test_hostile_names() -> None:
    for schedule, names in ((hostile(), Hostile.NAMES), (traced("names"), Named.NAMES)):
        root = ElementTree.fromstring(render_dot(draw_dot(schedule), "svg"))
        shown = [t.text for g in root.iter(f"{SVG}g") if g.get("class") == "cluster" for t in g.iter(f"{SVG}text")]
        assert len(shown) == len(names)
    assert "</script><script>alert(1)</script>" in [
        t.text for t in ElementTree.fromstring(render_dot(draw_dot(hostile()), "svg")).iter(f"{SVG}text")
    ]


def test_quoting() -> None:
    assert quoted('a"b') == r'"a\"b"'
    assert quoted("a\\nb") == r'"a\\nb"'
    assert quoted("&lt;") == '"&amp;lt;"'
    assert quoted("a\nb\x07") == '"a b\ufffd"'


@pytest.mark.parametrize("suffix", [".dot", ".gv"])
def test_text_needs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    without_programs(monkeypatch, tmp_path)
    render(traced("96-units"), tmp_path / f"a{suffix}")
    assert (tmp_path / f"a{suffix}").read_text(encoding="utf-8") == draw_dot(traced("96-units"))
    traced("96-units").render(str(tmp_path / f"b{suffix}"), every_unit=True)
    assert (tmp_path / f"b{suffix}").read_text(encoding="utf-8") == draw_dot(traced("96-units"), every_unit=True)


@pytest.mark.parametrize(("file", "begin"), [("a.png", b"\x89PNG"), ("a.dag.png", b"\x89PNG"), ("a.dag.svg", b"<?xml")])
def test_files(tmp_path: Path, file: str, begin: bytes) -> None:
    render(traced("hybrid"), tmp_path / file)
    assert (tmp_path / file).read_bytes().startswith(begin)


def without_programs(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(sys, "executable", str(empty / "python"))


def test_without_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_programs(monkeypatch, tmp_path)
    for file in ("a.png", "a.pdf", "a.dag.svg"):
        with pytest.raises(RuntimeError, match=r"no Graphviz program .*pip install graphviz-pure"):
            render(traced("hybrid"), tmp_path / file)
    assert list(tmp_path.iterdir()) == []


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!{SHELL}\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_program_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_programs(monkeypatch, tmp_path)
    fake(tmp_path, "graphviz-pure", "echo no such format >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"made no pdf: no such format; graphviz-pure makes svg and png"):
        render(traced("hybrid"), tmp_path / "a.pdf")
    fake(tmp_path, "dot", "exit 3")  # taken before the other
    with pytest.raises(RuntimeError, match=r"dot made no png: exit code 3$"):
        render(traced("hybrid"), tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dot", "graphviz-pure"]


def test_a_program_on_the_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_programs(monkeypatch, tmp_path)
    fake(tmp_path, "dot", f'{CAT} > /dev/null; echo "$@"')
    render(traced("hybrid"), tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_text() == "-Kdot -Tpdf\n"


def test_every_unit_is_for_graphs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every_unit=True is for the graph"):
        render(traced("hybrid"), tmp_path / "a.svg", every_unit=True)
    assert list(tmp_path.iterdir()) == []


def test_programs_are_looked_for_in_order() -> None:
    assert dag.PROGRAMS == ("dot", "graphviz-pure")
