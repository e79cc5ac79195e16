"""Gradient accumulation: any mix of synced and unsynced backwards equals one big batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ScheduleError
from fxshard.ir.nodes import info
from fxshard.ir.verify import verify

WORLDS = [(1, 1), (3, 1), (1, 4), (2, 4), (4, 4)]
"""F, and contributors."""

KEEP = {"u": "unsharded", "s": "sharded"}
"""How a letter of a pattern keeps; `r` reduces."""


class Odd(nn.Module):
    """Sizes 5, 7, 1 and an empty one, a frozen bias, and two heads of which a call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 1)
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor, heads: str = "both") -> Tensor:
        h = torch.tanh(self.a(x)) * self.scale + self.empty.sum()
        if heads == "left":
            return self.left(h).sum(-1)
        if heads == "right":
            return self.right(h).sum(-1)
        return self.left(h).sum(-1) + self.right(h).sum(-1)


class TwoOutputs(Odd):
    def forward(self, x: Tensor, heads: str = "both") -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = torch.tanh(self.a(x)) * self.scale
        return self.left(h), self.right(h)


def built(kind: type[nn.Module] = Odd, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return kind().to(dtype)


def batch(micro: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * micro + rank), dtype=torch.float64).to(dtype)


def sharded(F: int, contributors: int, kind: type[nn.Module] = Odd, **options: object):
    world = fxshard.VirtualWorld(F, contributors=contributors)
    return fxshard.compile(built(kind), world=world, units=[nn.Linear], **options), world


@contextlib.contextmanager
def how(model, letter: str) -> Iterator[None]:
    with model.no_sync(KEEP[letter]) if letter in KEEP else contextlib.nullcontext():
        yield


def micro_step(model, world, number: int, letter: str, heads: str = "both") -> None:
    """One micro-batch of every rank."""
    for r in range(world.data_ranks):
        with world.rank(r), how(model, letter):
            model(batch(number, r), heads).square().sum().backward()


def expected(contributors: int, heads: list[str]) -> dict[str, Tensor | None]:
    """Gradients of one eager process: the sum over micro-batches of the mean over ranks."""
    model = built()
    for number, which in enumerate(heads):
        for r in range(contributors):
            (model(batch(number, r), which).square().sum() / contributors).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def apart(model, wanted: dict[str, Tensor | None]) -> list[str]:
    """Parameters whose gradients differ by more than rounding, or are None on one side only."""
    told = []
    for name, p in model.named_parameters():
        want = wanted[name]
        if (p.grad is None) != (want is None):
            told.append(f"{name}: {'no' if p.grad is None else 'a'} gradient")
        elif want is not None and not torch.allclose(p.grad.full_tensor(), want, rtol=0, atol=1e-12):
            told.append(f"{name}: {(p.grad.full_tensor() - want).abs().max()}")
    return told


@pytest.mark.parametrize(("F", "contributors"), WORLDS)
def test_any_mix_equals_one_big_batch(F: int, contributors: int) -> None:
    model, world = sharded(F, contributors)
    for length in (1, 2, 3):
        for letters in itertools.product("usr", repeat=length):
            pattern = "".join(letters) + "r"
            for number, letter in enumerate(pattern):
                micro_step(model, world, number, letter)
            assert apart(model, expected(contributors, ["both"] * len(pattern))) == [], pattern
            model.zero_grad()


