"""Checkpoints: saved by torch.distributed.checkpoint from one world, loaded in another, exchanged with FSDP2."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from tests.distributed.harness import Ranks


class Odd(nn.Module):
    """Sizes 0, 1, 5, 6 and 7, no dims, a tie, a frozen weight, channels_last, and a buffer of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.first.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        h = self.first(self.norm(self.embed(tokens).flatten(0, 1))) * self.scale + self.empty.sum()
        return self.head(h).square().mean() + self.second(h).mean() + self.conv(image).square().mean()


class Plain(nn.Module):
    """What FSDP2 takes too: no parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def built(kind: type[nn.Module] = Odd, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(17 * step + rank)
    return torch.randint(7, (3, 2), generator=g), torch.randn(2, 2, 4, 4, generator=g)


def sharded(F: int | None, seed: int = 0, units: Any = (nn.Linear, nn.Embedding), lr: float = 0.01):
    model = fxshard.compile(built(seed=seed), F, units=list(units) if isinstance(units, tuple) else units)
    return model, torch.optim.AdamW(model.parameters(), lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    loss = model(*batch(number, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(value: Any) -> Any:
    if isinstance(value, (fxshard.ShardedParameter, DTensor)):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, Tensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and moments, whole."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def unlike(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or not torch.equal(a[n], b[n])]


def save(folder: str, F: int) -> dict[str, Tensor]:
    """Two steps, then a checkpoint; what it holds, with rank 0's buffers."""
    model, optimizer = sharded(F)
    for number in range(2):
        step(model, optimizer, number, dist.get_rank())
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return everything(model, optimizer)


def load(folder: str, F: int, units: Any) -> dict[str, Tensor]:
    model, optimizer = sharded(F, seed=1 + dist.get_rank(), units=units)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = everything(model, optimizer)
    step(model, optimizer, 2, dist.get_rank())
    return loaded


@pytest.mark.parametrize("F", [2, *(pytest.param(F, marks=pytest.mark.full) for F in (4, 1))])
def test_saved_on_four_ranks_loads_on_any(ranks: Ranks, tmp_path: Path, F: int) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(4, save, folder, F)[0]
    for W, G, units in ((1, 1, "none"), (2, 2, (nn.Linear,)), (3, 3, (nn.Linear, nn.Embedding)), (4, 2, "none")):
        for loaded in ranks.run(W, load, folder, G, units):
            assert unlike(saved, loaded) == [], (W, G)


def test_a_checkpoint_of_one_rank_loads_on_three(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(1, save, folder, 1)[0]
    for loaded in ranks.run(3, load, folder, 3, "none"):
        assert unlike(saved, loaded) == []


def described(F: int) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    model, optimizer = sharded(F)
    step(model, optimizer, 0, dist.get_rank())
    state, plain = model.state_dict(), built().state_dict()
    assert list(state) == list(plain)
    assert state["head.weight"] is state["embed.weight"]
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        assert torch.equal(state[name].full_tensor(), p.full_tensor())
        assert (state[name].shape, state[name].dtype) == (p.shape, p.dtype)
        assert state[name].is_contiguous()
        assert not state[name].requires_grad
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in parameters.items())
    moments = optimizer.state_dict()["state"]
    for i, p in enumerate(model.parameters()):
        if p.requires_grad:
            assert torch.equal(moments[i]["exp_avg"].full_tensor(), optimizer.state[p]["exp_avg"].full_tensor())
            assert isinstance(optimizer.state[p]["exp_avg"], fxshard.ShardedParameter)
    return [(n, str(v.placements), tuple(v.to_local().shape)) for n, v in state.items() if isinstance(v, DTensor)]


def test_state_dicts_are_dtensors_under_plain_names(ranks: Ranks) -> None:
    rows = [{n: (p, s) for n, p, s in found} for found in ranks.run(4, described, 4)]
    assert [r["embed.weight"] for r in rows] == [("(Shard(dim=0),)", (n, 6)) for n in (2, 2, 2, 1)]
    assert [r["first.weight"][1] for r in rows] == [(2, 6), (2, 6), (2, 6), (0, 6)]
    assert {r["scale"] for r in rows} == {("(Replicate(),)", ())}
    assert {r["empty"][1] for r in rows} == {(0, 8)}
    hybrid = [{n: (p, s) for n, p, s in found} for found in ranks.run(4, described, 2)]
    assert [r["embed.weight"] for r in hybrid] == [("(Replicate(), Shard(dim=0))", (n, 6)) for n in (4, 3, 4, 3)]


