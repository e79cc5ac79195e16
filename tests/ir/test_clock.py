"""Virtual time: worked examples, and every start compared with what the schedule's own nodes hold it to."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict

import pytest
import torch
from torch import Tensor, fx, nn

import fxshard
from fxshard.errors import ScheduleError
from fxshard.ir import Phase, Schedule, clock, ops
from fxshard.ir.clock import Times
from fxshard.ir.costs import COMMUNICATION_SHARE, SHORTEST, Costs, Link, touched_bytes
from fxshard.ir.nodes import describe, info

WIDTH = 32


class Chain(nn.Module):
    """Equal layers, and what belongs to the root before and after them."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x).square().mean()


def trace(F: int = 4, W: int = 4, **options) -> Schedule:
    torch._dynamo.reset()
    return fxshard.trace(Chain(), (torch.randn(16, 8),), F=F, W=W, **options)


def matmuls(node: fx.Node) -> float:
    return float(node.target is torch.ops.aten.addmm.default or node.target is torch.ops.aten.mm.default)


SIMPLE = Costs("ticks", 4.0, {"unshard": Link(latency=10.0), "reduce": Link(latency=3.0)}, work=matmuls)
"""A matmul takes 4 ticks and every other operator none; a gather takes 10, a ReduceScatter 3."""


def starts(times: Times, kind: str, phase: str = "forward") -> list[tuple[str | None, float]]:
    return [(info(t.node).flat, t.start) for t in times.tasks if (t.kind, t.phase) == (kind, phase)]


def test_without_prefetch_every_gather_is_exposed() -> None:
    """unshard 0-10 root, 10-20 its second part (both issued at the start), then a layer's gather issues with its WAIT.

    The host does not block, so all gathers are issued at once and lie one behind the other: compute waits ten ticks for
    the first and, since a matmul takes four, six for each one after it.
    """
    s = trace(forward_prefetch=0, backward_prefetch=0, rate_limit=None, passes=lambda p: p[:-1])
    times = clock.run(s, SIMPLE, s.forward)
    gathers = starts(times, "all_gather")
    assert [start for _, start in gathers] == [10.0 * i for i in range(len(gathers))]
    assert [end - start for start, end in ((g.start, g.end) for g in times.gaps)] == [10.0] + [6.0] * 4
    assert [describe(g.cause) for g in times.gaps] == [f"AG {flat}" for flat, _ in gathers]
    assert times.exposed == {"forward": 34.0}
    assert times.total == 5 * 10.0 + 4.0


def test_a_host_that_computes_itself_issues_a_gather_only_when_it_comes_to_it() -> None:
    """The same schedule: each gather starts where compute has come to, so that compute waits ten ticks for every one."""
    s = trace(forward_prefetch=0, backward_prefetch=0, rate_limit=None, passes=lambda p: p[:-1])
    times = clock.run(s, SIMPLE, s.forward, ahead=False)
    assert [start for _, start in starts(times, "all_gather")] == [14.0 * i for i in range(5)]
    assert times.exposed == {"forward": 50.0} and times.total == 5 * 14.0
    assert all(task.start >= task.issued for task in times.tasks)


def test_a_limit_of_one_puts_gather_and_compute_in_turn() -> None:
    s = trace(rate_limit=1, forward_prefetch=0, backward_prefetch=0, reshard_after_forward=True)
    times = clock.run(s, SIMPLE, s.forward)
    frees = dict(starts(times, "free"))
    held = {info(n).flat: frees[info(n.args[0]).flat] for n in s.forward.nodes("throttle")}
    assert held
    for flat, start in starts(times, "all_gather"):
        if flat in held:
            assert start == held[flat]


def holds(schedule: Schedule, phase: Phase, begin: float, times: Times) -> dict[fx.Node, float]:
    """For each communication node, the latest of all that it must come after, straight from the graph."""
    found: dict[fx.Node, float] = {}
    last: dict[str, fx.Node] = {}
    byname = {n.name: n for n in phase.graph.nodes}
    for node in phase.graph.nodes:
        found_info = info(node)
        if node.op != "call_function" or found_info.kind == "param_view":
            continue
        before = [n for n in node.all_input_nodes if n.op == "call_function"]
        before += [byname[name] for name in node.meta["slot"].after] if "slot" in node.meta else []
        lines = [found_info.queue] + (
            [ops.COMMUNICATORS[found_info.queue]] if found_info.kind in ops.COLLECTIVES else []
        )
        before += [last[line] for line in lines if line in last]
        found[node] = max([begin, *(times.end(n) for n in before)])
        last |= dict.fromkeys(lines, node)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"W": 8},
        {"F": 1, "W": 4},
        {"forward_prefetch": 2, "rate_limit": None},
        {"reshard_after_forward": False, "W": 8},
    ],
    ids=str,
)
def test_a_node_starts_as_soon_as_all_that_holds_it_has_ended(options) -> None:
    s = trace(**options)
    for costs in (Costs.unit_slots(s), SIMPLE):
        times = clock.run(s, costs)
        for phase, span in zip(s.phases, times.spans):
            for node, start in holds(s, phase, span.start, times).items():
                if info(node).kind != "compute":
                    assert times.start(node) == start, describe(node)
                else:  # operators of a segment share its time in the order of their work
                    assert times.start(node) >= start or times.start(node) == pytest.approx(start)
                assert times.end(node) >= times.start(node)


