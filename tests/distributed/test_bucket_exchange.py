"""Gathers merged into buckets, between real processes: the same bits as without merging, one message a peer a bucket."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxshard
from fxshard.capture import torch_private
from fxshard.runtime.direct import DirectGroup, raw
from tests.capture.compare import batches, mean_of_squares
from tests.distributed.harness import Ranks
from tests.runtime.test_bucket_runs import BF16, Odd, buckets, merging


def train(F: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps of AdamW with and without merging from the same parameters; every rank has a batch of its own."""
    torch.manual_seed(0)
    plain, rank = Odd(), dist.get_rank()
    results, messages = [], []
    for passes in (None, merging(members=options.get("rate_limit", 2))):
        model = fxshard.compile(copy.deepcopy(plain), F, passes=passes, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss = mean_of_squares(model(batches(8)[2 * rank + step % 2]))
            loss.backward()
            optimizer.step()
        results.append([loss.detach(), *(p.full_tensor() for p in model.parameters())])
        messages.append(gather_messages(model))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    found = buckets(model.schedule)
    saved = sum(len(members) - 1 for members in found)
    return {"same": same, "buckets": found, "saved": saved, "messages": messages, "skeleton": model.schedule.skeleton()}


def gather_messages(model: torch.nn.Module) -> int:
    """Messages this rank sends to its shard group in one forward, which only gathers."""
    group = model.__dict__["_fxshard"].executor.world.shard_exchange
    sent, post = [], group.post

    def counting(sends, receives):
        sent.extend(sends)
        return post(sends, receives)

    group.post = counting
    mean_of_squares(model(batches(1)[0]))
    del group.post
    return len(sent)


CONFIGURATIONS = [
    (4, 2, {"debug": True}),
    (3, 3, {"mixed_precision": BF16, "debug": True}),
    pytest.param(2, 2, {}, marks=pytest.mark.full),
    pytest.param(3, 3, {"debug": True}, marks=pytest.mark.full),
    pytest.param(4, 4, {"rate_limit": 4, "forward_prefetch": 2, "backward_prefetch": 2}, marks=pytest.mark.full),
    pytest.param(4, 2, {"mixed_precision": BF16, "reshard_after_forward": False}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("W", "F", "options"), CONFIGURATIONS, ids=str)
def test_the_bits_are_those_without_merging(ranks: Ranks, W: int, F: int, options: dict[str, Any]) -> None:
    for result in ranks.run(W, train, F, options):
        assert result["same"] and result["buckets"]
        lines = [line for line in result["skeleton"] if " + " in line]
        assert [tuple(line.split("AG ")[1].rsplit(" ", 1)[0].split(" + ")) for line in lines] == result["buckets"]
        forward = sum(line.startswith("forward") for line in lines)
        saved = sum(len(members) - 1 for members in result["buckets"][:forward])
        without, with_buckets = result["messages"]
        assert without - with_buckets == saved * (F - 1) > 0


def test_a_model_without_gathers_has_nothing_to_merge(ranks: Ranks) -> None:
    for result in ranks.run(2, train, 1, {}):
        assert result["same"] and not result["buckets"] and result["messages"] == [0, 0]


def exchange() -> tuple[bool, int]:
    """A bucket of odd shards of several dtypes and an empty one, by direct exchange and by the coalesced AllGather."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = DirectGroup(range(size), None, rank)
    numels, dtypes = (16, 0, 5, 1), (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    whole = [torch.randn(size * n, generator=torch.Generator().manual_seed(i)).to(d)
             for i, (n, d) in enumerate(zip(numels, dtypes))]  # fmt: skip
    shards = [w[rank * n : (rank + 1) * n].clone() for w, n in zip(whole, numels)]
    sent, post = [], group.post

    def counting(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[dist.Work]:
        sent.extend(sends)
        return post(sends, receives)

    group.post = counting  # type: ignore[method-assign]
    fulls = [torch.zeros_like(w) for w in whole]
    staging = torch.empty(sum(w.numel() * w.itemsize for w in whole), dtype=torch.uint8)
    pending = group.bind_bucket(shards, fulls, staging)()
    pending.wait()
    pending.wait()  # every member has a WAIT
    same = all(map(torch.equal, fulls, whole))
    fulls = [torch.zeros_like(w) for w in whole]
    single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    with torch_private.coalesced(dist.group.WORLD):
        for full, shard in zip(fulls, shards):
            if shard.numel():
                single(raw(full), raw(shard))
        untouched = all(bool((f == 0).all()) for f in fulls)
    return same and untouched and all(map(torch.equal, fulls, whole)), len(sent)


@pytest.mark.parametrize("W", [2, 3, 4])
def test_one_message_a_peer(ranks: Ranks, W: int) -> None:
    assert ranks.run(W, exchange) == [(True, W - 1)] * W
