"""Offloaded shards on real ranks: the same bits as without, whoever loads the checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard import checkpoint
from tests.distributed.harness import Ranks
from tests.test_no_sync import KEEP, batch, built


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pattern: str) -> list[torch.Tensor]:
    """One step of a micro-batch for each letter; what it leaves, whole."""
    for number, letter in enumerate(pattern):
        with model.no_sync(KEEP[letter]) if letter in KEEP else contextlib.nullcontext():
            model(batch(number, dist.get_rank())).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    moments = [s["exp_avg_sq"].full_tensor() for s in optimizer.state.values()]
    return [norm, *(p.full_tensor() for p in model.parameters()), *moments]


def trained(F: int, directory: Path) -> list[str]:
    """What differs between offload and none: after a step, and after one more from the other's checkpoint."""
    precision = fxshard.MixedPrecision(param=torch.bfloat16)
    made = {}
    for offload in (False, True):
        model = fxshard.compile(
            built(), F, units=[nn.Linear], cpu_offload=offload, debug=True, mixed_precision=precision
        )
        made[offload] = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = {offload: step(*pair, "usr") for offload, pair in made.items()}
    checkpoint.save(directory / "offloaded", *made[True], step=1)
    checkpoint.load(directory / "offloaded", *made[False])
    second = {offload: step(*pair, "r") for offload, pair in made.items()}
    return [
        f"value {i} of step {number}"
        for number, found in enumerate((first, second))
        for i, (a, b) in enumerate(zip(found[False], found[True], strict=True))
        if not torch.equal(a, b)
    ]


@pytest.mark.parametrize(("W", "F"), [(4, 2), pytest.param(2, 2, marks=pytest.mark.full), (2, 1)])
def test_the_same_bits_with_and_without(ranks: Ranks, W: int, F: int, tmp_path: Path) -> None:
    assert ranks.run(W, trained, F, tmp_path) == [[]] * W
