"""Bytes sent per rank and step, counted by the kernel on each rank's own TCP sockets, against the paper's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from benchmarks.network import bytes_sent
from examples.models import GPT, GPTConfig
from fxshard.ir import Schedule
from tests.distributed.harness import Ranks

PROTOCOL = 1.01
"""gloo puts a small header before each message; the messages here are tens of kilobytes and more."""


def a_step(model: nn.Module, tokens: torch.Tensor) -> None:
    loss = model(tokens=tokens, targets=tokens)
    loss.backward()
    model.zero_grad()


def measure(F: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, width=128, heads=2, vocabulary=512, length=16))
    fxshard.compile(model, F)
    tokens = torch.randint(512, (2, 16))
    a_step(model, tokens)
    dist.barrier()
    before = bytes_sent()
    a_step(model, tokens)
    sent = bytes_sent() - before
    dist.barrier()
    schedule: Schedule = model.schedule  # type: ignore[assignment]
    flats = schedule.flats.values()
    twice = sum(f.full_bytes for f in flats if len([p for p in schedule.phases if p.one("all_gather", f.name)]) == 2)
    return {"sent": sent, "M": sum(f.full_bytes for f in flats), "twice": twice}


@pytest.mark.parametrize(
    ("W", "F"),
    [(2, 1), (3, 3), (4, 2), *(pytest.param(*wf, marks=pytest.mark.full) for wf in ((2, 2), (3, 1), (4, 4)))],
)
def test_bytes_follow_the_formulas(ranks: Ranks, W: int, F: int) -> None:
    """Replicate 2M(W-1)/W. Full: M(W-1)/W each for the forward gather, the backward gather of what is not resident, and
    the reduce. Hybrid: the same inside the shard group, plus 2(M/F)(R-1)/R across replicas.
    """
    for result in ranks.run(W, measure, F):
        M, R = result["M"], W // F
        gathers, reduces = M + result["twice"], M
        exact = (gathers + reduces) * (F - 1) / F + 2 * (M / F) * (R - 1) / R
        if F == 1:
            assert exact == 2 * M * (W - 1) / W
        elif F == W:
            once = M - result["twice"]
            assert exact == pytest.approx(3 * M * (W - 1) / W - once * (W - 1) / W)
        assert exact <= result["sent"] <= exact * PROTOCOL


def test_the_root_is_gathered_once_and_units_twice(ranks: Ranks) -> None:
    result = ranks.run(2, measure, 2)[0]
    assert 0 < result["twice"] < result["M"]
