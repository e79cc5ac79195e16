"""What PyTorch's own tests of FSDP2 check and no other test here does. The whole list is docs/fsdp2_tests.md."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.ir.nodes import info
from tests.capture.compare import (
    WIDTH,
    Block,
    Chain,
    Framed,
    adamw,
    batches,
    check,
    differences,
    events,
    full,
    pair,
    sgd,
)
from tests.capture.test_cases import AroundUnits, TwoOutputs
from tests.distributed.harness import Ranks
from tests.distributed.test_checkpoint import whole
from tests.distributed.test_clip_and_scale import Half

# -- inputs, outputs, and what is called inside forward


class Products(nn.Module):
    """Its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self) -> Tensor:
        return self.a @ self.a + self.b


def test_a_forward_without_inputs() -> None:
    check(Products, [()] * 3, units="none")


class Silent(nn.Module):
    """Reads no parameter and returns nothing; one parameter is frozen and fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.codes = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> None:
        return None


def test_a_forward_that_reads_no_parameter_and_returns_none() -> None:
    model = fxshard.compile(Silent(), F=2, units="none")
    seen = events(model)
    assert [model(x) for x in batches(2)] == [None, None]
    assert seen == []


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Tensor:
        x, ones = given.values() if isinstance(given, dict) else given
        return torch.tanh(self.linear(x)) + ones


class Hands(nn.Module):
    """What its units are given lies in a container."""

    def __init__(self, contain: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Takes() for _ in range(3))
        self.contain = contain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.contain(x, torch.ones_like(x)))
        return x


Pair = collections.namedtuple("Pair", ["x", "ones"])

CONTAINERS = {
    "list": lambda x, ones: [x, ones],
    "tuple": lambda x, ones: (x, ones),
    "dict": lambda x, ones: {"x": x, "ones": ones},
    "namedtuple": Pair,
    "made inside": lambda x, ones: collections.namedtuple("Inner", ["x", "ones"])(x, ones),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_between_units(kind: str) -> None:
    check(lambda: Hands(CONTAINERS[kind]))


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = torch.tanh(layer(x))
        return x


class Steps(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x))
        return x


def test_containers_of_modules_that_have_a_forward() -> None:
    check(lambda: Branches({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}), units=nn.Linear)
    check(lambda: Steps(nn.Linear(WIDTH, WIDTH) for _ in range(2)), units=nn.Linear)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 4)

    def features(self, image: Tensor) -> Tensor:
        return self.conv(image).flatten(1)


class Projects(nn.Module):
    """Calls a method of a unit, and never the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = Vision(), nn.Linear(WIDTH, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.projector(torch.relu(self.vision.features(image)))


def test_a_method_of_a_unit_is_the_units() -> None:
    forward = check(Projects, batches(3, (2, 3, 4, 4)), units=["vision", "projector"]).schedule.forward
    assert [info(n).flat for n in forward.all_gathers] == ["vision", "projector"]
    (convolution,) = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert info(convolution).unit == "vision"


class PartlyUsed(Block):
    """Its second layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1)


def test_a_unit_of_which_a_part_is_never_called_communicates_once() -> None:
    model = check(lambda: nn.Sequential(PartlyUsed(), PartlyUsed()))
    for phase, kind, flats in (
        (model.schedule.forward, "all_gather", ["0", "1"]),
        (model.schedule.backward, "all_gather", ["1"]),  # nothing needs the gradient of the input
        (model.schedule.backward, "reduce_scatter", ["1", "0"]),
    ):
        assert [info(n).flat for n in phase.nodes(kind)] == flats


# -- frozen parameters and regions without gradients


class Alternates(nn.Module):
    """A trained layer that runs with and without gradients in one forward, around a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.frozen(torch.relu(self.trained(x)))
            with torch.no_grad():
                x += torch.relu(self.trained(x))
        return x


@pytest.mark.parametrize("reshard", [True, False])
def test_a_trained_layer_also_runs_without_gradients(reshard: bool) -> None:
    model = check(Alternates, batches(10, (3, 5)), units=nn.Linear, reshard_after_forward=reshard)
    assert [info(n).flat for n in model.schedule.backward.reduce_scatters] == ["trained"]


def only_biases(model: nn.Module, step: int = 0) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))


