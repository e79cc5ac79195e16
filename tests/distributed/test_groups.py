"""What real ranks have in common: norms, starting values, groups from a mesh, and the timeout of the default group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from tests.distributed.harness import Ranks


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)]
    return nn.Sequential(*blocks).double()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def whole(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor()
    return result.clone()


def averaged(model: nn.Module, W: int) -> nn.Module:
    """The plain model with the mean of all ranks' gradients."""
    for rank in range(W):
        (model(batch(rank)).square().sum() / W).backward()
    return model


# -- norms


NORMS = ((2.0, None), (2.0, False), (1.0, True), (float("inf"), None))
"""Orders, and `foreach`."""


def clipped(F: int) -> list[tuple[float, list[torch.Tensor]]]:
    model, found = fxshard.compile(make(), F), []
    for order, foreach in NORMS:
        model.zero_grad()
        model(batch(dist.get_rank())).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
        found.append((float(total), [whole(p.grad) for p in model.parameters()]))
    return found


@pytest.mark.parametrize(("W", "F"), [(2, 2), (3, 3), (4, 2), (2, 1)])
def test_the_norm_is_of_the_whole_model_on_every_rank(ranks: Ranks, W: int, F: int) -> None:
    results = ranks.run(W, clipped, F)
    for which, (order, _) in enumerate(NORMS):
        plain = averaged(make(), W)
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order))
        for result in results:
            total, gradients = result[which]
            assert total == pytest.approx(expected, rel=1e-12)
            for mine, p in zip(gradients, plain.parameters(), strict=True):
                torch.testing.assert_close(mine, p.grad, rtol=1e-12, atol=1e-14)


def norm_over_two_models(first: int, second: int) -> float:
    one, two = fxshard.compile(make(0), first), fxshard.compile(make(1), second)
    two(one(batch(dist.get_rank()))).square().sum().backward()
    gradients = [p.grad for m in (one, two) for p in m.parameters()]
    return float(nn.utils.get_total_norm(gradients, foreach=True))


@pytest.mark.parametrize("factors", [(1, 2), (2, 1)])
def test_a_norm_over_models_of_different_factors(ranks: Ranks, factors: tuple[int, int]) -> None:
    plain = nn.Sequential(make(0), make(1))
    averaged(plain, 2)
    expected = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    assert ranks.run(2, norm_over_two_models, *factors) == pytest.approx([expected] * 2, rel=1e-12)


# -- starting values


def start(sync: bool) -> dict[str, torch.Tensor]:
    """Ranks begin with values of their own."""
    model = make(seed=dist.get_rank())
    model.register_buffer("plain", torch.randn(4))
    model.register_buffer("every_second", torch.randn(8)[::2])
    model.register_buffer("transposed", torch.randn(3, 2).t())
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("count", torch.tensor(dist.get_rank()))
    fxshard.compile(model, sync_parameters=sync)
    return {k: whole(v) for k, v in model.named_parameters()} | {k: v.clone() for k, v in model.named_buffers()}


def test_all_ranks_start_from_rank_0(ranks: Ranks) -> None:
    first, *others = ranks.run(3, start, True)
    torch.manual_seed(0)
    assert all(torch.equal(first[n], p) for n, p in make(seed=0).named_parameters())
    assert first["count"] == 0
    for other in others:
        assert all(torch.equal(other[n], value) for n, value in first.items())


def test_without_sync_each_rank_brings_its_part_and_keeps_its_buffers(ranks: Ranks) -> None:
    first, second = ranks.run(2, start, False)
    assert (int(first["count"]), int(second["count"])) == (0, 1)
    assert not torch.equal(first["every_second"], second["every_second"])
    for name, zero in make(seed=0).named_parameters():
        one = make(seed=1).get_parameter(name)
        assert torch.equal(first[name], second[name])
        assert bool(((first[name] == zero) | (first[name] == one)).all())


# -- groups


def with_mesh(rows: list[list[int]] | None, F: int) -> dict[str, Any]:
    mesh = None if rows is None else DeviceMesh("cpu", rows)
    model = fxshard.compile(make(), F, mesh=mesh)
    model(batch(dist.get_rank())).square().sum().backward()
    world = model.__dict__["_fxshard"].executor.world
    return {
        "groups": (world.shard_ranks, world.replica_ranks),
        "held": sum(p.local.numel() for p in model.parameters()),
        "gradients": [whole(p.grad) for p in model.parameters()],
    }


@pytest.mark.parametrize(
    ("rows", "F"),
    [(None, 2), ([[0, 1], [2, 3]], 2), ([[0, 2], [1, 3]], 2), ([[0], [1], [2], [3]], 1), ([[0, 1, 2, 3]], 4)],
)
def test_groups_of_a_mesh(ranks: Ranks, rows: list[list[int]] | None, F: int) -> None:
    plain = averaged(make(), 4)
    grid = rows or [[0, 1], [2, 3]]
    results = ranks.run(4, with_mesh, rows, F)
    for rank, result in enumerate(results):
        row = next(r for r in grid if rank in r)
        assert result["groups"] == (row, [r[row.index(rank)] for r in grid])
        for mine, p in zip(result["gradients"], plain.parameters()):
            torch.testing.assert_close(mine, p.grad, rtol=1e-12, atol=1e-14)
    for row in grid:
        assert sum(results[r]["held"] for r in row) == sum(p.numel() for p in plain.parameters())


# -- timeouts


def timeouts() -> list[float]:
    world = fxshard.compile(make(), 2).__dict__["_fxshard"].executor.world
    groups = (world.control, world.shard_group, world.replica_group)
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_groups_have_the_timeout_of_the_default_group(ranks: Ranks) -> None:
    """Else a rank that hangs would hold the others for torch's half hour, whatever the user asked for."""
    assert ranks.run(2, timeouts, timeout_s=77.0) == [[77.0] * 3] * 2