@pytest.mark.parametrize(("F", "contributors"), WORLDS)
def test_branches_that_the_last_backward_does_not_take(F: int, contributors: int) -> None:
    """What was kept of a unit is reduced by a backward that has no gradient of it."""
    model, world = sharded(F, contributors)
    for heads in (("left", "right", "right"), ("both", "left", "right"), ("left", "both", "left")):
        wanted = expected(contributors, list(heads))
        for pattern in ("uur", "ssr", "usr", "sur", "rur", "rsr"):
            for number, (letter, which) in enumerate(zip(pattern, heads)):
                micro_step(model, world, number, letter, which)
            assert apart(model, wanted) == [], (heads, pattern)
            model.zero_grad()


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize(("F", "contributors"), [(1, 4), (2, 4), (4, 4)])
def test_none_stays_none_and_one_rank_is_enough(keep: str, F: int, contributors: int) -> None:
    """The second head gets its gradient on rank 1 alone, in the micro-batch that is kept."""
    model, world = sharded(F, contributors, TwoOutputs)
    plain = built(TwoOutputs)
    for number in range(2):
        for r in range(contributors):
            second = number == 0 and r == 1
            with world.rank(r), model.no_sync(keep) if number == 0 else contextlib.nullcontext():
                outputs = model(batch(number, r))
                (outputs[0].sum() + outputs[1].square().sum() if second else outputs[0].sum()).backward()
            outputs = plain(batch(number, r))
            ((outputs[0].sum() + outputs[1].square().sum() if second else outputs[0].sum()) / contributors).backward()
    assert apart(model, {n: p.grad for n, p in plain.named_parameters()}) == []
    model.zero_grad()
    for r in range(contributors):
        with world.rank(r), model.no_sync(keep):
            model(batch(0, r))[0].sum().backward()
    for r in range(contributors):
        with world.rank(r):
            model(batch(1, r))[0].sum().backward()
    assert model.right.weight.grad is None and model.left.weight.grad is not None


def test_where_backward_runs_decides() -> None:
    model, _ = sharded(2, 1)
    with model.no_sync():
        loss = model(batch(0, 0)).square().sum()
    loss.backward()
    assert apart(model, expected(1, ["both"])) == []
    model.zero_grad()
    loss = model(batch(0, 0)).square().sum()
    with model.no_sync():
        loss.backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'a.weight' is not complete.*outside of no_sync"):
        model.a.weight.grad.add_(1.0)


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("reduced_before", [True, False])
def test_zero_grad_drops_what_was_kept(keep: str, to_none: bool, reduced_before: bool) -> None:
    model, world = sharded(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if reduced_before:
        micro_step(model, world, 7, "r")
    micro_step(model, world, 8, keep[0])
    optimizer.zero_grad(set_to_none=to_none)
    assert model.a.weight.grad is None if to_none else not model.a.weight.grad.full_tensor().any()
    micro_step(model, world, 0, "r")
    assert apart(model, expected(4, ["both"])) == []


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize("contributors", [1, 4])
def test_zeros_where_nothing_was_are_none_to_the_next_step(contributors: int, keep: str) -> None:
    """A frozen parameter and one outside the loss are not decayed, whatever `zero_grad` does to what was kept of their unit."""
    world = fxshard.VirtualWorld(2, contributors=contributors)
    model = fxshard.compile(built(), world=world, units="none")
    plain = built()
    for m in (model, plain):
        m.a.weight.requires_grad_(False)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.5) for m in (model, plain)]

    def plain_step(number: int, heads: str) -> None:
        for r in range(contributors):
            (plain(batch(number, r), heads).square().sum() / contributors).backward()

    micro_step(model, world, 0, keep[0], "left")
    plain_step(0, "left")
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    micro_step(model, world, 1, "r", "left")
    plain_step(1, "left")
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert wanted["right.weight"] is None and wanted["a.weight"] is None
    assert apart(model, wanted) == []
    micro_step(model, world, 2, "r", "right")  # `left` has a gradient by now, whatever this one brings
    plain_step(2, "right")
    assert apart(model, {n: p.grad for n, p in plain.named_parameters()}) == []
    for optimizer in optimizers:
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=1e-9, msg=name)


def one_of(outputs: tuple[Tensor, Tensor], which: str) -> Tensor:
    left, right = (out.square().sum() for out in outputs)
    return {"left": left, "right": right, "both": left + right}[which]


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize("dropped", [False, True])
def test_outputs_of_one_capture_that_some_losses_leave_out(dropped: bool, keep: str) -> None:
    """What an earlier backward kept is still there at the end, unless it was dropped: then there is none."""
    model, plain = fxshard.compile(built(TwoOutputs), F=2, units="none"), built(TwoOutputs)
    for m in (model, plain):
        for number, which in enumerate(("both", "left", "left")):
            if number == 2 and dropped:
                m.right.weight.grad = None
            with m.no_sync(keep) if m is model and number < 2 else contextlib.nullcontext():
                one_of(m(batch(number, 0)), which).backward()
    assert (plain.right.weight.grad is None) == dropped and plain.right.bias.grad is not None
    assert apart(model, {n: p.grad for n, p in plain.named_parameters()}) == []