@pytest.mark.parametrize("make", [Chain, AroundUnits])
def test_only_biases_train(make: Callable[[], nn.Module]) -> None:
    """Frozen before the model is sharded their weights are not reduced; frozen later they have no gradient either."""

    def frozen() -> nn.Module:
        model = make()
        only_biases(model)
        return model

    model = check(frozen, batches(4))
    assert sum(info(n).num_bytes for n in model.schedule.backward.reduce_scatters) == 3 * WIDTH * 4
    check(make, batches(4), between=only_biases)


# -- the class of a compiled module


def test_the_class_is_of_that_module_alone() -> None:
    """Still an instance of its own class; its modules, a slice of it and others of the class are what they were."""
    model = fxshard.compile(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), F=2)
    assert isinstance(model, nn.Sequential) and fxshard.is_compiled(model)
    assert {type(layer) for layer in model} == {nn.Linear}
    part = model[:2]
    assert type(part) is nn.Sequential and part[1] is model[1]
    with pytest.raises(RuntimeError, match=r"'0\.weight' is sharded"):
        part(batches(1)[0])


def test_a_model_may_call_a_slice_of_itself() -> None:
    class Sliced(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](torch.tanh(self[1](x))) + nn.Sequential.forward(self[:1], x)

    check(lambda: Sliced(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))


# -- backwards


def test_two_heads_with_a_backward_each() -> None:
    """The first leaves the other head alone, and both reach the trunk."""
    plain, sharded = pair(TwoOutputs, 3)
    for x in batches(2):
        outputs = [model(x) for model in (plain, sharded)]
        for a, _ in outputs:
            a.square().mean().backward(retain_graph=True)
        assert sharded.b.weight.grad is None
        assert differences(plain, sharded) == []
        for _, b in outputs:
            b.square().mean().backward()
        assert differences(plain, sharded) == []
        plain.zero_grad(), sharded.zero_grad()


def test_zero_grad_between_a_forward_and_its_backward() -> None:
    """It drops what one module had, reduced and kept, and nothing else."""
    plain, sharded = pair(lambda: Framed().double(), 3)
    reduced, kept, last = (x.double() for x in batches(3))
    for model, keeping in ((plain, contextlib.nullcontext), (sharded, sharded.no_sync)):
        model(reduced).square().mean().backward()
        with keeping():
            model(kept).square().mean().backward()
        loss = model(last).square().mean()
        model.layers[1].zero_grad()
        loss.backward()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert near(full(b.grad), a.grad)


def test_steps_leave_nothing_to_the_garbage_collector() -> None:
    """Two calls under way, and one of their backwards inside `no_sync`."""
    _, model = pair(Framed)
    optimizer = adamw(model.parameters())

    def step() -> None:
        first, second = (model(x).square().mean() for x in batches(2))
        with model.no_sync():
            first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> int:
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(5):
            step()
        assert tensors() == before
    finally:
        gc.enable()


# -- on real ranks


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.5))


