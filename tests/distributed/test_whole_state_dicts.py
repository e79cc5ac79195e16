"""Whole plain state dicts: out of the shards to rank 0 and back from there, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from examples.models import GPT, GPTConfig
from fxshard import checkpoint
from tests.distributed.harness import RankFailure, Ranks
from tests.distributed.test_checkpoint import Odd, built, sharded, step, unlike, whole
from tests.distributed.test_memory import LiveBytes

CONFIG = GPTConfig(layers=4, width=32, heads=2, vocabulary=64, length=8, tied=True)


def out_and_back(F: int) -> list[str]:
    """What is wrong with the state dict of rank 0, and with a model of other values that it was loaded into."""
    model, optimizer = sharded(F)
    step(model, optimizer, 0, dist.get_rank())
    state = checkpoint.full_state_dict(model)
    streamed = dict(checkpoint.stream_state_dict(model))
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    first = dist.get_rank() == 0
    wrong = []
    if first:
        plain = built()
        assert list(state) == list(plain.state_dict())
        plain.load_state_dict(state)
        wrong += unlike(parameters, dict(plain.named_parameters())) + unlike(state, streamed)
        wrong += [n for n, v in state.items() if type(v) is not Tensor or v.untyped_storage().nbytes() != v.nbytes]
        wrong += [n for n, p in plain.named_parameters() if state[n].stride() != p.stride()]
        wrong += unlike(dict(plain.named_buffers()), dict(model.named_buffers()))
    else:
        assert state == streamed == {}
    other, other_optimizer = sharded(F, seed=5 + dist.get_rank(), units="none")
    assert checkpoint.load_full_state_dict(other, state if first else None) == ([], [])
    wrong += unlike(parameters, {name: whole(p) for name, p in other.named_parameters()})
    buffers = [dict(other.named_buffers())]
    dist.broadcast_object_list(buffers)
    wrong += unlike(buffers[0], dict(other.named_buffers()))
    step(other, other_optimizer, 1, dist.get_rank())
    return wrong


@pytest.mark.parametrize(("W", "F"), [(4, 2), (3, 3)])
def test_out_and_back(ranks: Ranks, W: int, F: int) -> None:
    assert ranks.run(W, out_and_back, F) == [[]] * W


def loads_a_part() -> tuple[Any, bool, bool]:
    model, _ = sharded(None)
    before = {name: whole(p) for name, p in model.named_parameters()}
    first = dist.get_rank() == 0
    state = {"head.weight": torch.ones(7, 6, dtype=torch.float64), "other": torch.ones(1)}
    result = checkpoint.load_full_state_dict(model, state if first else None, strict=False)
    after = {name: whole(p) for name, p in model.named_parameters()}
    return result, bool((after["embed.weight"] == 1).all()), unlike(before, after) == ["embed.weight"]


def test_a_part_loads_and_the_rest_stays(ranks: Ranks) -> None:
    for result, loaded, others in ranks.run(2, loads_a_part):
        assert result.unexpected_keys == ["other"]
        assert result.missing_keys == [n for n in Odd().state_dict() if n not in ("embed.weight", "head.weight")]
        assert loaded
        assert others


def loads_sparse() -> str:
    model, _ = sharded(None)
    before = {name: whole(p) for name, p in model.named_parameters()}
    state = checkpoint.full_state_dict(model)
    name = next(n for n, v in state.items() if v.dim() == 2) if state else ""
    try:
        checkpoint.load_full_state_dict(
            model, {n: v.to_sparse() if n == name else v + 1 for n, v in state.items()} or None
        )
    except (TypeError, RuntimeError) as error:
        assert unlike(before, {name: whole(p) for name, p in model.named_parameters()}) == []
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_sparse_tensor_is_refused_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.run(2, loads_sparse)
    assert first.startswith("TypeError: load_full_state_dict takes plain tensors")
    assert second.startswith("RuntimeError: load_full_state_dict failed on 1 of 2 ranks\nrank 0: TypeError")


def loads_the_wrong_one() -> None:
    model, _ = sharded(None)
    state = {n: v for n, v in built().state_dict().items() if n not in ("first.bias", "norm.running_mean")}
    state |= {"second.bias": torch.zeros(3), "scale": torch.zeros(1), "more": torch.zeros(1), "less": torch.zeros(1)}
    checkpoint.load_full_state_dict(model, state if dist.get_rank() == 0 else None)


def test_all_that_does_not_fit_is_listed_on_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as told:
        ranks.run(3, loads_the_wrong_one)
    assert sorted(told.value.texts) == [0, 1, 2]
    for text in told.value.texts.values():
        for line in (
            "misshapen   second.bias is (3,) there and (1,) here",
            "misshapen   scale is (1,) there and () here",
            "missing     first.bias",
            "missing     norm.running_mean",
            "unexpected  more",
            "unexpected  less",
        ):
            assert line in text


# -- memory


def beside(held: Iterable[Tensor]) -> LiveBytes:
    """Follows what is made, and counts nothing of what is held already."""
    live = LiveBytes()
    live.alive.update({tensor.untyped_storage()._cdata: 0 for tensor in held})
    return live


def live(F: int) -> dict[str, Any]:
    """Bytes beside the shards, at most: while a state dict is streamed, collected, and loaded."""
    torch.manual_seed(0)
    model = fxshard.compile(GPT(CONFIG), F)
    flats = [p.binding.owner().flat for p in model.parameters()]
    seen = {"unit": max(f.padded_numel * 4 for f in flats), "largest": max(p.numel() * 4 for p in model.parameters())}
    seen["whole"] = sum(p.numel() * 4 for p in model.parameters())
    seen["shard"] = max(f.shard_numel * 4 for f in flats)
    shards = [p.local for p in model.parameters()]
    with beside(shards) as made:
        for _ in checkpoint.stream_state_dict(model):
            pass
    seen["streamed"] = made.peak
    with beside(shards) as made:
        state = checkpoint.full_state_dict(model)
    seen["collected"] = made.peak
    with beside([*shards, *state.values()]) as made:
        checkpoint.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    seen["loaded"] = made.peak
    return seen


@pytest.mark.parametrize("F", [2, 4])
def test_one_unit_at_a_time(ranks: Ranks, F: int) -> None:
    first, *others = ranks.run(4, live, F)
    small = 16 * 1024  # names and verdicts that go round
    unit, whole = first["unit"], first["whole"]
    assert 3 * unit < whole
    assert unit <= first["streamed"] <= unit + first["largest"] + small
    assert whole <= first["collected"] <= whole + unit + small
    assert unit <= first["loaded"] <= unit + first["shard"] + small
    for seen in others:
        assert seen["streamed"] <= small
        assert seen["collected"] <= small
        assert seen["loaded"] <= seen["shard"] + small


# -- one process


class Counted(nn.Module):
    """Extra state that is no tensor, a buffer that is not saved, and one that two modules share."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(3, 2)
        self.a, self.b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.b.running_mean = self.a.running_mean
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.linear(x)))


