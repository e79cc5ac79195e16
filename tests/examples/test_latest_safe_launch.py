"""latest-safe-launch: gathers issued later, exposed time as before by the clock, less gathered at a time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxshard
from examples.passes import after
from examples.passes.latest_safe_launch import LatestSafeLaunch
from fxshard.ir import Schedule, clock
from fxshard.ir.costs import Costs
from fxshard.ir.nodes import info
from tests.capture.compare import identical
from tests.distributed.harness import RankFailure, Ranks
from tests.examples.trained import CASES, DEEP, EACH, ladder, story, traced, train
from tests.passes.golden import node_names, remarks


@functools.cache
def launched(margin: float = 0.0, rates: tuple[float, float, float] | None = None) -> Any:
    return after("forward-overlap", LatestSafeLaunch(margin, rates))


def costs_of(schedule: Schedule, rates: tuple[float, float, float] | None = None) -> Costs:
    return LatestSafeLaunch(0.0, rates).costs(schedule)[0]


def exposed(schedule: Schedule, costs: Costs | None = None, ahead: bool = True) -> list[float]:
    return list(clock.run(schedule, costs or costs_of(schedule), ahead=ahead).exposed.values())


def byte_time(schedule: Schedule, costs: Costs | None = None) -> float:
    """The area below the curve of gathered bytes over time, from where each AG is issued to its FREE; without residents."""
    times = clock.run(schedule, costs or costs_of(schedule), ahead=False)
    issued = {task.node: task.issued for task in times.tasks}
    return sum(
        info(gather).num_bytes * (times.end(free) - issued[gather])
        for phase in schedule.phases
        for gather in phase.all_gathers
        if (free := phase.one("free", str(info(gather).flat))) is not None
    )


def most_in_flight(schedule: Schedule) -> int:
    most = 0
    for phase in schedule.phases:
        alive: set[str] = set()
        for node in phase.graph.nodes:
            if info(node).kind == "all_gather" and schedule.counts(str(info(node).flat)):
                alive.add(str(info(node).flat))
                most = max(most, len(alive))
            elif info(node).kind == "free":
                alive.discard(str(info(node).flat))
    return most


def gathers(schedule: Schedule) -> list[list[str | None]]:
    return [[info(n).flat for n in phase.all_gathers] for phase in schedule.phases]


def no_longer(after_it: list[float], before_it: list[float]) -> bool:
    return all(a <= b * (1 + 1e-6) + 1e-9 for a, b in zip(after_it, before_it, strict=True))


def test_golden():
    # Prefetched three ahead, all four units are gathered at the start. AG layers.2 is early enough after FREE layers.0,
    # while layers.1 computes; AG layers.1 has to be there when layers.0 ends, so it stays.
    schedule = ladder([8, 8, 8, 8], launched(), **DEEP)
    deep = ladder([8, 8, 8, 8], **DEEP)
    assert story(deep.forward, "AG", "FREE") == "AG:0 AG:1 AG:2 AG:3 FREE:0 FREE:1 FREE:2 FREE:3"
    assert story(schedule.forward, "AG", "FREE") == "AG:0 AG:1 FREE:0 AG:2 FREE:1 AG:3 FREE:2 FREE:3"
    # In backward a weight is read first and most of a layer's work comes after its FREE: one unit at a time is enough.
    # Reduces share the link; a gather still comes before the reduce of the unit that was freed.
    assert story(deep.backward, "AG", "FREE", "RS") == (
        "AG:3 AG:2 AG:1 AG:0 FREE:3 RS:3 FREE:2 RS:2 FREE:1 RS:1 FREE:0 RS:0"
    )
    assert story(schedule.backward, "AG", "FREE", "RS") == (
        "AG:3 FREE:3 AG:2 RS:3 FREE:2 AG:1 RS:2 FREE:1 AG:0 RS:1 FREE:0 RS:0"
    )
    passed = remarks(schedule, "latest-safe-launch", "passed")
    assert [(r.unit, r.text) for r in passed][:2] == [
        ("layers.3", "AG launched after FREE layers.1 in forward"),
        ("layers.2", "AG launched after FREE layers.0 in forward"),
    ]
    missed = remarks(schedule, "latest-safe-launch", "missed")
    assert [(r.unit, r.text) for r in missed][:2] == [
        ("layers.1", "AG in forward would be exposed after FREE layers.0"),
        ("layers.0", "AG in forward has no FREE to wait for"),
    ]


def test_without_prefetch_there_is_nothing_to_move():
    options = {"forward_prefetch": 0, "backward_prefetch": 0}
    schedule = ladder([4, 4, 4], after("keep-root-resident", LatestSafeLaunch()), **options)
    assert node_names(schedule) == node_names(ladder([4, 4, 4], **options))
    said = remarks(schedule, "latest-safe-launch")
    assert len(said) == 6 and {(r.kind, r.text.split(" ", 3)[3]) for r in said} == {
        ("missed", "has no FREE to wait for")
    }


def test_with_one_rank_a_group_nothing_is_gathered(one_thread: None):
    schedule = ladder([4, 4], launched(), F=1, **DEEP)
    (missed,) = remarks(schedule, "latest-safe-launch")
    assert (missed.kind, missed.unit, missed.text) == ("missed", "(all)", "nothing is gathered")
    assert node_names(schedule) == node_names(ladder([4, 4], F=1, **DEEP))
    case = replace(CASES["gpt"], F=1)
    plain, _ = train(case, steps=2)
    same, _ = train(case, launched(), steps=2, **DEEP)
    assert all(map(identical, plain, same))


def test_a_forward_only_schedule_is_launched_late_too():
    with torch.no_grad():
        schedule, deep = ladder([8, 8, 8, 8], launched(), **DEEP), ladder([8, 8, 8, 8], **DEEP)
    assert (most_in_flight(schedule), most_in_flight(deep)) == (2, 4)


@pytest.mark.parametrize("margin", [0.0, 0.25])
@pytest.mark.parametrize("name", EACH)
def test_less_is_gathered_at_no_more_exposed_time(name: str, margin: float):
    deep, schedule = traced(name, deep=True), traced(name, launched(margin), deep=True)
    for ahead in (True, False):
        assert no_longer(exposed(schedule, ahead=ahead), exposed(deep, ahead=ahead))
    assert schedule.memory.peak_gathered_bytes < 0.75 * deep.memory.peak_gathered_bytes
    assert byte_time(schedule) < 0.8 * byte_time(deep)
    assert gathers(schedule) == gathers(deep)


def test_four_units_in_flight_become_two():
    deep, schedule = traced("gpt", deep=True), traced("gpt", launched(0.25), deep=True)
    assert (most_in_flight(deep), most_in_flight(schedule)) == (4, 2)


UNEVEN = [8, 8, 8, 400, 8, 8, 8]
RATES = (2e6, 0.0, 20e6)
"""Bytes a second of operators, latency, bytes a second of a collective: the large layer takes longer than one before it."""


def test_where_one_unit_ahead_is_too_late_a_gather_stays_early():
    one, deep = ladder(UNEVEN, rate_limit=None), ladder(UNEVEN, **DEEP)
    schedule = ladder(UNEVEN, launched(rates=RATES), **DEEP)
    times = [sum(exposed(s, costs_of(s, RATES), ahead=False)) for s in (one, deep, schedule)]
    assert times[1] < 0.95 * times[0] and times[2] <= times[1] * (1 + 1e-9)
    areas = [byte_time(s, costs_of(s, RATES)) for s in (deep, schedule)]
    assert areas[1] < 0.95 * areas[0]


@pytest.mark.parametrize("name", EACH)
def test_no_gather_could_be_launched_later(name: str):
    """Every further move, past one FREE, exposes a gather or makes no sense: nothing lies between it and the next."""
    schedule = traced(name, launched(0.0), deep=True)
    costs, tried = costs_of(schedule), 0
    for phase in schedule.phases:
        held = clock.run(schedule, costs, phase, ahead=False).exposed[phase.name]
        order = phase.all_gathers
        for gather, following in zip(order, [*order[1:], None]):
            limit = min(next(iter(gather.users)), following or phase.output)
            for free in (f for f in phase.frees if gather < f < limit):
                trial, copied = phase.copy()
                for node in trial.graph.nodes:
                    node.meta.pop("slot", None)
                trial.move_after(copied[gather], copied[free])
                later = clock.run(schedule, costs, trial, ahead=False).exposed[phase.name]
                assert later > held * (1 + 1e-9), f"{gather} after {free}"
                tried += 1
    assert tried > 0


def test_a_margin_launches_earlier():
    """Collectives that fit exactly behind the work before them do not when they take longer."""
    sure, exact = (ladder([8] * 6, launched(m, (1e6, 0.0, 1.2e6)), **DEEP) for m in (1.0, 0.0))
    assert byte_time(exact, costs_of(exact, RATES)) < byte_time(sure, costs_of(sure, RATES))


@pytest.mark.parametrize("name", EACH)
def test_training_is_the_same_bit_for_bit(name: str, one_thread: None):
    case = CASES[name]
    plain, _ = train(case)
    same, model = train(case, launched(), debug=True, **DEEP)
    assert remarks(model.schedule, "latest-safe-launch", "passed")
    assert all(map(identical, plain, same)) and len(plain) == len(same)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    depth=st.integers(0, 5),
    limit=st.sampled_from([None, 2, 3]),
    margin=st.sampled_from([0.0, 0.25, 2.0]),
    rate=st.floats(1e5, 1e8),
)
def test_for_all_sizes_and_speeds(rows: list[int], depth: int, limit: int | None, margin: float, rate: float):
    rates = (2e6, 1e-5, rate)
    options: dict[str, Any] = {"forward_prefetch": depth, "backward_prefetch": depth, "rate_limit": None}
    last = "forward-overlap" if depth else "keep-root-resident"
    deep = ladder(rows, **options)
    schedule = ladder(rows, after(last, LatestSafeLaunch(margin, rates)), **options)
    costs, before = costs_of(schedule, rates), costs_of(deep, rates)
    assert no_longer(exposed(schedule, costs, False), exposed(deep, before, False))
    assert schedule.memory.peak_gathered_bytes <= deep.memory.peak_gathered_bytes
    assert gathers(schedule) == gathers(deep)
    if limit is not None:  # the verifier holds the limit
        ladder(rows, after(last, LatestSafeLaunch(margin, rates)), **{**options, "rate_limit": limit})


def test_a_negative_margin_is_refused_and_options_are_printed():
    with pytest.raises(ValueError, match=r"margin=-0\.1"):
        LatestSafeLaunch(-0.1)
    assert str(LatestSafeLaunch(0.5)) == "latest-safe-launch{margin=0.5, rates=None}"


def of_different_shapes() -> str:
    rank = torch.distributed.get_rank()
    model = fxshard.compile(CASES["gpt"].build(), passes=launched(rates=(1e6, 1.0, 1e9)), **DEEP)
    tokens = torch.zeros(1 + 63 * rank, 8, dtype=torch.long)
    model(tokens=tokens, targets=tokens).backward()
    return str(model.schedule)


def test_ranks_that_decide_differently_are_refused(ranks: Ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, of_different_shapes)
    assert isinstance(caught.value.error, fxshard.AgreementError)
