"""Text form: levels, columns, units; and differences as text."""

import os
import re
import subprocess
import sys

import pytest

import fxshard
from fxshard.ir.nodes import info
from fxshard.ir.text import events
from tests.capture.compare import Framed, batches
from tests.passes.golden import after, golden


def schedule(**options) -> fxshard.Schedule:
    return fxshard.trace(Framed(), (batches(1)[0],), **{"F": 2, "W": 4, **options})


def test_units_only():
    # Who is gathered, how large, and the order of events.
    assert after(8).text("units") == golden("""
    schedule  W=2  F=2  replicas=1
    # insert-gathers
    # insert-reduces
    # insert-frees
    # keep-root-resident{everything=False}
    # backward-prefetch{depth=1}
    # forward-overlap{depth=1}
    # rate-limit{limit=2, limit_bytes=None}
    # plan-memory
    units
      layers.0     2 parameters            72 float32  144 B a rank
      layers.1     2 parameters            72 float32  144 B a rank
      layers.2     2 parameters            72 float32  144 B a rank
    forward
      AG layers.0  AG layers.1  F layers.0  AG layers.2  F layers.1  F layers.2
    backward
      AG layers.2  AG layers.1  B layers.2  RS layers.2  B layers.1  RS layers.1  B layers.0  RS layers.0
    memory  arena 576 B  residents 0 B  peak gathered 576 B  peak gradients 576 B
""")


def test_an_unknown_level_lists_the_levels():
    with pytest.raises(ValueError, match=r"level='every': allowed are 'units', 'communication', 'all'"):
        schedule().text("every")


def test_every_communication_node_is_a_line_in_the_column_of_its_queue():
    s = schedule()
    lines = s.text().splitlines()
    for phase in s.phases:
        start = lines.index(phase.name)
        titles = lines[start + 1]
        columns = {m.group(): m.start() for m in re.finditer(r"\w+", titles)}
        found = [(line, len(line) - len(line.lstrip())) for line in lines[start + 2 :] if line.startswith("  ")]
        rows = [(indent, line.split()[0]) for line, indent in found if line.split()[0] not in ("FWD", "GRAD")]
        labels = {"all_gather": "AG", "wait": "WAIT", "free": "FREE", "flatten_grads": "FLAT", "throttle": "LIMIT",
                  "reduce_scatter": "RS", "all_reduce": "AR", "accumulate_grad": "ACC"}  # fmt: skip
        nodes = [n for n in phase.graph.nodes if info(n).kind in labels]
        expected = [(columns[info(n).queue], labels[info(n).kind]) for n in nodes]
        assert rows[: len(expected)] == expected


def test_every_node_at_level_all():
    s = schedule()
    text = s.text("all")
    for phase in s.phases:
        for node in phase.graph.nodes:
            if info(node).kind == "compute" and node.op == "call_function":
                assert f" {node.name} = " in text
    assert re.search(r"addmm = addmm\.default\(.*\) float32\[\d+, \d+\]  compare\.py:\d+", text)


def test_nothing_of_the_machine_is_in_it():
    assert not re.search(r"0x[0-9a-f]{6}|/|\d{6,}", schedule().text("all"))


def test_it_is_the_same_in_another_process():
    program = (
        "import fxshard\nfrom tests.capture.compare import Framed, batches\n"
        "print(fxshard.trace(Framed(), (batches(1)[0],), F=2, W=4).text('all'))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=300, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    assert other.stdout == schedule().text("all") + "\n"


def test_work_is_told_under_the_unit_whose_code_it_is():
    """Backward of layers.1's activation comes before its weight is read, and is of layers.1 all the same."""
    backward = after(8).backward
    units = [unit for unit, nodes in backward.steps() if info(nodes[0]).kind == "compute"]
    assert list(dict.fromkeys(units)) == ["layers.2", "layers.1", "layers.0"]
    assert sorted(units, reverse=True) == units
    before = next(n for n in backward.graph.nodes if info(n).unit == "layers.1" and info(n).kind == "compute")
    assert before < next(n for n in backward.waits if info(n).flat == "layers.1")


def test_events_of_a_phase():
    assert events(after(2).forward) == [
        ("AG", "layers.0"), ("F", "layers.0"), ("AG", "layers.1"), ("F", "layers.1"), ("AG", "layers.2"), ("F", "layers.2")
    ]  # fmt: skip


# -- differences


def test_equal_schedules_do_not_differ():
    difference = fxshard.diff(schedule(), schedule())
    assert not difference and str(difference) == "no difference"
    assert difference.count(" ") > 20


def test_what_moved_is_told_apart_from_what_came():
    # Prefetching only moves: AG layers.1 stands before WAIT layers.2 instead of behind RS layers.2.
    difference = fxshard.diff(after(4), after(5))
    assert difference and (difference.count("<"), difference.count("-"), difference.count("+")) == (2, 0, 0)
    assert str(difference) == golden("""
        2 moved, 0 removed, 0 added
        + # backward-prefetch{depth=1}
        backward
            unshard                 compute                  reduce
        >   AG     layers.2  288 B
                                    GRAD   layers.2  2 ops
        <   AG     layers.2  288 B
        >   AG     layers.1  288 B
                                    WAIT   layers.2  for AG
                                    GRAD   layers.2  3 ops
            ...
                                                             RS     layers.2  288 B
                                    GRAD   layers.1  2 ops
        <   AG     layers.1  288 B
                                    WAIT   layers.1  for AG
                                    GRAD   layers.1  3 ops
        < moved from here, > to here
    """)


def test_what_is_only_in_one_is_marked():
    difference = fxshard.diff(after(6), after(7, rate_limit=1))
    assert difference.count("+") == 3 and difference.count("-") == 0
    assert re.search(r"^\+   LIMIT +after FREE layers\.0$", difference.text(), re.MULTILINE)


def test_settings_and_memory_are_compared():
    difference = fxshard.diff(schedule(F=2), schedule(F=4))
    assert "- schedule  W=4  F=2  replicas=2" in difference.settings
    assert "+ schedule  W=4  F=4  replicas=1" in difference.settings
    assert any(line.startswith("- memory  arena") for line in difference.settings)


def test_operators_that_another_operation_cuts_elsewhere_have_not_moved():
    assert all(c.row.op not in ("FWD", "GRAD") for c in fxshard.diff(after(3), after(6)).changes if c.mark != " ")


def test_diff_takes_schedules():
    with pytest.raises(TypeError, match=r"fxshard\.diff takes two schedules, not str"):
        fxshard.diff(schedule(), "schedule")