class Words(nn.Module):
    """An odd vocabulary, an embedding that is the head too unless told, and blocks that backward computes again."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleList(Dropping() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, skip_head: bool = False) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x = self.norm(x)
        return x if skip_head else self.head(x)


def words(**options: Any) -> Any:
    torch.manual_seed(0)
    return Words(**options).double()


def tokens(number: int, rank: int) -> Tensor:
    return torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(50 * number + rank))


def two_calls(model: Any, number: int, rank: int) -> Tensor:
    """One loss of two forwards."""
    a, b = (model(tokens(2 * number + i, rank)).square().mean() for i in range(2))
    (a - b).square().backward()
    return a.detach() - b.detach()


def in_chunks(model: Any, number: int, rank: int) -> Tensor:
    """Hidden states once, the head on a part of them at a time."""
    hidden = model(tokens(number, rank), skip_head=True)
    cut = hidden.detach().requires_grad_()
    losses = []
    for chunk in cut.chunk(2):
        losses.append(model.head(chunk).square().mean())
        losses[-1].backward()
    hidden.backward(cut.grad)
    return torch.stack(losses).detach()


def partial_calls(model: Any, number: int, rank: int) -> Tensor:
    """By turns: two forwards that leave the head out, and one of them with a whole one."""
    first = model(tokens(2 * number, rank), skip_head=True)
    second = model(tokens(2 * number + 1, rank), skip_head=number % 2 == 0)
    loss = first.square().mean() + second[..., 0].sum()
    loss.backward()
    return loss.detach()


Compute = Callable[[Any, int, int], Tensor]


def apart(compute: Compute, F: int, tied: bool, **options: Any) -> list[str]:
    """What differs from one eager process over four steps: losses, gradients (None included), parameters."""
    rank, W, told = dist.get_rank(), dist.get_world_size(), []
    plain, model = words(tied=tied), fxshard.compile(words(tied=tied), F, debug=True, **options)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (plain, model)]
    for step in range(4):
        losses = []
        for r in range(W):
            torch.manual_seed(10 * step + r)
            losses.append(compute(plain, step, r))
        torch.manual_seed(10 * step + rank)
        told += [f"step {step}: loss"] * (not near(compute(model, step, rank), losses[rank]))
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            mean = None if a.grad is None else a.grad.div_(W)
            same = mean is b.grad is None or (mean is not None and b.grad is not None and near(full(b.grad), mean))
            told += [f"step {step}: gradient of {name}"] * (not same)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
        told += [f"step {step}: {name}" for (name, a), b in pairs if not near(full(b), a)]
    return told


def near(a: Any, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(("W", "F"), [(2, 2), (4, 2)])
def test_one_loss_of_two_forwards_with_recomputed_blocks_and_a_tie(ranks: Ranks, W: int, F: int) -> None:
    assert ranks.run(W, apart, two_calls, F, True) == [[]] * W


def chunked(F: int, tied: bool, reshard: bool) -> list[str]:
    return apart(in_chunks, F, tied, entry_points=["head"], reshard_after_forward=reshard)


@pytest.mark.parametrize(
    ("tied", "reshard"), [(True, True), *(pytest.param(t, False, marks=pytest.mark.full) for t in (True, False))]
)
def test_a_loss_in_chunks(ranks: Ranks, tied: bool, reshard: bool) -> None:
    assert ranks.run(2, chunked, 2, tied, reshard) == [[]] * 2


def test_forwards_that_leave_the_head_out(ranks: Ranks) -> None:
    """Norm and head are one unit; the head's gradient is None where no call came to it."""
    assert ranks.run(2, apart, partial_calls, 2, False) == [[]] * 2


