"""Methods and submodules that are called by themselves: each is captured like forward, and their gradients add up."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from tests.capture.compare import Block, batches, differences, events, full, pair


class Encoder(nn.Module):
    """Norm and head lie in one unit, the root's second part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self.calls = 0

    def encode(self, x: Tensor, *, depth: int = 3) -> Tensor:
        """What comes before the head."""
        x = self.embed(x)
        for layer in self.layers[:depth]:
            x = layer(x)
        return self.norm(x)

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        self.calls += 1
        hidden = self.encode(x)
        return hidden if skip_head else self.head(hidden)


def both(**options: Any) -> tuple[Encoder, Encoder]:
    return pair(Encoder, 2, entry_points=("encode", "head", "layers.1"), **options)


def test_a_method_and_a_submodule_called_by_themselves() -> None:
    plain, sharded = both()
    x = batches(1)[0]
    for call in (
        lambda m: m(x),
        lambda m: m.encode(x),
        lambda m: m.encode(x, depth=1),
        lambda m: m.layers[1](x),
        lambda m: m.head(m.encode(x)),
    ):
        outputs = [call(m) for m in (plain, sharded)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().mean().backward()
        assert differences(plain, sharded) == []
        for m in (plain, sharded):
            m.zero_grad()
    assert sharded.calls == 1 and sharded.encode.__doc__ == Encoder.encode.__doc__
    with torch.no_grad():
        assert torch.equal(sharded.head(x), plain.head(x))


def test_a_loss_in_chunks_through_the_head_alone() -> None:
    """Hidden states once, the head on a part at a time: its gradients add up, and each chunk's backward frees its own."""
    plain, sharded = both()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, sharded)]
    for x in batches(4, (6, 8)):
        for m in (plain, sharded):
            hidden = m(x, skip_head=True)
            cut = hidden.detach().requires_grad_()
            before = None
            for chunk in cut.chunk(3):
                m.head(chunk).square().mean().backward()
                now = full(m.head.weight.grad)
                assert before is None or not torch.equal(now, before)
                before = now
            hidden.backward(cut.grad)
        assert differences(plain, sharded) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert differences(plain, sharded) == []


def test_chunks_under_no_sync_reduce_once() -> None:
    plain, sharded = both()
    x = batches(1, (6, 8))[0]
    seen: list[tuple[str, str, str]] = []
    for m, keeping in ((plain, contextlib.nullcontext), (sharded, sharded.no_sync)):
        hidden = m.encode(x)
        cut = hidden.detach().requires_grad_()
        with keeping():
            for chunk in cut.chunk(2):
                m.head(chunk).square().mean().backward()
        if m is sharded:
            seen = events(sharded)
        hidden.backward(cut.grad)
    assert differences(plain, sharded) == []
    assert sorted(flat for _, kind, flat in seen if kind == "reduce_scatter") == [
        "(root).0", "(root).1", "layers.0", "layers.1", "layers.2",
    ]  # fmt: skip


def test_only_what_an_entry_point_reads_is_gathered() -> None:
    _, sharded = both()
    seen = events(sharded)
    sharded.layers[1](batches(1)[0])
    assert [flat for _, kind, flat in seen if kind == "all_gather"] == ["layers.1"]


def test_entry_points_run_plainly_on_whole_parameters() -> None:
    plain, sharded = both()
    x = batches(1)[0]
    with sharded.unsharded():
        assert torch.equal(sharded.head(sharded.encode(x)), plain(x))


def test_mixed_precision_holds_at_entry_points() -> None:
    _, sharded = both(mixed_precision=fxshard.MixedPrecision(param=torch.bfloat16))
    assert sharded.head(batches(1)[0]).dtype == torch.bfloat16
    assert sharded.head.weight.dtype == torch.float32


def test_an_entry_point_in_full_precision_computes_in_it() -> None:
    precision = fxshard.MixedPrecision(param=torch.bfloat16, full_precision="head")
    plain, sharded = both(mixed_precision=precision)
    x = batches(1)[0]
    assert torch.equal(sharded.head(x), plain.head(x))
    assert sharded.head(x.bfloat16()).dtype == torch.bfloat16
    assert sharded.layers[1](x).dtype == torch.bfloat16
    assert sharded(x).dtype == torch.bfloat16


class Breaks(Encoder):
    """Eager code within forward enters another entry point."""

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        return self.head(self.between(x))


def test_an_entry_point_entered_from_within_a_call_leaves_no_trace() -> None:
    precision = fxshard.MixedPrecision(param=torch.bfloat16)
    model = fxshard.compile(Breaks(), F=2, entry_points=["encode"], fullgraph=False, mixed_precision=precision)
    x = batches(1)[0]
    first = model(x)
    captured = len(model.schedules)
    for _ in range(3):
        assert torch.equal(model(x), first)
    assert len(model.schedules) == captured
    assert all("forward" not in vars(layer) for layer in model.layers)
    assert model.head.weight.dtype == torch.float32


def test_wrong_entry_points_are_refused_before_anything_is_sharded() -> None:
    model = Encoder()
    with pytest.raises(ValueError, match=re.escape("no method and no submodule 'encod'") + ".*Did you mean 'encode'"):
        fxshard.compile(model, F=2, entry_points=["head", "encod"])
    with pytest.raises(ValueError, match="forward is always one"):
        fxshard.compile(model, F=2, entry_points=["forward"])
    with pytest.raises(ValueError, match=r"'encod'.*Did you mean 'encode'"):
        fxshard.trace(model, (torch.zeros(2, 4),), F=2, entry_points=["encod"])
    for wrong in ("calls", "layers.7", "nothing.head", ""):
        with pytest.raises(ValueError, match=f"'{wrong}' to be called by itself"):
            fxshard.compile(model, F=2, entry_points=[wrong])
    with pytest.raises(TypeError, match=r"entry_points='head'.*a list of names"):
        fxshard.compile(model, F=2, entry_points="head")
    assert type(model) is Encoder and "forward" not in model.head.__dict__


def test_an_error_inside_an_entry_point_names_its_line() -> None:
    class Prints(Encoder):
        def encode(self, x: Tensor, *, depth: int = 3) -> Tensor:
            print(self.embed(x).sum().item())
            return x

    sharded = fxshard.compile(Prints(), F=2, entry_points=["encode"])
    with pytest.raises(fxshard.CaptureError, match=r"test_entry_points\.py:\d+ in encode"):
        sharded.encode(batches(1)[0])
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        sharded.encode()


def test_a_model_with_entry_points_is_freed() -> None:
    model = fxshard.compile(copy.deepcopy(Encoder()), F=2, entry_points=["encode", "head"])
    model.encode(batches(1)[0]).sum().backward()
    model.head(batches(1)[0]).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
