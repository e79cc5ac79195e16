"""Buckets in the graph: what merging keeps and refuses, and mutants of a right one, refused by the right rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

import fxshard
from fxshard.ir import NodeInfo, Schedule, ops, verify
from fxshard.ir.nodes import describe, info
from fxshard.passes import Pass
from tests.capture.compare import Framed, batches
from tests.ir.test_verify import duplicate, only, replace_slot
from tests.runtime.test_bucket_runs import BF16, merging

UNLIMITED = {"F": 2, "rate_limit": None}


def plain(**options) -> Schedule:
    """Framed(3): (root).0, layers.0 to 2, (root).1, none merged."""
    return fxshard.trace(Framed(), (batches(1)[0],), **{**UNLIMITED, **options})


def merged(**options) -> Schedule:
    """As `plain`, in forward {(root).0, layers.0}, {layers.1, layers.2}; in backward {layers.1, layers.2}; two members
    each."""
    return plain(**{"passes": merging(members=2), **options})


def bucket(s: Schedule, flat: str = "layers.1", phase: str = "forward") -> fx.Node:
    return only(s, phase, "all_gather", flat)


def gathers(s: Schedule, *flats: str) -> list[fx.Node]:
    return [bucket(s, flat) for flat in flats]


# -- queries


def test_a_bucket_is_found_by_each_member():
    s = merged()
    node = bucket(s)
    assert info(node).flats == ("layers.1", "layers.2") and info(node).unit == "layers.1"
    assert describe(node) == "AG layers.1 + layers.2"
    with s.forward.indexed():
        assert s.forward.one("all_gather", "layers.2") is node is s.forward.one("all_gather", "layers.1")
        assert s.forward.nodes(None, "layers.2")[0].name == "shard_layers_2"
        assert not s.forward.nodes("all_gather", "layers.1 + layers.2")
    assert NodeInfo("free", "a").flats == ("a",) and NodeInfo("presence").flats == ()


def test_of_many_members_the_first_and_their_number_are_written():
    s = plain(passes=merging())
    assert describe(bucket(s)) == "AG (root).0 + 4 more"
    assert s.skeleton()[0] == "forward AG (root).0 + layers.0 + layers.1 + layers.2 + (root).1 1344"


def test_a_copy_keeps_the_members():
    phase, mapping = merged().forward.copy()
    for old, new in mapping.items():
        assert info(old) == info(new)
    assert len(phase.nodes("all_gather", "layers.2")) == 1


# -- merging


def test_it_stands_where_the_first_stood_in_registration_order():
    s = plain()
    first = bucket(s, "layers.0")
    before, after = first.prev, first.next
    node = s.forward.merge_gathers([bucket(s, "layers.2"), first], by="me")
    assert node.prev is before and node.next is after and info(node).flats == ("layers.0", "layers.2")
    assert info(node).num_bytes == 576 and info(node).by == "insert-gathers" and info(node).moved_by[-1] == "me"
    assert [info(w).flat for w in node.users] == ["layers.0", "layers.2"]
    assert s.forward.merge_gathers([node]) is node
    whole = s.forward.merge_gathers([bucket(s, "layers.1"), node])
    assert info(whole).flats == ("layers.0", "layers.1", "layers.2")
    s.established.discard("memory-planned")
    verify.verify(s)


def test_casts_come_along_with_a_merge_and_a_move():
    s = merged(mixed_precision=BF16, forward_prefetch=0)
    node = bucket(s)
    casts = [only(s, "forward", "cast_shard", flat) for flat in ("layers.1", "layers.2")]
    assert [node.prev.prev, node.prev] == casts
    anchor = next(n for n in s.forward.graph.nodes if n.op == "call_function")
    assert s.forward.blocker(node, anchor) is None and s.forward.move_before(node, anchor)
    assert [node.prev.prev, node.prev, node.next] == [*casts, anchor]


def test_a_bucket_may_not_move_behind_a_members_wait():
    s = merged()
    wait = only(s, "forward", "wait", "layers.2")
    with pytest.raises(
        fxshard.ScheduleError, match=r"AG layers\.1 \+ layers\.2 may not move .* WAIT layers\.1 pins it"
    ):
        s.forward.move_before(bucket(s), wait)


def test_a_gather_may_not_overtake_a_bucket_with_the_same_member():
    s = merged()
    again = duplicate(bucket(s))
    assert s.forward.blocker(again, bucket(s, "(root).0")) is next(iter(s.forward.nodes("all_gather", "layers.1")))


def test_prefetch_moves_a_bucket():
    s = fxshard.trace(
        Framed(), (batches(1)[0],), F=2, rate_limit=None,
        passes=lambda p: [*p[:4], *merging(members=2)(p)[-3:-2], *p[4:]],
    )  # fmt: skip
    assert bucket(s) < only(s, "forward", "wait", "layers.0")
    assert bucket(s, phase="backward") < s.backward.full("layers.2")
    assert info(bucket(s)).moved_by == ("merge-small-gathers", "forward-overlap")


def test_a_throttle_between_forbids_it_by_name():
    s = plain(rate_limit=2)
    with pytest.raises(
        fxshard.ScheduleError, match=r"AG layers\.2 .* merged with AG layers\.0: LIMIT layers\.\d stands"
    ):
        s.forward.merge_gathers(gathers(s, "layers.0", "layers.2"))


def test_what_comes_too_late_forbids_it_by_name():
    s = plain(mixed_precision=BF16)
    gather, cast = bucket(s, "layers.2"), only(s, "forward", "cast_shard", "layers.2")
    with s.forward.graph.inserting_before(gather):
        copy = s.forward.graph.call_function(torch.ops.aten.clone.default, (cast,))
    gather.update_arg(0, copy)
    with pytest.raises(
        fxshard.ScheduleError, match=r"AG layers\.2 .* merged with AG layers\.0: clone\.default pins it"
    ):
        s.forward.merge_gathers(gathers(s, "layers.0", "layers.2"))


def test_what_ranks_agreed_on_forbids_it():
    s = plain()
    s.agreed = tuple(s.skeleton())
    with pytest.raises(
        fxshard.ScheduleError, match=r"AG layers\.2 may not be merged with AG layers\.0: AG layers\.\d pins it"
    ):
        s.forward.merge_gathers(gathers(s, "layers.0", "layers.2"))
    free = s.copy(reorder=True)
    free.forward.merge_gathers(gathers(free, "layers.0", "layers.2"))
    verify.verify(free)
    assert "memory-planned" in s.established and "memory-planned" not in free.established


def test_the_throttle_before_the_first_becomes_the_buckets():
    s = plain(rate_limit=2)
    # layers.2 is held back; the resident head, which no limit counts, is issued behind it without a throttle of its own.
    node = s.forward.merge_gathers(gathers(s, "layers.2", "(root).1"))
    (throttle,) = s.forward.nodes("throttle", "layers.2")
    assert info(throttle).flats == info(node).flats == throttle.args[1] == ("layers.2", "(root).1")
    anchor = only(s, "forward", "free", "layers.1").next
    assert s.forward.move_before(node, anchor)  # later, and the throttle with it
    assert [node.next, node.prev] == [anchor, throttle]
    verify.verify(s)


def test_json_keeps_buckets():
    s = merged(rate_limit=2)
    again = Schedule.from_json(s.to_json())
    verify.verify(again)
    assert again.text("all") == s.text("all") and again.to_json() == s.to_json()
    assert [info(n).flats for n in again.forward.all_gathers] == [info(n).flats for n in s.forward.all_gathers]
    assert fxshard.diff(s, again).text() == "no difference"


def test_a_merge_is_a_move_to_whoever_bisects():
    s = plain()
    made: list[str] = []
    s.on_move = lambda node, anchor: made.append(f"{describe(node)} to {describe(anchor)}")
    s.forward.merge_gathers(gathers(s, "layers.2", "layers.0"))
    assert made == ["AG layers.2 to AG layers.0"]


def test_only_gathers_of_one_phase_are_merged():
    s = plain()
    other, wait = bucket(s, "layers.1", "backward"), only(s, "forward", "wait", "layers.1")
    for wrong in (other, wait):
        with pytest.raises(fxshard.ScheduleError, match=r"layers\.1 is no AllGather of phase 'forward'"):
            s.forward.merge_gathers([bucket(s, "layers.0"), wrong])
    with pytest.raises(fxshard.ScheduleError, match="no AllGather to merge"):
        s.forward.merge_gathers([])


def test_merged_before_keep_root_resident_the_root_is_not_kept():
    s = plain(passes=lambda p: [*p[:3], *merging()(p)[-3:-2], *p[3:]])
    assert not s.resident
    (remark,) = [r for r in s.remarks if r.by == "keep-root-resident" and r.unit == "(root).1"]
    assert remark.kind == "missed" and remark.text.startswith("backward gathers '(root).1' together with others")


def test_a_resident_and_others_share_a_bucket():
    s = plain(passes=merging())
    (node,) = s.forward.all_gathers
    assert "(root).1" in s.resident and "(root).1" in info(node).members
    assert node.meta["slot"].num_bytes == sum(f.full_bytes for f in s.flats.values() if f.name != "(root).1")


# -- the limit counts members


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_the_rate_limit_counts_members(limit):
    deep = {"F": 2, "forward_prefetch": 4, "backward_prefetch": 4, "rate_limit": limit}
    s = fxshard.trace(Framed(6), (batches(1)[0],), passes=merging(members=2), **deep)
    for phase in s.phases:
        alive, most = set(), 0
        for node in phase.graph.nodes:
            if info(node).kind == "all_gather":
                alive |= {f for f in info(node).flats if f not in s.resident}
            most = max(most, len(alive))
            if info(node).kind == "free":
                alive.discard(info(node).flat)
        assert limit - 1 <= most <= limit
    throttles = s.forward.nodes("throttle", "layers.5")
    assert [info(t).flats for t in throttles] == [info(bucket(s, "layers.5")).flats]


def test_a_bucket_larger_than_the_limit_is_refused_by_name():
    with pytest.raises(fxshard.ScheduleError, match=r"rate_limit=2 is below the 4 units.*'layers.2'") as caught:
        plain(rate_limit=2, passes=merging())
    assert "Raise it to at least 4" in str(caught.value)


def test_reference_meaning():
    a, b = torch.arange(3.0), torch.arange(2.0)
    pending = ops.all_gather((a, b), ("a", "b"))
    assert torch.equal(ops.wait(pending, "b"), b) and torch.equal(ops.wait(pending, "a"), a)
    with pytest.raises(ValueError, match="zip"):
        ops.all_gather((a,), ("a", "b"))


# -- mutants


def a_member_without_a_wait(s: Schedule) -> None:
    wait, other = (only(s, "forward", "wait", flat) for flat in ("layers.2", "layers.1"))
    wait.replace_all_uses_with(other)
    s.forward.graph.erase_node(wait)


def a_member_waited_for_twice(s: Schedule) -> None:
    duplicate(only(s, "forward", "wait", "layers.2"))


def a_wait_for_another_flat(s: Schedule) -> None:
    wait = only(s, "forward", "wait", "layers.2")
    wait.meta["fxshard"] = dataclasses.replace(info(wait), flat="layers.0")


def a_member_twice(s: Schedule) -> None:
    node = bucket(s)
    node.args = ((*node.args[0], node.args[0][1]), (*node.args[1], "layers.2"))
    node.meta["fxshard"] = dataclasses.replace(info(node), members=("layers.1", "layers.2", "layers.2"))


def a_member_twice_and_waited_for_twice(s: Schedule) -> None:
    a_member_twice(s)
    duplicate(only(s, "forward", "wait", "layers.2"))


def views_of_the_other_member(s: Schedule) -> None:
    other = only(s, "forward", "wait", "layers.1")
    for view in s.forward.views("layers.2"):
        view.update_arg(0, other)


def members_in_another_order(s: Schedule) -> None:
    node = bucket(s)
    node.meta["fxshard"] = dataclasses.replace(info(node), members=tuple(reversed(info(node).members)))


def the_shard_of_another(s: Schedule) -> None:
    bucket(s).update_arg(0, (only(s, "forward", "shard", "layers.0"), bucket(s).args[0][1]))


def one_shard_too_few(s: Schedule) -> None:
    bucket(s).update_arg(0, bucket(s).args[0][:1])


def a_view_of_the_pending_bucket(s: Schedule) -> None:
    s.forward.views("layers.2")[0].update_arg(0, bucket(s))


def on_another_queue(s: Schedule) -> None:
    bucket(s).meta["fxshard"] = dataclasses.replace(info(bucket(s)), queue="reduce")


def a_member_never_freed(s: Schedule) -> None:
    s.backward.graph.erase_node(only(s, "backward", "free", "layers.1"))


def a_member_freed_too_early(s: Schedule) -> None:
    s.forward.first_use("layers.2").prepend(only(s, "forward", "free", "layers.2"))


def a_limit_for_fewer_members(s: Schedule) -> None:
    s.rate_limit = 2


def no_throttle_before_the_bucket(s: Schedule) -> None:
    for phase in s.phases:
        for node in phase.nodes("throttle"):
            phase.graph.erase_node(node)


def no_slot(s: Schedule) -> None:
    del bucket(s).meta["slot"]


def a_slot_for_one_member(s: Schedule) -> None:
    replace_slot(bucket(s), num_bytes=s.flats["layers.1"].full_bytes)


def a_slot_without_staging(s: Schedule) -> None:
    s.direct_exchange = True


def a_slot_over_its_second_member(s: Schedule) -> None:
    """Behind the first member's buffer, which is freed by then; the second member is still read."""
    slot = bucket(s, phase="backward").meta["slot"]
    later = only(s, "backward", "flatten_grads", "layers.2")
    free = only(s, "backward", "free", "layers.2")
    replace_slot(later, offset=slot.offset + slot.num_bytes // 2, after=(free.name,))


MUTANTS: list[tuple[str, Callable[[Schedule], None], str, dict]] = [
    ("one_wait_for_each_issue", a_member_without_a_wait, "'layers.2'", {}),
    ("one_wait_for_each_issue", a_member_waited_for_twice, "'layers.2'", {}),
    ("one_wait_for_each_issue", a_wait_for_another_flat, "'layers.0'", {}),
    ("one_wait_for_each_issue", a_member_twice, "'layers.2', 'layers.2'", {}),
    ("one_wait_for_each_issue", a_member_twice_and_waited_for_twice, "'layers.2', 'layers.2'", {}),
    ("one_wait_for_each_issue", a_view_of_the_pending_bucket, "layers.2", {}),
    ("views_are_of_their_own_parameter", views_of_the_other_member, "'layers.2'", {}),
    ("reads_its_own_flat_parameter", members_in_another_order, "layers.1", {}),
    ("reads_its_own_flat_parameter", the_shard_of_another, "layers.0", {}),
    ("reads_its_own_flat_parameter", a_wait_for_another_flat, "layers.0", {}),
    ("on_its_queue_and_group", on_another_queue, "queue 'reduce'", {}),
    ("views_are_of_their_own_parameter", members_in_another_order, "'layers.2'", {}),
    ("views_are_of_their_own_parameter", the_shard_of_another, "'layers.1'", {}),
    ("views_are_of_their_own_parameter", one_shard_too_few, "'layers.2'", {}),
    ("freed_or_resident", a_member_never_freed, "'layers.1'", {}),
    ("used_only_while_gathered", a_member_freed_too_early, "'layers.2'", {}),
    ("within_the_limit", a_limit_for_fewer_members, "too many units in flight", {"rate_limit": 4}),
    ("streams_within_the_limit", a_limit_for_fewer_members, "'layers.2'", {"rate_limit": 4}),
    ("streams_within_the_limit", no_throttle_before_the_bucket, "layers.1 + layers.2", {"rate_limit": 2}),
    ("every_buffer_has_a_slot", no_slot, "layers.1 + layers.2", {}),
    ("every_buffer_has_a_slot", a_slot_for_one_member, "layers.1 + layers.2", {}),
    ("every_buffer_has_a_slot", a_slot_without_staging, "layers.1 + layers.2", {}),
    ("slots_do_not_overlap", a_slot_over_its_second_member, "still needed", {}),
]


@pytest.mark.parametrize(
    ("rule", "mutate", "words", "options"), MUTANTS, ids=[f"{m[0]}-{m[1].__name__}" for m in MUTANTS]
)
def test_a_mutant_is_refused_by_the_right_rule(rule, mutate, words, options):
    s = merged(**options)
    verify.verify(s)
    mutate(s)
    with pytest.raises(fxshard.ScheduleError) as caught:
        verify.verify(s)
    assert any(line.startswith(f"{rule}: ") and words in line for line in str(caught.value).splitlines()), caught.value


def test_the_pass_that_breaks_a_bucket_is_told():
    class Wrong(Pass):
        name = "wrong"

        def apply(self, s, remarks):
            a_member_without_a_wait(s)

    with pytest.raises(fxshard.ScheduleError, match=r"has waits for 'layers.1'.*\n.*\n(.*\n)*  after   wrong"):
        plain(passes=lambda p: [*p[:-2], *merging(members=2)(p)[-3:-2], Wrong(), *p[-2:]])