def test_zero_grad_of_some_parameters_drops_those() -> None:
    model, world = sharded(2, 4)
    micro_step(model, world, 0, "u")
    micro_step(model, world, 1, "s")
    model.left.zero_grad()
    micro_step(model, world, 2, "r")
    wanted, last = expected(4, ["both"] * 3), built()
    for r in range(4):
        (last(batch(2, r)).square().sum() / 4).backward()
    wanted |= {name: p.grad for name, p in last.named_parameters() if name.startswith("left.")}
    assert apart(model, wanted) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda model: torch.optim.AdamW(model.parameters()).step(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1, foreach=True).step(),
        lambda model: torch.optim.AdamW(model.parameters(), fused=True).step(),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda model: model.a.weight.grad.full_tensor(),
        lambda model: model.a.weight.grad.clone(),
        lambda model: copy.deepcopy(model.a.weight.grad),
        lambda model: model.a.weight.grad.detach().mul_(2),
    ],
)
def test_nothing_is_computed_with_what_is_not_reduced(use) -> None:
    model, world = sharded(2, 4)
    micro_step(model, world, 0, "u")
    before = model.a.weight.full_tensor()
    with pytest.raises(RuntimeError, match="is not complete: no_sync kept a part of it"):
        use(model)
    assert torch.equal(model.a.weight.full_tensor(), before)
    assert "not reduced yet" in repr(model.a.weight.grad)
    micro_step(model, world, 1, "r")
    assert apart(model, expected(4, ["both"] * 2)) == []


def test_contexts_nest_and_survive_exceptions() -> None:
    model, world = sharded(2, 4)
    executor = model.__dict__["_fxshard"].executor
    seen = []

    def inside() -> None:
        with model.no_sync():
            with model.no_sync("sharded"):
                seen.append(executor.keep)
            seen.append(executor.keep)
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert [*seen, executor.keep] == ["sharded", "unsharded", ""]
    with pytest.raises(ValueError, match=r"keep='unshard'.*'unsharded', 'sharded'.*Did you mean 'unsharded'"):
        model.no_sync("unshard").__enter__()
    micro_step(model, world, 0, "r")
    assert apart(model, expected(4, ["both"])) == []


def test_a_backward_that_fails_loses_what_was_kept() -> None:
    """As far as it came is not known: nothing of it reaches a later step."""
    model, _ = sharded(2, 1)
    with model.no_sync():
        model(batch(0, 0)).square().sum().backward()
    schedule = model.schedule

    def fails(*_: object) -> object:
        raise KeyError("on purpose")

    flat = model.__dict__["_fxshard"].storages[schedule.units[0]]
    flat.kept.take_whole, real = fails, flat.kept.take_whole
    with pytest.raises(KeyError):
        model(batch(0, 0)).square().sum().backward()
    flat.kept.take_whole = real
    assert model.a.weight.grad is None
    model.zero_grad()
    model(batch(0, 0)).square().sum().backward()
    assert apart(model, expected(1, ["both"])) == []


def scaled_input(model, size: float) -> None:
    """A gradient of `size` in the weight of `nn.Linear(1, 1)`."""
    model(torch.full((1, 1), size, dtype=model.weight.dtype)).sum().backward()


def one_weight(dtype: torch.dtype, world: fxshard.VirtualWorld | None = None, **precision: torch.dtype):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    given = {"F": 1} if world is None else {"world": world}
    return fxshard.compile(model, units="none", mixed_precision=fxshard.MixedPrecision(**precision), **given)


@pytest.mark.parametrize(("dtype", "ones", "wanted"), [(torch.float32, 1, 257.0), (torch.bfloat16, 16, 272.0)])
def test_accumulation_is_in_fp32_whatever_goes_over_the_wire(dtype: torch.dtype, ones: int, wanted: float) -> None:
    """256 + 1 is 256 in bf16; a bf16 gradient of 256 and sixteen ones is 272 if they are added up in fp32."""
    model = one_weight(dtype, param=torch.bfloat16, reduce=torch.bfloat16)
    for size in [256.0] + [1.0] * ones:
        scaled_input(model, size)
    assert model.weight.grad.dtype == dtype
    assert model.weight.grad.full_tensor().item() == wanted
    narrow = one_weight(torch.bfloat16, accumulate=torch.bfloat16)
    for size in (256.0, 1.0, 1.0):
        scaled_input(narrow, size)
    assert narrow.weight.grad.full_tensor().item() == 256.0


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize(("accumulate", "wanted"), [(None, 272.0), (torch.bfloat16, 256.0)])
def test_what_is_kept_is_in_fp32(keep: str, accumulate: torch.dtype | None, wanted: float) -> None:
    """256 and sixteen ones, all kept; in bf16 each one would be lost."""
    world = fxshard.VirtualWorld(2, contributors=4)
    more = {} if accumulate is None else {"accumulate": accumulate}
    model = one_weight(torch.bfloat16, world, **more)
    for size in [256.0] + [1.0] * 16 + [0.0]:
        for r in range(4):
            with world.rank(r), model.no_sync(keep) if size else contextlib.nullcontext():
                scaled_input(model, size)
    assert model.weight.grad.full_tensor().item() == wanted