def steps_in_hooks() -> list[str]:
    """What differs from the same sharded model stepped after backward: nothing may, not a bit."""
    rank, told, calls = dist.get_rank(), [], collections.Counter[str]()
    after, within = (fxshard.compile(words()) for _ in range(2))

    def stepper(parameters: list[Tensor]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(parameters, 0.01, foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        return step

    last = stepper(list(after.parameters()))
    steppers = {name: stepper([p]) for name, p in within.named_parameters()}
    for name, p in within.named_parameters():

        def hook(p: Tensor, name: str = name) -> None:
            steppers[name]()
            calls[name] += 1

        p.register_post_accumulate_grad_hook(hook)
    for step in range(5):
        losses = []
        for model in (after, within):
            torch.manual_seed(10 * step + rank)
            losses.append(model(tokens(step, rank)).square().mean())
            losses[-1].backward()
        last()
        told += [f"step {step}: loss"] * (not torch.equal(*losses))
        pairs = zip(after.named_parameters(), within.parameters(), strict=True)
        told += [f"step {step}: {name}" for (name, a), b in pairs if not torch.equal(full(a), full(b))]
        told += [f"step {step}: a gradient is left" for p in within.parameters() if p.grad is not None]
    return told + [f"{name}: {calls[name]} calls" for name, _ in within.named_parameters() if calls[name] != 5]


def test_an_optimizer_a_parameter_that_steps_in_its_hook(ranks: Ranks) -> None:
    assert ranks.run(2, steps_in_hooks) == [[]] * 2


def one_piece_infinite(broken: bool) -> tuple[bool, bool, bool, float]:
    """Whether gradients are unscaled exactly, whether there is optimizer state, whether parameters moved; and the scale."""
    model = fxshard.compile(Half(), units=[nn.Linear])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(Half.batch(0, dist.get_rank()))).backward()
    if broken and dist.get_rank() == 1:
        piece = model.first.weight.grad.local
        assert piece.numel()
        piece[0] = math.inf
    before = [(full(p), full(p.grad)) for p in model.parameters()]
    scaler.unscale_(optimizer)
    halved = all(torch.equal(full(p.grad), grad / 2) for p, (_, grad) in zip(model.parameters(), before))
    scaler.step(optimizer)
    scaler.update()
    moved = any(not torch.equal(full(p), value) for p, (value, _) in zip(model.parameters(), before))
    return halved, len(optimizer.state) > 0, moved, scaler.get_scale()


def test_an_infinity_in_one_ranks_piece_alone_skips_the_step_on_all(ranks: Ranks) -> None:
    assert ranks.run(3, one_piece_infinite, True) == [(True, False, False, 1.0)] * 3
    assert ranks.run(3, one_piece_infinite, False) == [(True, True, True, 2.0)] * 3


def reductions_of_a_clip() -> int:
    model = fxshard.compile(Framed())
    model(batches(2)[dist.get_rank()]).square().mean().backward()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        model.clip_grad_norm_(0.1)
    return reduce.call_count


def test_clipping_reduces_once(ranks: Ranks) -> None:
    assert ranks.run(2, reductions_of_a_clip) == [1, 1]


class Narrow(nn.Module):
    """Sizes 3 and 1: on four ranks some hold nothing of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(1, 3)])
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x))) + self.shift


def pieces_all_along(reshard: bool) -> tuple[list[str], int]:
    """What is wrong with parameters and state dict at some moment of a step; and how many parameters have no element here."""
    torch.manual_seed(0)
    plain, rank, told = Narrow(), dist.get_rank(), []
    model = fxshard.compile(copy.deepcopy(plain), units=[nn.Linear], reshard_after_forward=reshard)
    registered = list(model.parameters())
    memory = [p.local.data_ptr() for p in registered]
    xs = batches(4, (2, 3))

    def look(moment: str, expected: nn.Module = plain) -> None:
        now, state = list(model.parameters()), model.state_dict()
        if not all(p is q for p, q in zip(now, registered, strict=True)):
            told.append(f"{moment}: other parameters")
        if [p.local.data_ptr() for p in now] != memory:
            told.append(f"{moment}: other memory")
        if [n for n, p in expected.named_parameters() if not torch.equal(full(model.get_parameter(n)), p)]:
            told.append(f"{moment}: other values")
        wanted = expected.state_dict()
        if list(state) != list(wanted) or not all(torch.equal(whole(state[n]), wanted[n]) for n in wanted):
            told.append(f"{moment}: another state dict")

    look("before the first call")
    output = model(xs[rank])
    look("between forward and backward")
    output.square().sum().backward()
    look("after backward")
    for x in xs:
        (plain(x).square().sum() / 4).backward()
    close = [torch.allclose(full(p.grad), q.grad) for p, q in zip(registered, plain.parameters())]
    told += [] if all(close) else ["another gradient"]
    torch.manual_seed(1)
    other = Narrow()
    model.load_state_dict(other.state_dict())
    look("after a load", other)
    told += [] if torch.equal(model(xs[rank]), other(xs[rank])) else ["the load is not seen"]
    return told, sum(p.local.numel() == 0 for p in registered)


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_and_state_dicts_are_the_same_at_every_moment_of_a_step(ranks: Ranks, reshard: bool) -> None:
    results = ranks.run(4, pieces_all_along, reshard)
    assert [told for told, _ in results] == [[]] * 4
    assert any(empty for _, empty in results)


def alone() -> tuple[list[str], set[str], Tensor]:
    """In a world of one: what differs from the plain model, the collectives, and a gradient of 3 that is divided by 3."""
    plain, model = pair(Framed, None, reshard_after_forward=False)
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    seen = events(model)
    told = []
    for x in batches(3):
        for m, optimizer in zip((plain, model), optimizers):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        told += differences(plain, model)
    divided = fxshard.compile(nn.Linear(8, 4), units="none", gradient_divisor=3)
    divided(torch.ones(3, 8)).sum().backward()
    collectives = {kind for _, kind, _ in seen} & {"all_gather", "reduce_scatter", "all_reduce", "presence"}
    return told, collectives, full(divided.weight.grad)


def test_a_world_of_one_communicates_nothing(ranks: Ranks) -> None:
    ((told, collectives, divided),) = ranks.run(1, alone)
    assert (told, collectives) == ([], set())
    assert torch.equal(divided, torch.ones(4, 8))


def from_rank_0() -> list[str]:
    """A model on the meta device, its values a state dict that rank 0 alone has: what differs after a backward."""
    rank, plain = dist.get_rank(), words()
    with torch.device("meta"):
        model = Words().double()
    fxshard.compile(model)
    told = [] if list(model.state_dict()) == list(plain.state_dict()) else ["keys"]
    fxshard.checkpoint.load_full_state_dict(model, plain.state_dict() if rank == 0 else None)
    for r in range(2):
        torch.manual_seed(r)
        (plain(tokens(0, r)).square().mean() / 2).backward()
    torch.manual_seed(rank)
    model(tokens(0, rank)).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        told += [name] * (not torch.equal(full(b), a)) + [f"{name}.grad"] * (not near(full(b.grad), a.grad))
    return told


def test_a_meta_model_takes_what_rank_0_alone_has(ranks: Ranks) -> None:
    assert ranks.run(2, from_rank_0) == [[]] * 2


def groups_that_exist() -> list[str]:
    """A hybrid mesh of process groups made before: gradients that differ from the mean over ranks."""
    rank, rows = dist.get_rank(), [[0, 1], [2, 3]]
    shard = [dist.new_group(row) for row in rows][rank // 2]
    replicas = [dist.new_group(list(column)) for column in zip(*rows)][rank % 2]
    mesh = DeviceMesh.from_group([replicas, shard], "cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = Framed()
    model = fxshard.compile(copy.deepcopy(plain), mesh=mesh)
    model(batches(4)[rank]).square().mean().backward()
    for x in batches(4):
        (plain(x).square().mean() / 4).backward()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    return [name for (name, a), b in pairs if not torch.allclose(full(b.grad), a.grad)]


def test_a_mesh_of_groups_that_exist_already(ranks: Ranks) -> None:
    assert ranks.run(4, groups_that_exist) == [[]] * 4


class Around(nn.Module):
    """A plain layer before a part that may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def inside_ddp() -> tuple[str, list[str]]:
    """What DDP says of a sharded part; and what differs from eager where it is told to leave that part alone."""
    model, plain, rank = Around(), Around(), dist.get_rank()
    fxshard.compile(model.inner)
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel(model)
    left = [f"inner.{name}" for name, _ in model.inner.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left)
    ddp = DistributedDataParallel(model)
    optimizers = [sgd(m.parameters()) for m in (ddp, plain)]
    for step in range(3):
        ddp(batches(6)[2 * step + rank]).square().mean().backward()
        for r in range(2):
            (plain(batches(6)[2 * step + r]).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    return str(caught.value), [name for (name, a), b in pairs if not torch.allclose(full(b), a, rtol=0, atol=1e-6)]


def test_ddp_around_a_sharded_part(ranks: Ranks) -> None:
    for error, wrong in ranks.run(2, inside_ddp):
        assert "parameter 'layers.0.linear.weight' is sharded" in error
        assert wrong == []


def of_other_dims(rows: Any) -> str:
    model = Framed()
    with pytest.raises(ValueError) as caught:
        fxshard.compile(model, mesh=DeviceMesh("cpu", rows))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize(("rows", "shape"), [([0, 1], "(2,)"), ([[[0, 1]]], "(1, 1, 2)")])
def test_a_mesh_of_other_dims_is_refused(ranks: Ranks, rows: Any, shape: str) -> None:
    for text in ranks.run(2, of_other_dims, rows):
        assert f"mesh has shape {shape}; a 2-D mesh (replicate, shard) over all 2 ranks" in text
