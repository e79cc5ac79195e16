"""keep-best-resident: what backward does not gather again, in which order units are chosen, and that memory is as stated."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxshard
from examples.passes import after
from examples.passes.keep_best_resident import KeepBestResident
from fxshard.ir import Schedule, clock
from fxshard.ir.costs import COLLECTIVE_QUEUES, Costs
from fxshard.passes import Pass
from tests.capture.compare import identical
from tests.examples.trained import CASES, EACH, gathered_bytes, ladder, story, traced, train
from tests.passes.golden import node_names, remarks


@functools.cache
def kept(budget_bytes: int) -> object:
    return after("keep-root-resident", KeepBestResident(budget_bytes))


def whole_units(schedule: Schedule) -> int:
    return sum(flat.full_bytes for flat in schedule.flats.values())


def test_golden():
    # layers.2 is gathered once: it has no FREE in forward and no AG in backward, where its FREE ends its residency. The
    # AG of layers.1 is issued before its work, where it was before.
    schedule = ladder([4, 4, 4], kept(96))
    assert schedule.resident == {"layers.2"}
    default = ladder([4, 4, 4])
    kinds = ("AG", "LIMIT", "WAIT", "FREE")
    assert story(default.forward, *kinds) == "AG:0 AG:1 WAIT:0 FREE:0 LIMIT:2 AG:2 WAIT:1 FREE:1 WAIT:2 FREE:2"
    assert story(schedule.forward, *kinds) == "AG:0 AG:1 WAIT:0 FREE:0 AG:2 WAIT:1 FREE:1 WAIT:2"
    kinds = ("AG", "FREE", "RS")
    assert story(default.backward, *kinds) == "AG:2 AG:1 FREE:2 RS:2 AG:0 FREE:1 RS:1 FREE:0 RS:0"
    assert story(schedule.backward, *kinds) == "AG:1 FREE:2 RS:2 AG:0 FREE:1 RS:1 FREE:0 RS:0"


def test_the_first_of_backward_then_the_smallest_then_the_latest_used_are_kept():
    def chosen(rows: list[int], budget_bytes: int) -> list[str]:
        return [r.unit for r in remarks(ladder(rows, kept(budget_bytes)), "keep-best-resident", "passed")]

    everything = 1 << 20
    assert chosen([8, 4, 8, 4, 16], everything) == [f"layers.{i}" for i in (4, 3, 1, 2, 0)]
    # 16 rows take 320 bytes: what does not fit is passed over, what is smaller may still fit.
    assert chosen([8, 4, 8, 4, 16], 319) == ["layers.3", "layers.1"]


def test_what_does_not_fit_is_remarked_with_what_is_left():
    missed = remarks(ladder([4, 4, 4], kept(100)), "keep-best-resident", "missed")
    assert [(r.unit, r.text) for r in missed] == [
        (f"layers.{i}", "96 B do not fit in the 4 B left of the budget") for i in (1, 0)
    ]


def test_nothing_to_keep_is_remarked_and_changes_nothing():
    for F, everything in ((1, {}), (2, {"reshard_after_forward": False})):
        schedule = ladder([4, 4], kept(1 << 20), F=F, **everything)
        (missed,) = remarks(schedule, "keep-best-resident")
        assert (missed.kind, missed.unit, missed.text) == ("missed", "(all)", "backward gathers nothing again")
        assert node_names(schedule) == node_names(ladder([4, 4], F=F, **everything))
    nothing = ladder([4, 4], kept(0))
    assert node_names(nothing) == node_names(ladder([4, 4]))
    assert len(remarks(nothing, "keep-best-resident", "missed")) == 2


def test_a_forward_only_schedule_keeps_nothing():
    with torch.no_grad():
        schedule = ladder([4, 4], kept(1 << 20))
    assert not schedule.resident and not remarks(schedule, "keep-best-resident")


def test_after_the_rate_limit_it_is_refused():
    with pytest.raises(fxshard.ScheduleError, match=r"FREE layers\.1 in forward: keep it before them"):
        ladder([4, 4], after("rate-limit", KeepBestResident(1 << 20)))


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match=r"budget_bytes=-1"):
        KeepBestResident(-1)


def test_a_place_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no pass 'keep-root-resident' to stand after; there are insert-gathers"):
        ladder([4, 4], kept(0), keep_root_resident=False)


@pytest.mark.parametrize("name", EACH)
def test_backward_gathers_less_in_the_memory_stated(name: str):
    case, default = CASES[name], traced(name)
    blocks = max(flat.full_bytes for flat in default.flats.values())
    before = gathered_bytes(default)
    for budget in (blocks, 100 * blocks):
        schedule = case.trace(kept(budget))
        added = schedule.memory.resident_bytes - default.memory.resident_bytes
        assert 0 < added <= budget
        assert gathered_bytes(schedule) == before - added
        assert gathered_bytes(schedule, "forward") == gathered_bytes(default, "forward")
        assert schedule.memory.peak_gathered_bytes <= default.memory.peak_gathered_bytes + added
    assert not schedule.backward.all_gathers


@pytest.mark.parametrize("name", EACH)
def test_backward_is_exposed_for_less_time(name: str):
    """By the clock: for less time over a link slower than compute, for no longer over one behind which all is hidden."""
    budget = 2 * max(flat.full_bytes for flat in traced(name).flats.values())
    for ahead, (rate, share) in itertools.product((True, False), ((1e6, 0.98), (1e8, 1 + 1e-9))):
        costs = Costs.linear(1e8, dict.fromkeys(COLLECTIVE_QUEUES, (1e-4, rate)))
        before = clock.run(traced(name), costs, ahead=ahead).exposed
        exposed = clock.run(traced(name, kept(budget)), costs, ahead=ahead).exposed
        assert exposed["backward"] < share * before["backward"]
        assert exposed["forward"] <= before["forward"] * (1 + 1e-9)


@pytest.mark.parametrize("name", EACH)
def test_training_is_the_same_bit_for_bit(name: str, one_thread: None):
    case = CASES[name]
    budget = 2 * max(flat.full_bytes for flat in traced(name).flats.values())
    plain, _ = train(case)
    same, model = train(case, kept(budget), debug=True)
    assert len(model.schedule.resident) > len(traced(name).resident)
    assert all(map(identical, plain, same)) and len(plain) == len(same)


def test_with_one_rank_a_group_training_is_the_same(one_thread: None):
    case = replace(CASES["mixed precision"], F=1)
    plain, _ = train(case, steps=2)
    same, _ = train(case, kept(1 << 20), steps=2)
    assert all(map(identical, plain, same))


ROWS = st.lists(st.integers(1, 64), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(rows=ROWS, F=st.sampled_from([2, 3, 4]), share=st.floats(0, 1.2))
def test_for_all_sizes(rows: list[int], F: int, share: float):
    default = ladder(rows, F=F)
    budget = int(share * whole_units(default))
    schedule = ladder(rows, kept(budget), F=F)
    added = schedule.memory.resident_bytes - default.memory.resident_bytes
    assert added <= budget
    assert gathered_bytes(schedule) == gathered_bytes(default) - added
    # Two in flight as before; with a kept one gone from between them they may be the two largest, each 16-byte aligned.
    most = sorted((f.full_bytes for f in schedule.flats.values() if f.name not in schedule.resident), reverse=True)
    in_flight = max(default.memory.peak_gathered_bytes - default.memory.resident_bytes, sum(most[:2]) + 32)
    assert schedule.memory.peak_gathered_bytes <= schedule.memory.resident_bytes + in_flight
    order = [n for n in default.backward.flats_in_use_order() if n not in schedule.resident]
    assert [str(n.args[1]) for n in schedule.backward.all_gathers] == order


@settings(max_examples=8, deadline=None)
@given(rows=ROWS, depth=st.integers(0, 4), limit=st.sampled_from([1, 2, 3, None]), share=st.floats(0, 1))
def test_with_any_prefetch_the_budget_holds(rows: list[int], depth: int, limit: int | None, share: float):
    options = {"backward_prefetch": depth, "forward_prefetch": depth, "rate_limit": limit}
    default = ladder(rows, **options)
    budget = int(share * whole_units(default))
    schedule = ladder(rows, kept(budget), **options)
    assert schedule.memory.resident_bytes <= budget
    if limit is not None:  # the verifier holds the number of the others; their sizes are what is left
        most = sorted((f.full_bytes for f in schedule.flats.values() if f.name not in schedule.resident), reverse=True)
        assert schedule.memory.peak_gathered_bytes <= schedule.memory.resident_bytes + sum(most[:limit]) + 64


def test_a_budget_that_was_not_kept_is_told():
    schedule = ladder([4, 4, 4], kept(1 << 20))
    assert list(KeepBestResident(1 << 20).ensures(schedule)) == []
    assert list(KeepBestResident(100).ensures(schedule)) == ["288 B are kept, the budget is 100 B"]


def test_it_is_a_pass_that_prints_its_option():
    assert isinstance(KeepBestResident(5), Pass) and str(KeepBestResident(5)) == "keep-best-resident{budget_bytes=5}"