def test_busy_and_exposed_add_up_to_the_phase() -> None:
    s = trace(W=8)
    times = clock.run(s)
    for span in times.spans:
        busy = sum(t.end - t.start for t in times.tasks if (t.phase, t.queue) == (span.phase, "compute"))
        assert busy + span.exposed == pytest.approx(
            max(t.end for t in times.tasks if t.phase == span.phase) - span.start
        )
    assert times.spans[1].start == times.spans[0].end
    assert times.total == times.spans[1].end


def test_in_unit_slots_the_median_unit_is_one_and_collectives_are_their_share_of_compute() -> None:
    s = trace()
    times = clock.run(s)
    per_unit: dict[str, float] = defaultdict(float)
    for task in times.tasks:
        if (task.phase, task.kind) == ("forward", "compute"):
            per_unit[task.unit] += task.end - task.start
    assert statistics.median(per_unit.values()) == pytest.approx(1.0)
    assert times.costs.unit == "slots"
    for phase in s.phases:
        tasks = [t for t in times.tasks if t.phase == phase.name]
        compute = sum(t.end - t.start for t in tasks if t.kind == "compute")
        moved = [t for t in tasks if t.kind in ops.COLLECTIVES]
        assert min(t.end - t.start for t in moved) > SHORTEST
        assert sum(t.end - t.start for t in moved) == pytest.approx(COMMUNICATION_SHARE * compute)


def test_what_no_queue_runs_is_there_with_its_inputs() -> None:
    s = trace()
    times = clock.run(s)
    assert s.backward is not None
    view = s.forward.views("layers.1")[0]
    assert times.end(view) == times.start(view) == times.end(s.forward.nodes("wait", "layers.1")[0])
    placeholder = next(iter(s.backward.graph.nodes))
    assert times.end(placeholder) == times.spans[1].start
    assert times.end(s.forward.output) <= times.spans[0].end
    with pytest.raises(KeyError):
        clock.run(s, phase=s.forward).end(placeholder)


def test_one_phase_alone_begins_at_zero_and_takes_as_long() -> None:
    s = trace(W=8)
    assert s.backward is not None
    costs = Costs.unit_slots(s)
    whole, alone = clock.run(s, costs), clock.run(s, costs, s.backward)
    assert alone.spans[0].start == 0.0
    assert alone.total == pytest.approx(whole.spans[1].end - whole.spans[1].start)
    assert alone.exposed["backward"] == pytest.approx(whole.exposed["backward"])


def test_the_same_costs_serve_another_order() -> None:
    """Moving a gather back is seen in the times; moving it forth again gives the times from before."""
    s = trace(rate_limit=None, forward_prefetch=2, passes=lambda p: p[:-1])
    costs = Costs.unit_slots(s)
    before = clock.run(s, costs, s.forward)
    gather, wait = s.forward.one("all_gather", "layers.2"), s.forward.one("wait", "layers.2")
    assert gather is not None and wait is not None
    place = gather.next
    wait.prepend(gather)
    s.forward.one("all_gather", "layers.1").prepend(gather)  # type: ignore[union-attr]
    moved = clock.run(s, costs, s.forward)
    assert moved.start(gather) < before.start(gather)
    place.prepend(gather)
    again = clock.run(s, costs, s.forward)
    assert (again.total, again.exposed, again.start(gather)) == (before.total, before.exposed, before.start(gather))


def test_linear_costs_are_latency_and_bandwidth() -> None:
    s = trace(W=8)
    links = {"unshard": (1e-3, 1e6), "reduce": (2e-3, 1e6), "replicate": (0.0, 1e7)}
    times = clock.run(s, Costs.linear(1e9, links))
    assert times.costs.unit == "ms"
    for task in times.tasks:
        if task.kind in ops.COLLECTIVES:
            latency, rate = links[task.queue]
            assert task.end - task.start == pytest.approx(1e3 * (latency + info(task.node).num_bytes / rate))
        elif task.kind == "compute":
            assert task.end - task.start == pytest.approx(1e3 * sum(map(touched_bytes, task.nodes)) / 1e9)
        else:
            assert task.end == task.start
    by_operator = clock.run(s, Costs.linear(lambda node: 2e-3, {}), s.forward)
    operators = [n for n in s.forward.nodes("compute") if n.op == "call_function"]
    assert by_operator.total == pytest.approx(2.0 * len(operators))
    assert by_operator.exposed == {"forward": 0.0}


def test_a_schedule_may_bring_its_costs() -> None:
    s = trace()
    assert clock.run(s).costs.unit == "slots"
    s.costs = SIMPLE
    assert clock.run(s).costs is SIMPLE
    assert clock.run(s, Costs.unit_slots(s)).costs.unit == "slots"


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'shard': allowed are unshard, reduce, replicate"):
        Costs.linear(1e9, {"shard": (0.0, 1e9)})
    with pytest.raises(ValueError, match="must be positive, not 0"):
        Costs.linear(1e9, {"unshard": (0.0, 0)})


def test_a_plan_of_another_order_is_refused() -> None:
    s = trace()
    node = next(n for n in s.forward.nodes("all_gather") if n.meta["slot"].after)
    node.meta["slot"] = dataclasses.replace(node.meta["slot"], after=("comes_later",))
    with pytest.raises(ScheduleError, match=f"{describe(node)} takes a slot that comes_later frees only later"):
        clock.run(s)
