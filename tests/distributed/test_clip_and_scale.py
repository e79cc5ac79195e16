"""Clipping and gradient scaling on real ranks: norms of the whole, and one rank's infinity skips the step on all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from tests.distributed.harness import Ranks

ORDERS = (1, 2, 3.5, 0.5, 0, math.inf, -1, -2, -math.inf)


class Tied(nn.Module):
    """A tied weight, a frozen one, sizes 0, 1, 5 and 7, two dtypes, and a Linear that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5).double()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(self.embed(tokens)) * self.scale).double()).float()
        return self.head(h + self.empty.sum()).square().sum() * scale


def built() -> Tied:
    torch.manual_seed(5)
    return Tied()


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(31 * step + rank))


def eager_gradients(model: nn.Module, step: int, W: int, scale: Tensor, broken: int | None = None) -> None:
    """The mean over the ranks' batches, into `.grad`."""
    for rank in range(W):
        (model(tokens(step, rank), _scale(scale, rank, broken)) / W).backward()


def _scale(scale: Tensor, rank: int, broken: int | None) -> Tensor:
    return scale * math.inf if rank == broken else scale


def clipped(F: int) -> list[tuple[str, float, float, float]]:
    """For each way and order, the total norms of the sharded and the plain model, and how far their clipped gradients are
    apart, relatively."""
    rank, W = dist.get_rank(), dist.get_world_size()
    model, plain = fxshard.compile(built(), F, units=[nn.Linear, nn.Embedding]), built()
    model(tokens(0, rank), torch.tensor(1.0)).backward()
    eager_gradients(plain, 0, W, torch.tensor(1.0))
    grads = [[None if p.grad is None else p.grad.clone() for p in m.parameters()] for m in (model, plain)]
    found = []
    for way, order in itertools.product(("method", "foreach", "loop"), ORDERS):
        for m, saved in zip((model, plain), grads):
            for p, g in zip(m.parameters(), saved, strict=True):
                p.grad = None if g is None else g.clone()
        if order < 0 or order == math.inf:  # torch has no extreme of an empty gradient
            plain.empty.grad = None
        if way == "method":
            total = model.clip_grad_norm_(0.01, order)
        else:
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order, foreach=way == "foreach")
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order)
        assert type(total) is Tensor
        assert total.shape == ()
        apart = []
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            if a.numel():
                assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and a.numel():
                apart.append(((a.grad.full_tensor() - b.grad).abs().max() / b.grad.abs().max()).item())
        found.append((f"{way} {order}", float(total), float(wanted), max(apart)))
    return found


@pytest.mark.parametrize(("W", "F"), [(4, 4), (4, 2), (3, 1)])
def test_clipping_equals_eager(ranks: Ranks, W: int, F: int) -> None:
    for found in zip(*ranks.run(W, clipped, F)):
        assert len({got for _, got, _, _ in found}) == 1, found
        for what, got, wanted, apart in found:
            assert got == pytest.approx(wanted, rel=1e-5), what
            assert apart < 1e-5, what


def not_finite(value: float, order: float) -> list[str]:
    """What each way of clipping says of a gradient that is not finite on rank 1 alone, and whether it changed any."""
    model = fxshard.compile(built(), units=[nn.Linear, nn.Embedding])
    model(tokens(0, dist.get_rank()), torch.tensor(1.0)).backward()
    grad: Any = model.second.weight.grad
    if dist.get_rank() == 1:
        grad.local[:1] = value
    before = grad.full_tensor()
    told = []
    for clip in (model.clip_grad_norm_, lambda *a, **k: nn.utils.clip_grad_norm_(model.parameters(), *a, **k)):
        try:
            clip(1.0, order, error_if_nonfinite=True)
            told.append("nothing")
        except RuntimeError as error:
            told.append("error" if "finite" in str(error) else str(error))
    assert torch.equal(before.nan_to_num(), grad.full_tensor().nan_to_num())
    return [*told, str(float(torch.linalg.vector_norm(grad, order)))]


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_gradient_that_is_not_finite_is_an_error_on_every_rank(ranks: Ranks, order: float) -> None:
    assert ranks.run(4, not_finite, math.nan, order) == [["error", "error", "nan"]] * 4
    assert ranks.run(4, not_finite, math.inf, order) == [["error", "error", "inf"]] * 4


