"""Gathers merged into buckets, run in a virtual world: the bits of the schedule without them, in every configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from examples.passes.merge_small_gathers import MergeSmallGathers
from fxshard.runtime import VirtualWorld
from fxshard.runtime.streams import RecordingStreams
from tests.capture.compare import Framed, batches, check, differences, events, mean_of_squares
from tests.runtime.test_streams import shares_memory, train

BF16 = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
WIDTHS = (8, 5, 3, 7, 1, 6, 5, 8)


class Odd(nn.Module):
    """Seven units of different odd sizes, one parameter of each in another dtype, one unit frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))
        self.layers[2].bias.data = self.layers[2].bias.data.double()
        self.layers[4].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(nn.functional.linear(x, layer.weight)) + layer.bias.to(x.dtype)
        return x


def merging(**options: Any) -> Callable[[list], list]:
    return lambda passes: [*passes[:-2], MergeSmallGathers(**options), *passes[-2:]]


def buckets(schedule: fxshard.Schedule) -> list[tuple[str, ...]]:
    return [n.meta["fxshard"].members for p in schedule.phases for n in p.all_gathers if n.meta["fxshard"].members]


CONFIGURATIONS = [
    {"F": 2}, {"F": 3}, {"F": 8}, {"F": 1},
    {"F": 2, "rate_limit": 3, "forward_prefetch": 3, "backward_prefetch": 3},
    {"F": 3, "reshard_after_forward": False},
    {"F": 3, "keep_root_resident": False, "rate_limit": None},
    {"F": 2, "rate_limit": None, "rate_limit_bytes": 1000},
]  # fmt: skip


@pytest.mark.parametrize("make", [Odd, pytest.param(lambda: Framed(5), marks=pytest.mark.full)], ids=["odd", "framed"])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_a_merged_schedule_trains_as_the_plain_model(options, make):
    """In debug mode: a member's buffer is NaN after its FREE, whatever the others still need."""
    members = 2 if options.get("rate_limit", 2) else None
    model = check(make, debug=True, passes=merging(members=members, bucket_bytes=900), **options)
    assert bool(buckets(model.schedule)) == (options["F"] > 1)


def test_after_the_rate_limit_what_is_within_it_is_merged():
    model = check(lambda: Framed(5), F=2, debug=True, passes=[MergeSmallGathers()])
    assert buckets(model.schedule) == [("(root).0", "layers.0"), ("layers.4", "(root).1"), ("layers.3", "layers.4")]


@pytest.mark.parametrize(
    ("F", "contributors", "options"),
    [(2, 4, {}), (4, 4, {"mixed_precision": BF16}), (2, 4, {"mixed_precision": BF16}),
     (4, 1, {"mixed_precision": BF16, "reshard_after_forward": False})],
    ids=["hybrid", "bf16", "bf16-hybrid", "bf16-resident"],
)  # fmt: skip
def test_contributors_and_casts_give_the_same_bits(F, contributors, options):
    torch.manual_seed(0)
    plain = Odd()
    models = []
    for passes in (None, merging(members=2)):
        world = VirtualWorld(F, contributors=contributors)
        model = fxshard.compile(copy.deepcopy(plain), world=world, debug=True, passes=passes, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            for rank in range(contributors):
                with world.rank(rank):
                    mean_of_squares(model(batches(8)[2 * rank + step])).backward()
            optimizer.step()
            if not step:
                optimizer.zero_grad()
        models.append(model)
    assert not buckets(models[0].schedule) and len(buckets(models[1].schedule)) >= 3
    assert all(p.grad is not None for p in models[1].parameters() if p.requires_grad)
    whole = [{n: p.full_tensor() for n, p in m.named_parameters()} for m in models]
    assert all(torch.equal(whole[0][n], whole[1][n]) for n in whole[0])


def test_a_bucket_is_issued_once_and_waited_for_by_each_member():
    model = fxshard.compile(Framed(4), F=2, rate_limit=None, passes=merging(bucket_bytes=576))
    mean_of_squares(model(batches(1)[0])).backward()
    seen = events(model)
    mean_of_squares(model(batches(1)[0])).backward()
    planned = [
        (p.name, n.meta["fxshard"].kind, n.meta["fxshard"].flat or "")
        for p in model.schedule.phases for n in p.graph.nodes
        if n.op == "call_function" and n.meta.get("fxshard") and n.meta["fxshard"].kind not in ("compute", "param_view")
    ]  # fmt: skip
    assert seen == planned
    assert [flat for phase, kind, flat in seen if (phase, kind) == ("forward", "all_gather")] == [
        "(root).0 + layers.0", "layers.1 + layers.2", "layers.3 + (root).1",
    ]  # fmt: skip
    source = model.lowered("forward")
    assert source.count(" = AG_") == 3 and source.count("    WAIT_") == 6


@pytest.mark.parametrize(
    ("F", "contributors", "options"),
    [(4, 1, {}), (2, 4, {}), (4, 1, {"reshard_after_forward": False}), (2, 4, {"mixed_precision": BF16}),
     (4, 1, {"rate_limit": None, "forward_prefetch": 3, "backward_prefetch": 3})],
    ids=["full-shard", "hybrid", "all-resident", "bf16-hybrid", "deep"],
)  # fmt: skip
def test_every_access_is_ordered_on_streams(F, contributors, options):
    streams = RecordingStreams()
    model = train(streams, F, contributors, passes=merging(members=2), **options)
    assert buckets(model.schedule)
    assert streams.races(shares_memory(model.schedule)) == []
    read = {a.buffer for a in streams.accesses if a.queue == "compute"}
    for flat in model.schedule.resident:
        assert f"resident:{flat}" in read


def test_a_throttle_holds_a_buckets_stream():
    """Without the FREE's event the bucket would be gathered over weights that compute still reads."""

    class Deaf(RecordingStreams):
        def wait(self, queue, event):
            if queue != "unshard":
                super().wait(queue, event)

    streams = Deaf()
    model = train(streams, 4, 1, passes=merging(members=2))
    assert streams.races(shares_memory(model.schedule))


@pytest.mark.parametrize("direct", [False, True])
def test_the_slot_holds_the_members_and_the_staging(direct):
    schedule = fxshard.trace(Odd(), (batches(1)[0],), F=3, rate_limit=None, passes=merging())
    schedule.direct_exchange = direct
    fxshard.passes.PlanMemory().apply(schedule, fxshard.ir.Remarks("plan-memory"))
    (bucket,) = schedule.forward.all_gathers
    whole = sum(flat.full_bytes for flat in schedule.flats.values())
    assert bucket.meta["slot"].num_bytes == whole * (2 if direct else 1)
    fxshard.ir.verify.verify(schedule)


def test_parameters_are_bitwise_those_without_merging():
    torch.manual_seed(0)
    plain = Odd()
    one, two = (fxshard.compile(copy.deepcopy(plain), F=3, passes=p) for p in (None, merging(members=2)))
    for model in (one, two):
        mean_of_squares(model(batches(1)[0])).backward()
    whole = copy.deepcopy(plain)
    for target, source in zip(whole.parameters(), one.parameters()):
        target.grad = None if source.grad is None else source.grad.full_tensor()
    assert differences(whole, two) == []
