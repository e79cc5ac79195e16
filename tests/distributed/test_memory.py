"""What a rank holds: parameters, gradients and optimizer state fall as 1/F; deferred initialisation goes unit by unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxshard
from examples.models import GPT, GPTConfig
from tests.distributed.harness import Ranks

CONFIG = GPTConfig(layers=4, width=32, heads=2, vocabulary=64, length=8)


def held(F: int) -> dict[str, Any]:
    """Bytes of what AdamW training keeps on this rank after a step, and the layout's own numbers."""
    torch.manual_seed(0)
    model = fxshard.compile(GPT(CONFIG), F)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(64, (2, 8))
    model(tokens=tokens, targets=tokens).backward()
    optimizer.step()
    parameters = list(model.parameters())
    flats = model.schedule.flats.values()
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(t, fxshard.ShardedParameter) for t in [*parameters, *moments])
    return {
        "parameters": sum(p.local.nbytes for p in parameters),
        "gradients": sum(p.grad.local.nbytes for p in parameters),
        "moments": sum(m.local.nbytes for m in moments),
        "storage": sum(
            {p.local.untyped_storage().data_ptr(): p.local.untyped_storage().nbytes() for p in parameters}.values()
        ),
        "shards": sum(f.shard_numel * 4 for f in flats),
        "whole": sum(f.numel * 4 for f in flats),
        "padding": sum((f.padded_numel - f.numel) * 4 for f in flats),
    }


@pytest.mark.parametrize("F", [2, *(pytest.param(F, marks=pytest.mark.full) for F in (1, 4))])
def test_bytes_fall_as_one_over_f(ranks: Ranks, F: int) -> None:
    results = ranks.run(4, held, F)
    for result in results:
        assert result["storage"] == result["shards"] == (result["whole"] + result["padding"]) / F
        assert result["gradients"] == result["parameters"]
        assert result["moments"] == 2 * result["parameters"]
    for group in (results[i : i + F] for i in range(0, 4, F)):
        assert sum(r["parameters"] for r in group) == results[0]["whole"]
    assert results[0]["padding"] < 0.02 * results[0]["whole"]


class LiveBytes(TorchDispatchMode):
    """Follows every real storage that operators make: bytes alive now, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def initialise(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT(CONFIG)


def compiled_peak(model: GPT, **options: Any) -> dict[str, Any]:
    dist.barrier()
    torch.manual_seed(0)
    with LiveBytes() as live:
        fxshard.compile(model, 2, **options)
    tokens = torch.randint(64, (2, 8))
    loss = model(tokens=tokens, targets=tokens)
    loss.backward()
    flats = model.schedule.flats.values()  # type: ignore[attr-defined]
    return {
        "rank": dist.get_rank(),
        "peak": live.peak,
        "shards": sum(f.shard_numel * 4 for f in flats),
        "unit": max(f.padded_numel * 4 for f in flats),
        "finite": bool(loss.isfinite()),
        "whole": {n: p.full_tensor() for n, p in model.named_parameters()},  # type: ignore[operator]
    }


def eager() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(GPT(CONFIG).named_parameters())


def own_reset() -> dict[str, Any]:
    return compiled_peak(on_meta())


def given_init() -> dict[str, Any]:
    return compiled_peak(on_meta(), init=initialise)


def recorded() -> dict[str, Any]:
    torch.manual_seed(0)
    return compiled_peak(fxshard.deferred_init(GPT, CONFIG))


@pytest.mark.parametrize("how", [own_reset, given_init])
def test_meta_models_are_initialised_unit_by_unit(ranks: Ranks, how: Callable[[], dict[str, Any]]) -> None:
    expected = {n: float(p.detach().std()) for n, p in eager().items() if p.dim() == 2}
    for result in ranks.run(2, how):
        assert result["finite"]
        assert result["shards"] < result["peak"] <= result["shards"] + result["unit"] + 16 * 1024
        spread = {n: float(p.std()) for n, p in result["whole"].items() if p.dim() == 2}
        assert spread == pytest.approx(expected, rel=0.2)


def test_a_recorded_constructor_is_replayed_unit_by_unit_on_one_rank(ranks: Ranks) -> None:
    expected = eager()
    for result in ranks.run(2, recorded):
        assert result["finite"]
        if result["rank"] == 0:
            assert result["shards"] < result["peak"] <= result["shards"] + result["unit"] + 16 * 1024
        else:
            assert result["peak"] <= result["shards"] + 1024  # what ranks tell each other
        assert list(result["whole"]) == list(expected)
        assert all(torch.equal(result["whole"][n], p) for n, p in expected.items())


class Buffered(nn.Module):
    """Buffers drawn, shared and not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(2)))
        self.norm, self.other = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.other.running_mean = self.norm.running_mean
        self.register_buffer("table", torch.randn(3, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(self.layers(x))) + self.table.sum(0)


def buffers_of(init: Any, own_values: bool) -> tuple[dict[str, torch.Tensor], bool, bool]:
    torch.manual_seed(dist.get_rank() if own_values else 0)
    model = fxshard.deferred_init(Buffered)
    fxshard.compile(model, init=init, sync_parameters=not own_values)
    model(torch.ones(2, 5)).sum().backward()
    shared = model.norm.running_mean is model.other.running_mean
    return (
        {n: b.clone() for n, b in model.named_buffers()},
        shared,
        all(type(b) is torch.Tensor for b in model.buffers()),
    )


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.5) if tensor.is_floating_point() else tensor.zero_()


@pytest.mark.parametrize(("init", "own_values"), [(None, False), (None, True), (fill, False)])
def test_buffers_of_a_recorded_model_are_real_on_every_rank(ranks: Ranks, init: Any, own_values: bool) -> None:
    for rank, (buffers, shared, real) in enumerate(ranks.run(3, buffers_of, init, own_values)):
        torch.manual_seed(rank if own_values else 0)
        plain = Buffered()
        if init is not None:
            plain.apply(fill)
        if not own_values:
            plain(torch.ones(2, 5))
            assert all(torch.equal(buffers[n], b) for n, b in plain.named_buffers())
        assert torch.equal(buffers["table"], plain.table)
        assert shared and real


class Reads(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.empty(4))
        self.weight.data.copy_(table)


def replays_badly() -> str:
    table = torch.arange(4.0)
    model = fxshard.deferred_init(Reads, table)
    table.add_(1)
    with pytest.raises(RuntimeError) as caught:
        fxshard.compile(model, F=2)
    return str(caught.value)


def test_what_rank_0_fails_at_is_told_everywhere(ranks: Ranks) -> None:
    first, second = ranks.run(2, replays_badly, timeout_s=60.0)
    assert "that the constructor read was changed" in first
    assert "initialising the model failed on 1 of 2 ranks\nrank 0: RuntimeError: deferred_init: a real tensor" in second


def fails_half_way() -> dict[str, Any]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    before = {n: id(p) for n, p in model.named_parameters()}
    count = 0

    def init(module: nn.Module) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyError("no weights for this one")
        initialise(module)

    with pytest.raises(KeyError, match="no weights"):
        fxshard.compile(model, 2, init=init)
    same = before == {n: id(p) for n, p in model.named_parameters()}
    return {"same": same, "meta": all(p.is_meta for p in model.parameters()), "class": type(model).__name__}


def test_a_failing_init_leaves_the_model_as_it_was(ranks: Ranks) -> None:
    for result in ranks.run(2, fails_half_way):
        assert result == {"same": True, "meta": True, "class": "GPT"}