def scaled(F: int, kind: str, unscale: bool, mixed: bool) -> tuple[list[float], list[float], list[bool], float, float]:
    """Five steps with GradScaler, the third of them infinite on rank 2 alone: scales after each step of both models, which
    steps changed the sharded one, how far the models are apart, and how far the plain one went."""
    rank, W = dist.get_rank(), dist.get_world_size()
    options = {"mixed_precision": fxshard.MixedPrecision(param=torch.float16, reduce=torch.float32)} if mixed else {}
    model, plain = fxshard.compile(Half(), F, units=[nn.Linear], **options), Half()
    scales: tuple[list[float], list[float]] = ([], [])
    moved = []
    makers = {
        "fused": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
        "foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    }
    optimizers = [makers[kind](m) for m in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        broken = 2 if step == 2 else None
        before = model.first.weight.full_tensor()
        x = Half.batch(step, rank) * (math.inf if rank == broken else 1.0)
        scalers[0].scale(model(x)).backward()
        for r in range(W):
            (scalers[1].scale(plain(Half.batch(step, r) * (math.inf if r == broken else 1.0))) / W).backward()
        for m, scaler, optimizer, record in zip((model, plain), scalers, optimizers, scales):
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            record.append(scaler.get_scale())
        moved.append(not torch.equal(before, model.first.weight.full_tensor()))
    apart = max((a.full_tensor() - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters()))
    went = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), Half().parameters()))
    return *scales, moved, apart, went


class Half(nn.Module):
    """Few parameters: on four ranks some pieces are empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()

    @staticmethod
    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(31 * step + rank))


@pytest.mark.parametrize(
    ("F", "kind", "unscale"),
    [
        (1, "sgd", True),
        (2, "sgd", False),
        (2, "sgd", True),
        (4, "fused", False),
        (4, "sgd", True),
        (4, "foreach", True),
    ],
)
def test_an_infinity_on_one_rank_skips_the_step_on_all(ranks: Ranks, F: int, kind: str, unscale: bool) -> None:
    for sharded, plain, moved, apart, went in ranks.run(4, scaled, F, kind, unscale, False):
        assert sharded == plain == [64.0, 128.0, 64.0, 64.0, 128.0]
        assert moved == [True, True, False, True, True]
        assert apart < 1e-5 < 1e-2 < went


def test_half_precision_with_a_scaler(ranks: Ranks) -> None:
    """Gathered and computed in fp16, masters and sums in fp32."""
    for sharded, _, moved, apart, went in ranks.run(4, scaled, 4, "sgd", True, True):
        assert sharded == [64.0, 128.0, 64.0, 64.0, 128.0]
        assert moved == [True, True, False, True, True]
        assert apart < 2e-3 < 1e-2 < went


def kept_and_scaled() -> list[str]:
    """A scaler meets gradients that no_sync kept: refused before any is unscaled, and right after the last backward."""
    model = fxshard.compile(Half(), 2, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    rank, told = dist.get_rank(), []
    with model.no_sync():
        scaler.scale(model(Half.batch(0, rank))).backward()
    for use in (scaler.unscale_, scaler.step):
        try:
            use(optimizer)
        except RuntimeError as error:
            told.append("is not complete" in str(error) or str(error))
    scaler.scale(model(Half.batch(1, rank))).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.tensor(1.0))
    scaler.unscale_(optimizer)
    plain = Half()
    for r in range(dist.get_world_size()):
        ((plain(Half.batch(0, r)) + plain(Half.batch(1, r))) / dist.get_world_size()).backward()
    pairs = zip(model.parameters(), plain.parameters())
    told.append(max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs) < 1e-6)
    return told


def test_a_scaler_refuses_what_is_not_reduced(ranks: Ranks) -> None:
    assert ranks.run(4, kept_and_scaled) == [[True, True, True]] * 4