def test_sums_of_an_earlier_step_are_not_added_to() -> None:
    """The second bias is never used in the second step: the unit's gradients are set one by one."""
    torch.manual_seed(0)
    plain = TwoOutputs().to(torch.bfloat16)
    model = fxshard.compile(copy.deepcopy(plain), 2, units="none")
    for step in range(2):
        for micro in range(3):
            for m in (plain, model):
                outputs = m(batch(3 * step + micro, 0, torch.bfloat16))
                (outputs[0].sum() if step else outputs[0].sum() + outputs[1].sum()).backward()
        for (name, a), b in zip(plain.named_parameters(), model.parameters()):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=0.05, atol=0.05)
        for m in (plain, model):
            m.zero_grad()


def test_a_changed_gradient_is_what_is_added_to() -> None:
    """The wider sum beside a bf16 gradient is void once the gradient was clipped, scaled or set."""
    model = one_weight(torch.bfloat16)
    for size in (256.0, 1.0):
        scaled_input(model, size)
    model.weight.grad.mul_(0.5)
    scaled_input(model, 1.0)
    assert model.weight.grad.full_tensor().item() == 129.0
    model.weight.grad.data.mul_(0.0)
    scaled_input(model, 1.0)
    assert model.weight.grad.full_tensor().item() == 1.0


@pytest.mark.parametrize("pattern", ["r", "ur", "sr"])
@pytest.mark.parametrize(("divisor", "factor"), [(1, 4.0), (8.0, 0.5), (0.5, 8.0)])
def test_gradient_divisor(divisor: float, factor: float, pattern: str) -> None:
    """1 sums where the default takes the mean of 4 ranks."""
    model, world = sharded(2, 4, gradient_divisor=divisor)
    for number, letter in enumerate(pattern):
        micro_step(model, world, number, letter)
    wanted = expected(4, ["both"] * len(pattern))
    assert apart(model, {n: None if g is None else g * factor for n, g in wanted.items()}) == []


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), True, "sum"])
def test_gradient_divisor_is_checked(bad: object) -> None:
    with pytest.raises((TypeError, ValueError), match="gradient_divisor="):
        fxshard.compile(nn.Linear(2, 2), 1, gradient_divisor=bad)


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize(("F", "contributors"), [(1, 4), (2, 4), (4, 4)])
def test_backward_of_some_inputs_keeps_only_theirs(F: int, contributors: int, keep: str) -> None:
    """A whole backward, one for a weight, one for the input alone; and the one that ends it, for another weight."""
    model, world = sharded(F, contributors)
    plain = built()

    def parts(m, number: int, r: int):
        x = batch(number, r).requires_grad_()
        loss = m(x).square().sum() * (1.0 if m is model else 1 / contributors)
        return loss, {0: None, 1: [m.left.weight], 2: [x], 3: [m.a.weight]}[number]

    for number in range(4):
        for r in range(contributors):
            with world.rank(r), model.no_sync(keep) if number < 3 else contextlib.nullcontext():
                loss, inputs = parts(model, number, r)
                loss.backward(inputs=inputs)
            loss, inputs = parts(plain, number, r)
            loss.backward(inputs=inputs)
    assert apart(model, {n: p.grad for n, p in plain.named_parameters()}) == []


