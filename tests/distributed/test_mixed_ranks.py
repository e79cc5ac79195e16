"""Mixed precision over real ranks: the bits of each rank's computation by hand, and ranks that choose other islands."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard import MixedPrecision
from tests.capture.compare import batches, full, identical
from tests.distributed.harness import RankFailure, Ranks
from tests.test_mixed_precision import BF16, FP32, NORMS, Stack, by_hand, made

UNITS = ["layers.0", "layers.1"]


def apart(F: int, reduce: torch.dtype | None, frozen_first: bool) -> list[str]:
    """What differs from the mean over ranks of gradients by hand, rounded to the wire and summed in fp32 in rank order."""
    rank, W = dist.get_rank(), dist.get_world_size()
    master = made(Stack)
    precision = MixedPrecision(param=BF16, reduce=reduce, output=FP32, full_precision=nn.LayerNorm)
    sharded = fxshard.compile(copy.deepcopy(master), F, mixed_precision=precision)
    if frozen_first:
        with torch.no_grad():
            sharded.requires_grad_(False)(batches(W)[rank])
        sharded.requires_grad_(True)
    parts = []
    for r, x in enumerate(batches(W)):
        plain = by_hand(master, BF16, NORMS, UNITS)
        plain(x).float().square().mean().backward()
        parts.append(plain)
        if r == rank:
            output = sharded(x)
            told = [] if identical(output.detach(), plain(x).float().detach()) else [f"output of rank {r}"]
    output.square().mean().backward()
    island = {name for name, _ in master.named_parameters() if name.rpartition(".")[0] in NORMS}
    for (name, p), *grads in zip(sharded.named_parameters(), *([p.grad for p in m.parameters()] for m in parts)):
        wire = FP32 if name in island or reduce == FP32 else BF16
        sent = [g.float().mul(1 / W).to(wire).float() for g in grads]
        total = sent[0]
        for other in sent[1:]:
            total = total + other
        if not identical(full(p.grad), total):
            told.append(name)
    return told


@pytest.mark.parametrize(
    ("W", "F", "reduce", "frozen_first"), [(2, 2, FP32, False), (3, 3, None, False), (2, 1, FP32, True)]
)
def test_islands_and_casts_on_real_ranks(
    ranks: Ranks, W: int, F: int, reduce: torch.dtype | None, frozen_first: bool
) -> None:
    assert ranks.run(W, apart, F, reduce, frozen_first) == [[]] * W


def others() -> None:
    chosen = "layers.0.norm" if dist.get_rank() else "layers.*.norm"
    fxshard.compile(made(Stack), mixed_precision=MixedPrecision(param=BF16, full_precision=chosen))


def test_ranks_that_choose_other_islands_are_told(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="nothing was sharded") as raised:
        ranks.run(2, others)
    assert "layers.0.norm" in str(raised.value)
