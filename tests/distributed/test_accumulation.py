"""Gradient accumulation on real ranks: the same gradients, what goes over the wire, and ranks that differ."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.errors import AgreementError
from tests.distributed.harness import RankFailure, Ranks
from tests.test_no_sync import KEEP, apart, batch, built, expected

PATTERNS = ("uur", "ssr", "sur", "usr", "rsur", "ur")


def accumulate(F: int, patterns: tuple[str, ...], heads: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """What differs from one eager process, and the collectives of each backward of the last pattern."""
    rank, W = dist.get_rank(), dist.get_world_size()
    model = fxshard.compile(built(), F, units=[nn.Linear], debug=True)
    events = model.__dict__["_fxshard"].executor.observe()
    told, issued = [], []
    for pattern in patterns:
        issued.clear()
        for number, letter in enumerate(pattern):
            events.clear()
            with model.no_sync(KEEP[letter]) if letter in KEEP else contextlib.nullcontext():
                model(batch(number, rank), heads[number]).square().sum().backward()
            issued.append([kind for phase, kind, _ in events if phase == "backward"])
        told += [f"{pattern}: {text}" for text in apart(model, expected(W, list(heads[: len(pattern)])))]
        model.zero_grad()
    return told, issued


@pytest.mark.parametrize(
    ("W", "F"), [(1, 1), (3, 3), (4, 2), *(pytest.param(*wf, marks=pytest.mark.full) for wf in ((2, 1), (4, 4)))]
)
def test_any_mix_on_real_ranks(ranks: Ranks, W: int, F: int) -> None:
    for told, issued in ranks.run(W, accumulate, F, PATTERNS, ("both",) * 4):
        assert told == []
        kept, reduced = issued
        reduces = {"reduce_scatter": 4 * (F > 1), "all_reduce": 4 * (W > F)}
        assert {kind: kept.count(kind) for kind in reduces} == dict.fromkeys(reduces, 0)
        assert {kind: reduced.count(kind) for kind in reduces} == reduces
        assert "keep_grads" in kept


def test_branches_on_real_ranks(ranks: Ranks) -> None:
    for told, _ in ranks.run(4, accumulate, 2, ("usr", "sur", "rur"), ("left", "both", "right")):
        assert told == []


def deferred(F: int) -> list[list[str]]:
    model = fxshard.compile(built(), F, units=[nn.Linear])
    events = model.__dict__["_fxshard"].executor.observe()
    issued = []
    for keep in ("sharded", None):
        events.clear()
        with model.no_sync(keep) if keep else contextlib.nullcontext():
            model(batch(0, dist.get_rank())).square().sum().backward()
        issued.append([kind for phase, kind, _ in events if phase == "backward"])
    return issued


def test_sharded_puts_off_the_all_reduce_only(ranks: Ranks) -> None:
    for kept, last in ranks.run(4, deferred, 2):
        assert (kept.count("reduce_scatter"), kept.count("all_reduce"), kept.count("keep_shard")) == (4, 0, 4)
        assert (last.count("reduce_scatter"), last.count("all_reduce"), last.count("accumulate_grad")) == (4, 4, 4)


def keeps_differently() -> None:
    model = fxshard.compile(built(), 2, units=[nn.Linear], timeout_s=20.0)
    with model.no_sync("unsharded" if dist.get_rank() < 2 else "sharded"):
        model(batch(0, dist.get_rank())).sum().backward()


def test_ranks_that_keep_differently_are_told(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(4, keeps_differently)
    assert isinstance(failure.value.error, AgreementError)
    assert "different communication" in str(failure.value.error)


def sgd_steps(F: int) -> list[float]:
    """Largest difference of each parameter from eager after three steps of two micro-batches, clipped and all."""
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, plain = fxshard.compile(built(), F, units=[nn.Linear]), built()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (model, plain)]
    for step in range(3):
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(batch(2 * step + micro, rank)).square().mean().backward()
            for r in range(W):
                (plain(batch(2 * step + micro, r)).square().mean() / W).backward()
        for m, optimizer in zip((model, plain), optimizers):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters())
    return [(a.full_tensor() - b).abs().max().item() for a, b in pairs if a.numel()]


@pytest.mark.parametrize("F", [2, *(pytest.param(F, marks=pytest.mark.full) for F in (1, 4))])
def test_steps_with_clipping_equal_eager(ranks: Ranks, F: int) -> None:
    assert max(max(found) for found in ranks.run(4, sgd_steps, F)) < 1e-9