@pytest.mark.parametrize("keep", ["unsharded", "sharded"])
@pytest.mark.parametrize(("F", "contributors"), [(2, 1), (2, 4)])
def test_what_no_backward_asked_for_stays_none(F: int, contributors: int, keep: str) -> None:
    model, world = sharded(F, contributors)
    plain = built()
    for number, which in enumerate(("left", "a", "left")):
        for m in (model, plain):
            for r in range(contributors):
                share = 1.0 if m is model else 1 / contributors
                with world.rank(r), m.no_sync(keep) if m is model and number < 2 else contextlib.nullcontext():
                    (m(batch(number, r)).square().sum() * share).backward(inputs=[getattr(m, which).weight])
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert [n for n, g in wanted.items() if g is not None] == ["a.weight", "left.weight"]
    assert apart(model, wanted) == []


def test_a_layer_unfrozen_between_micro_batches() -> None:
    """What was frozen at compile has gradients from its unfreezing on, kept ones too; what is frozen later keeps its own."""
    model, world = sharded(2, 4)
    plain = built()
    for number, letter in enumerate("usr"):
        for m in (model, plain):
            m.a.bias.requires_grad_(number > 0)
            m.left.requires_grad_(number < 2)
        micro_step(model, world, number, letter)
        for r in range(4):
            (plain(batch(number, r)).square().sum() / 4).backward()
    assert apart(model, {n: p.grad for n, p in plain.named_parameters()}) == []


def test_a_closure_may_hold_the_last_backward() -> None:
    model, plain = sharded(2, 1)[0], built()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    with model.no_sync():
        model(batch(0, 0)).square().sum().backward()
    plain(batch(0, 0)).square().sum().backward()
    for m, optimizer in zip((model, plain), optimizers):

        def closure(m: nn.Module = m) -> Tensor:
            loss = m(batch(1, 0)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    pairs = zip(model.parameters(), plain.parameters())
    assert all(torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12) for a, b in pairs)


def test_a_closure_that_keeps_its_gradients_steps_nothing() -> None:
    """Foreach optimizers decay weights and count steps before they look at a gradient."""
    model, _ = sharded(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=True)
    before = [p.full_tensor() for p in model.parameters()]

    def closure() -> Tensor:
        with model.no_sync():
            loss = model(batch(0, 0)).square().sum()
            loss.backward()
        return loss

    for given in ((closure,), ()):
        with pytest.raises(RuntimeError, match=r"is not complete: .* by an optimizer's step"):
            optimizer.step(*given, **({} if given else {"closure": closure}))
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_a_forward_that_fails_loses_nothing() -> None:
    model, _ = sharded(2, 1)
    with model.no_sync():
        model(batch(0, 0)).square().sum().backward()
    with pytest.raises(RuntimeError):
        model(batch(1, 0)[:, :4])
    model(batch(1, 0)).square().sum().backward()
    assert apart(model, expected(1, ["both"] * 2)) == []


def test_a_model_that_is_gone_leaves_nothing_that_it_kept() -> None:
    model, _ = sharded(2, 1)
    model(batch(0, 0)).square().sum().backward()
    with model.no_sync():
        model(batch(0, 0)).square().sum().backward()
    loss = model(batch(0, 0)).square().sum()
    gone = [weakref.ref(model), weakref.ref(model.a.weight.grad), weakref.ref(model.__dict__["_fxshard"].executor)]
    del model
    gc.collect()
    assert gone[0]() is None, "a loss holds no model"
    del loss
    gc.collect()
    assert [r() for r in gone] == [None] * 3


def test_stand_ins_leave_no_cycles() -> None:
    model, _ = sharded(2, 1)
    for _ in range(2):
        with model.no_sync():
            model(batch(0, 0)).square().sum().backward()
        model(batch(0, 0)).square().sum().backward()
        model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with model.no_sync():
            model(batch(0, 0)).square().sum().backward()
        gone = weakref.ref(model.a.weight.grad)
        model(batch(0, 0)).square().sum().backward()
        assert gone() is None
    finally:
        gc.enable()