def full_and_back(F: int) -> tuple[list[str], list[str], int]:
    """The full state dict on rank 0, given to a model that started elsewhere, in two ways."""
    model, optimizer = sharded(F)
    step(model, optimizer, 0, dist.get_rank())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    plain = built()
    rank = dist.get_rank()
    parameters = {n: whole(p) for n, p in model.named_parameters()}
    wrong = []
    if rank == 0:
        plain.load_state_dict(full)
        wrong = [n for n in parameters if type(full[n]) is not Tensor or not torch.equal(full[n], parameters[n])]
    other, other_optimizer = sharded(F, seed=7 + rank)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=broadcast)
    set_optimizer_state_dict(other, other_optimizer, moments, options=broadcast)
    buffers = {n for n, _ in model.named_buffers()}
    a, b = everything(model, optimizer), everything(other, other_optimizer)
    names = [n for n in unlike(a, b) if n not in buffers]
    step(other, other_optimizer, 1, rank)
    return wrong, names, len(full)


@pytest.mark.parametrize("F", [2, *(pytest.param(F, marks=pytest.mark.full) for F in (1, 4))])
def test_full_state_dicts_of_rank_0(ranks: Ranks, F: int) -> None:
    for rank, (wrong, names, size) in enumerate(ranks.run(4, full_and_back, F)):
        assert (wrong, names) == ([], [])
        assert size == (0 if rank else len(built().state_dict()))


def buffers_in_a_checkpoint() -> tuple[float, float, bool]:
    """This rank's own running mean, that in its state dict, and whether making one changed its own."""
    model, optimizer = sharded(None)
    step(model, optimizer, 0, dist.get_rank())
    before = model.norm.running_mean.clone()
    held = model.state_dict()["norm.running_mean"]
    return before.sum().item(), held.sum().item(), torch.equal(before, model.norm.running_mean)


def test_a_checkpoint_holds_rank_0s_buffers(ranks: Ranks) -> None:
    own, held, kept = zip(*ranks.run(3, buffers_in_a_checkpoint))
    assert len(set(own)) == 3
    assert set(held) == {own[0]}
    assert all(kept)


def plain_loads() -> list[str]:
    """Plain whole state, model and optimizer, loaded before a first step; and the next steps against eager."""
    rank = dist.get_rank()
    eager = built()
    optimizer = torch.optim.AdamW(eager.parameters(), 0.01)
    for number in range(2):
        step(eager, optimizer, number, 0)
    file = io.BytesIO()
    torch.save((eager.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file)
    model, sharded_optimizer = sharded(4, seed=5)
    model.load_state_dict(model_state)
    sharded_optimizer.load_state_dict(optimizer_state)
    for number in range(2, 5):
        step(eager, optimizer, number, 0)
        step(model, sharded_optimizer, number, 0)
    a, b = everything(eager, optimizer), everything(model, sharded_optimizer)
    return [n for n in a if not torch.allclose(a[n], b[n], rtol=0, atol=1e-6)] + [f"rank {rank}"] * (
        a.keys() != b.keys()
    )


def test_plain_checkpoints_load_before_the_first_step(ranks: Ranks) -> None:
    assert ranks.run(4, plain_loads) == [[]] * 4


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = built(Plain, seed)
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def ours(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fxshard.compile(built(Plain, seed), units=[nn.Linear])
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def exchange(folder: str, makers: tuple[str, str]) -> list[str]:
    """Train one kind of model, save it, load it into the other kind, and train both on."""
    kinds = {"fsdp2": fsdp2, "ours": ours}
    rank = dist.get_rank()
    x = [torch.randn(4, 5, generator=torch.Generator().manual_seed(50 + 9 * n + rank)) for n in range(4)]
    source, target = kinds[makers[0]](0), kinds[makers[1]](3)

    def train(pair: tuple[nn.Module, torch.optim.Optimizer], data: Tensor) -> None:
        pair[0](data).backward()
        pair[1].step()
        pair[1].zero_grad()

    for data in x[:2]:
        train(source, data)
    dcp.save({"m": get_model_state_dict(source[0]), "o": get_optimizer_state_dict(*source)}, checkpoint_id=folder)
    state = {"m": get_model_state_dict(target[0]), "o": get_optimizer_state_dict(*target)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(target[0], state["m"])
    set_optimizer_state_dict(*target, state["o"])
    told = unlike(everything(*source), everything(*target))
    for data in x[2:]:
        train(source, data)
        train(target, data)
    a, b = everything(*source), everything(*target)
    return told + [n for n in a if not torch.allclose(a[n], b[n], rtol=0, atol=1e-6)]


@pytest.mark.parametrize("makers", [("fsdp2", "ours"), ("ours", "fsdp2")], ids="-to-".join)
def test_checkpoints_are_exchanged_with_fsdp2(ranks: Ranks, tmp_path: Path, makers: tuple[str, str]) -> None:
    assert ranks.run(3, exchange, str(tmp_path / "checkpoint"), makers) == [[]] * 3