def test_extra_state_and_shared_buffers() -> None:
    plain = Counted(3)
    plain.a.running_mean += 2
    expected = {n: v.clone() if isinstance(v, Tensor) else v for n, v in plain.state_dict().items()}
    state = checkpoint.full_state_dict(fxshard.compile(plain, F=2))
    assert list(state) == list(expected)
    assert state["_extra_state"] == {"count": 3}
    assert all(torch.equal(v, expected[n]) for n, v in state.items() if isinstance(v, Tensor))
    assert state["a.running_mean"] is state["b.running_mean"]
    other = fxshard.compile(Counted(0), F=3)
    assert checkpoint.load_full_state_dict(other, state) == ([], [])
    assert other.count == 3
    assert torch.equal(other.b.running_mean, expected["a.running_mean"])


def test_a_loaded_model_computes_with_what_was_loaded() -> None:
    """A forward under way sees that the parameters changed, as after any other change."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    model, x = fxshard.compile(nn.Linear(3, 2), F=2), torch.randn(4, 3)
    for plain in (first, second):
        checkpoint.load_full_state_dict(model, plain.state_dict())
        assert torch.equal(model(x), plain(x))
    loss = model(x).sum()
    checkpoint.load_full_state_dict(model, first.state_dict())
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()


def test_what_is_not_the_compiled_module_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fxshard.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), F=2)
            self.other = nn.Linear(2, 2)

    outer = Outer()
    for wrong in (outer, outer.inner[0], outer.other, nn.ReLU()):
        with pytest.raises(ValueError, match="was not sharded by fxshard"):
            checkpoint.stream_state_dict(wrong)
    with pytest.raises(TypeError, match="not dict"):
        checkpoint.full_state_dict({})  # type: ignore[arg-type]
    with outer.inner.unsharded(), pytest.raises(ValueError, match="outside of"):
        checkpoint.full_state_dict(outer.inner)
    for state in (None, {"0.weight": 3}):
        with pytest.raises(TypeError, match=r"expected on rank 0|plain tensors.*'0\.weight' is a int"):
            checkpoint.load_full_state_dict(outer.inner, state, strict=False)