def test_the_schedules_say_what_they_do() -> None:
    model, world = sharded(2, 4)
    micro_step(model, world, 0, "u")
    micro_step(model, world, 1, "s")
    micro_step(model, world, 2, "r")
    main, unsharded, both, last = model.schedules
    assert main is model.schedule and not str(main.accumulation)
    kinds = [{info(n).kind for n in s.backward.graph.nodes} for s in model.schedules]
    assert "keep_grads" in kinds[1] and not kinds[1] & {"flatten_grads", "reduce_scatter", "all_reduce", "keep_shard"}
    assert "keep_shard" in kinds[2] and not kinds[2] & {"all_reduce", "accumulate_grad", "keep_grads"}
    assert str(both.accumulation) == "keeps gradients sharded, takes what 4 units kept unsharded"
    assert str(last.accumulation) == "takes what 4 units kept sharded"
    assert unsharded.memory.kept_bytes == sum(f.padded_numel * 8 for f in main.flats.values() if f.requires_grad)
    assert both.memory.kept_bytes == sum(f.shard_numel * 8 for f in main.flats.values() if f.requires_grad)
    assert unsharded.memory.peak_gradient_bytes == 0 < main.memory.peak_gradient_bytes
    assert unsharded.memory.arena_bytes <= main.memory.arena_bytes
    for schedule in model.schedules:
        verify(schedule)
        again = fxshard.Schedule.from_json(schedule.to_json())
        verify(again)
        assert again.text() == schedule.text() and again.accumulation == schedule.accumulation


def test_an_edited_schedule_keeps_its_order_when_gradients_are_kept() -> None:
    model, world = sharded(2, 4)
    micro_step(model, world, 0, "r")
    model.zero_grad()
    edited = model.schedule.copy(reorder=True)
    gathers = edited.backward.all_gathers
    edited.backward.move_before(gathers[-1], gathers[0])
    model.schedule = edited
    micro_step(model, world, 0, "u")
    order = [[info(n).flat for n in s.backward.all_gathers] for s in model.schedules]
    assert order[0] == order[1] and order[0][0] == info(gathers[-1]).flat
    micro_step(model, world, 1, "r")
    assert apart(model, expected(4, ["both"] * 2)) == []


@pytest.mark.parametrize("letter", ["u", "s"])
def test_what_is_wrong_with_an_accumulation_is_found(letter: str) -> None:
    """A gradient lost, kept twice, reduced and kept; kept gradients not taken, or taken that nobody kept."""
    model, world = sharded(2, 4)
    micro_step(model, world, 0, letter)
    micro_step(model, world, 1, "r")
    _, keeping, taking = model.schedules
    kind = "keep_grads" if letter == "u" else "keep_shard"

    def broken(schedule, change):
        copied = schedule.copy(reorder=True)
        change(copied)
        with pytest.raises(ScheduleError, match="reduced_exactly_once"):
            verify(copied)

    def lost(s):
        s.backward.graph.erase_node(s.backward.nodes(kind)[0])

    def twice(s):
        node = s.backward.nodes(kind)[0]
        with s.backward.graph.inserting_after(node):
            s.backward.graph.node_copy(node)

    def not_taken(s):
        node = s.backward.nodes("flatten_grads" if letter == "u" else "all_reduce")[0]
        node.args = node.args[:-1]

    def never_kept(s):
        node = s.backward.nodes("flatten_grads")[0]
        node.args = (*node.args[:5], True)

    broken(keeping, lost)
    broken(keeping, twice)
    broken(taking, not_taken)
    broken(model.schedule, never_kept)
    if letter == "s":
        broken(keeping, never_kept)


def test_passes_of_an_accumulation_are_to_look_at() -> None:
    model, world = sharded(2, 4)
    micro_step(model, world, 0, "u")
    with pytest.raises(ValueError, match=r"backward keeps gradients unsharded: edit `model.schedule.copy\(\)`"):
        model.schedule = model.schedules[1].copy()
    with pytest.raises(ValueError, match=r"defer-reduces is for schedules to look at.*no_sync"):
        fxshard.compile(built(), 2, passes=[fxshard.passes.DeferReduces()])
    with pytest.raises(ValueError, match="keep='none'"):
        fxshard.passes.DeferReduces("none")
    traced = fxshard.trace(
        built(), batch(0, 0), F=2, W=4, units=[nn.Linear], passes=[fxshard.passes.DeferReduces("sharded")]
    )
    assert traced.accumulation.keep == "sharded"
    with pytest.raises(
        ScheduleError, match=r"nothing can have been kept of 'b'; .*'a', 'a\[frozen\]', 'left', 'right'"
    ):
        fxshard.trace(built(), batch(0, 0), F=2, units=[nn.Linear], passes=[fxshard.passes.TakeKept(("b",))])
