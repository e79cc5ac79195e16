"""Calls in unusual orders: forwards and backwards interleaved, losses dropped, evaluation between, parameters changed."""

import copy
import gc
import linecache
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxshard
from fxshard.kept import KeptGradient
from tests.capture.compare import (
    Block,
    Chain,
    Framed,
    adamw,
    batches,
    differences,
    full,
    identical,
    pair,
    sgd,
    train_both,
)


def executor_of(model: nn.Module):
    return model.__dict__["_fxshard"].executor


def test_two_forwards_then_two_backwards():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        first, second = (model(x).square().sum() for x in batches(2))
        first.backward()
        second.backward()
    assert differences(plain, sharded) == []


@pytest.mark.parametrize("keep", [True, False])
def test_two_calls_under_way_in_debug_mode(keep):
    """The first backward frees and fills; the second still finds what it needs."""
    plain, sharded = pair(Framed, 2, debug=True, keep_root_resident=keep)
    for model in (plain, sharded):
        losses = [model(x).square().mean() for x in batches(2)]
        for loss in losses:
            loss.backward()
    assert differences(plain, sharded) == []


def test_backwards_in_the_opposite_order():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        losses = [model(x).square().sum() for x in batches(3)]
        for loss in reversed(losses):
            loss.backward()
    assert differences(plain, sharded) == []


def test_one_loss_of_two_calls():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        (model(batches(2)[0]) * model(batches(2)[1])).sum().backward()
    assert differences(plain, sharded) == []


def test_one_call_feeds_the_next():
    plain, sharded = pair(Chain)
    for model in (plain, sharded):
        model(model(batches(1)[0])).square().sum().backward()
    assert differences(plain, sharded) == []


def test_gradients_accumulate_over_micro_batches():
    plain, sharded = pair(Framed)
    optimizers = [adamw(plain.parameters()), adamw(sharded.parameters())]
    for _ in range(3):
        for model in (plain, sharded):
            for x in batches(3):
                (model(x).square().mean() / 3).backward()
        assert differences(plain, sharded) == []
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad()
    assert differences(plain, sharded) == []


def test_zero_grad_to_zeros():
    plain, sharded = pair(Framed)
    optimizers = [adamw(plain.parameters()), adamw(sharded.parameters())]
    for x in batches(3):
        for model, stepper in zip((plain, sharded), optimizers):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad(set_to_none=False)
        assert differences(plain, sharded) == []


def test_a_gradient_someone_keeps_is_not_written_again():
    _, sharded = pair(Framed)
    x, y = batches(2)
    sharded(x).square().sum().backward()
    kept = [p.grad for p in sharded.parameters()]
    values = [full(g) for g in kept]
    sharded.zero_grad()
    sharded(y).square().sum().backward()
    assert all(identical(full(g), value) for g, value in zip(kept, values))


@pytest.mark.parametrize("F", [1, 2])
def test_a_forward_inside_backward_is_refused_and_loses_nothing(F):
    plain, sharded = pair(Framed, F)
    x, y = batches(2)
    for model in (plain, sharded):
        model(x).square().sum().backward()
        model.zero_grad()
    handle = sharded.layers[1].linear.weight.register_post_accumulate_grad_hook(lambda p: sharded(y))
    with pytest.raises(RuntimeError, match="forward of a sharded model was entered while its backward is running"):
        sharded(x).square().sum().backward()
    handle.remove()
    sharded.zero_grad()
    for model in (plain, sharded):
        model(y).square().sum().backward()
    assert differences(plain, sharded) == []


def test_a_detached_gradient_someone_keeps_is_not_written_again():
    _, sharded = pair(Framed)
    x, y = batches(2)
    sharded(x).square().sum().backward()
    kept = [p.grad.detach() for p in sharded.parameters()]
    values = [full(g) for g in kept]
    sharded.zero_grad()
    sharded(y).square().sum().backward()
    assert all(identical(full(g), value) for g, value in zip(kept, values))


@pytest.mark.parametrize("change", ["sgd", "fused", "foreach", "load", "data", "copy_"])
def test_parameters_changed_between_forward_and_backward_are_refused(change):
    plain, sharded = pair(Framed)
    x, y = batches(2)
    sharded(x).sum().backward()
    loss = sharded(y).sum()
    if change in ("sgd", "fused", "foreach"):
        kinds = {} if change == "sgd" else {change: True}
        torch.optim.SGD(sharded.parameters(), lr=0.1, **kinds).step()
    elif change == "load":
        sharded.load_state_dict(plain.state_dict())
    elif change == "data":
        sharded.head.bias.data.mul_(2)
    else:
        with torch.no_grad():
            sharded.head.bias.copy_(torch.ones(5))
    with pytest.raises(RuntimeError, match="parameters changed between forward and backward"):
        loss.backward()
    sharded.zero_grad()  # and the model still trains
    sharded(x).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


def test_a_backward_through_many_views_is_seen():
    """A hundred outputs that are views of one tensor, and a chain of views."""

    class Rows(Framed):
        def forward(self, x: Tensor) -> list[Tensor]:
            h = super().forward(x)
            for _ in range(10):
                h = h.transpose(0, 1)
            return [h[i] for i in range(100)]

    plain, sharded = pair(Rows)
    x = torch.randn(100, *batches(1)[0].shape[1:])
    loss = sum(row.square().sum() for row in sharded(x))
    with torch.no_grad():
        sharded.head.bias.add_(1)
    with pytest.raises(RuntimeError, match="parameters changed between forward and backward"):
        loss.backward()
    with torch.no_grad():
        plain.head.bias.add_(1)
    sharded.zero_grad()
    with sharded.no_sync():
        sum(row.square().sum() for row in sharded(x)).backward()
    assert all(isinstance(p.grad, KeptGradient) for p in sharded.parameters())
    for model in (plain, sharded):
        sum(row.square().sum() for row in model(x)).backward()
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(full(b.grad), 2 * a.grad, msg=name)


def test_an_optimizer_step_that_changes_nothing_of_the_model_is_no_change():
    _, sharded = pair(Framed)
    other = nn.Linear(2, 2)
    loss = sharded(batches(1)[0]).sum()
    other(torch.ones(1, 2)).sum().backward()
    sgd(other.parameters()).step()
    loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward(mode):
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        loss = model(batches(1)[0]).square().sum()
        model.eval()
        with mode():
            model(batches(2)[1])
        model.train()
        loss.backward()
    assert differences(plain, sharded) == []


def test_a_dispatch_mode_is_refused_by_name_and_leaves_the_model_as_it_was():
    """Under one torch.compile captures nothing, and would not capture that code again."""
    plain, sharded = pair(Framed)
    for _ in range(2):
        with (
            FlopCounterMode(display=False),
            pytest.raises(RuntimeError, match=r"TorchDispatchMode is active .*FlopCounter"),
        ):
            sharded(batches(1)[0])
        train_both(plain, sharded, batches(2))
    with FlopCounterMode(display=False) as counter, sharded.unsharded():
        sharded(batches(1)[0])
    assert counter.get_total_flops() > 0


def test_inference_mode_first():
    plain, sharded = pair(Framed)
    with torch.inference_mode():
        a, b = plain(batches(1)[0]), sharded(batches(1)[0])
        assert torch.equal(a, b) and b.is_inference()
    train_both(plain, sharded, batches(3))


def test_no_grad_first_and_between_steps():
    plain, sharded = pair(Framed)

    def between(model: nn.Module, step: int) -> None:
        model.eval()
        with torch.no_grad():
            assert not model(batches(1)[0]).requires_grad
        model.train()

    train_both(plain, sharded, batches(3), between=between)


def test_evaluation_follows_loaded_weights_and_steps():
    plain, sharded = pair(Framed)
    x = batches(1)[0]
    torch.manual_seed(9)
    other = Framed()
    with torch.no_grad():
        assert identical(plain(x), sharded(x))
        sharded.load_state_dict(other.state_dict())
        assert identical(other(x), sharded(x))
    other(x).sum().backward(), sharded(x).sum().backward()
    for model in (other, sharded):
        sgd(model.parameters()).step()
    with torch.no_grad():
        assert identical(other(x), sharded(x))


def test_a_retained_graph_runs_backward_twice():
    plain, sharded = pair(Framed)
    for x in batches(2):
        for model in (plain, sharded):
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert differences(plain, sharded) == []


def test_a_graph_is_retained_after_a_backward_that_was_not():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        model(batches(1)[0]).sum().backward()
        loss = model(batches(2)[1]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert differences(plain, sharded) == []


def test_a_retained_graph_with_another_call_between():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        first = model(batches(2)[0]).square().sum()
        first.backward(retain_graph=True)
        model(batches(2)[1]).square().sum().backward()
        first.backward()
    assert differences(plain, sharded) == []


def test_backward_twice_without_retaining_is_refused_by_torch():
    _, sharded = pair(Framed)
    loss = sharded(batches(1)[0]).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_dropped_loss_leaves_no_memory():
    _, sharded = pair(Framed)
    sharded(batches(1)[0]).sum().backward()

    class Witness:
        pass

    gc.collect()
    gc.freeze()  # from here on get_objects lists what is new: what other tests leave may go at any time
    for x in batches(3):
        out = sharded(x)
        witness = Witness()
        out.grad_fn.metadata["witness"] = witness
        gone = weakref.ref(witness)
        del out, witness
        assert gone() is None  # nothing holds the autograd node of a dropped call
    del x
    gc.collect()
    left = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    gc.unfreeze()
    assert left == []
    assert executor_of(sharded).running is None


def test_a_dropped_loss_disturbs_no_later_step():
    plain, sharded = pair(Framed)

    def between(model: nn.Module, step: int) -> None:
        model(batches(4)[3]).sum()

    train_both(plain, sharded, batches(3), between=between)


def test_residents_of_two_calls():
    """The second call fills the resident buffer again while the first still needs it."""
    plain, sharded = pair(Framed)
    assert executor_of(sharded) is not None
    for model in (plain, sharded):
        first = model(batches(2)[0]).square().sum()
        second = model(batches(2)[1]).square().sum()
        first.backward()
        third = model(batches(3)[2]).square().sum()
        second.backward()
        third.backward()
    assert sharded.schedule.resident
    assert differences(plain, sharded) == []


def test_whole_parameters_inside_one_another():
    plain, sharded = pair(Framed)
    with sharded.unsharded():
        with sharded.unsharded():
            pass
        assert identical(plain(batches(1)[0]), sharded(batches(1)[0])) and sharded.schedules == []
    assert all(isinstance(p, fxshard.ShardedParameter) for p in sharded.parameters())
    train_both(plain, sharded, batches(2))


def test_whole_parameters_are_gathered_once_a_unit(monkeypatch):
    _, sharded = pair(Framed)
    gathered, gather = [], fxshard.VirtualWorld.gather_flat

    def counted(self, flat, part):
        gathered.append(flat.name)
        return gather(self, flat, part)

    monkeypatch.setattr(fxshard.VirtualWorld, "gather_flat", counted)
    with sharded.unsharded():
        assert sorted(gathered) == sorted(sharded.__dict__["_fxshard"].storages)


def test_buffers_that_are_shared_stay_so_in_another_dtype():
    class Shares(Framed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
            self.layers[0].register_buffer("calls", self.calls)

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            self.layers[0].calls.add_(1)
            return super().forward(x)

    _, sharded = pair(Shares, mixed_precision=fxshard.MixedPrecision(buffers=torch.float32))
    sharded(batches(1)[0])
    assert sharded.calls is sharded.layers[0].calls and sharded.calls.dtype == torch.float32
    assert float(sharded.calls) == 2.0


def test_a_model_that_is_gone_leaves_nothing():
    earlier = set(linecache.cache)
    _, sharded = pair(Framed)
    sharded(batches(1)[0]).sum().backward()
    with torch.no_grad():
        sharded(batches(1)[0])
    state = sharded.__dict__["_fxshard"]
    storage = state.storages["layers.1"]
    watched = [weakref.ref(x) for x in (sharded, state, state.executor, state.executor.programs[0], storage)]
    files = {name for name in set(linecache.cache) - earlier if name.startswith("<fxshard")}
    assert files
    del sharded, state, storage
    gc.collect()
    assert [w() for w in watched] == [None] * len(watched)
    assert not files & set(linecache.cache)


def test_a_backward_outlives_its_model():
    plain, sharded = pair(Framed)
    parameters = list(sharded.parameters())
    losses = [model(batches(1)[0]).square().sum() for model in (plain, sharded)]
    del sharded
    gc.collect()
    for loss in losses:
        loss.backward()
    assert all(identical(a.grad, full(b.grad)) for a, b in zip(plain.parameters(), parameters))


def test_an_exception_in_forward_leaves_the_model_usable():
    class Fails(Framed):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x @ torch.ones(5, 2) if x.shape[0] != 7 else x @ torch.ones(4, 2)

    plain, sharded = pair(Fails)
    sharded(batches(1)[0]).sum().backward()
    sharded.zero_grad()
    with pytest.raises(RuntimeError):
        sharded(torch.ones(7, 8))
    train_both(plain, sharded, batches(3))


def test_an_exception_in_a_gradient_hook_leaves_the_model_usable():
    plain, sharded = pair(Framed)

    def fail(parameter: Tensor) -> None:
        raise ZeroDivisionError

    handle = sharded.layers[1].linear.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        sharded(batches(1)[0]).sum().backward()
    handle.remove()
    sharded.zero_grad()
    train_both(plain, sharded, batches(3))


@pytest.mark.parametrize("F", [1, 2, 3, 8])
@pytest.mark.parametrize("debug", [False, True])
def test_any_sharding_factor_equals_the_plain_model(F, debug):
    plain, sharded = pair(Framed, F, debug=debug)
    train_both(plain, sharded, batches(3))


@pytest.mark.parametrize(
    "options",
    [
        {"backward_prefetch": 0, "forward_prefetch": 0},
        {"backward_prefetch": 3, "forward_prefetch": 3, "rate_limit": None},
        {"rate_limit": 1},
        {"rate_limit": 3, "backward_prefetch": 2},
        {"rate_limit_bytes": 600},
        {"keep_root_resident": False},
        {"reshard_after_forward": False},
        {"units": "none"},
        {"units": nn.Linear},
        {"units": "layers.1"},
    ],
    ids=str,
)
def test_every_order_of_the_same_step_equals_the_plain_model(options):
    plain, sharded = pair(Framed, 3, debug=True, **options)
    train_both(plain, sharded, batches(3))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_in_one_step(order):
    """A generator and a critic: buffers belong to each model, backward of one runs through the other."""
    plain, sharded = [], []
    for make in (Framed, lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))):
        a, b = pair(make)
        plain.append(a)
        sharded.append(b)
    for models in (plain, sharded):
        models[1](models[0](batches(1)[0])).square().sum().backward()
    for i in order:
        assert differences(plain[i], sharded[i]) == []


def test_a_sharded_model_inside_a_plain_one():
    plain, sharded = pair(Framed)
    heads = [nn.Linear(5, 1), nn.Linear(5, 1)]
    heads[1].load_state_dict(heads[0].state_dict())
    for model, head in zip((plain, sharded), heads):
        nn.Sequential(model, head)(batches(1)[0]).square().sum().backward()
    assert differences(plain, sharded) == [] and identical(heads[0].weight.grad, heads[1].weight.grad)


def test_a_shared_trunk_under_autograd_grad():
    """torch.autograd.grad for an input leaves the gradient of parameters where eager leaves it: nowhere."""
    plain, sharded = pair(Framed)
    given = [batches(1)[0].requires_grad_() for _ in range(2)]
    results = [torch.autograd.grad(m(x).square().sum(), x)[0] for m, x in zip((plain, sharded), given)]
    assert identical(*results)
    assert differences(plain, sharded) == []


def test_multi_contributor_steps_are_the_mean_over_ranks():
    torch.manual_seed(0)
    plain = Framed()
    world = fxshard.VirtualWorld(2, contributors=4)
    _, sharded = pair(Framed, None, world=world)
    given = batches(4)
    for r, x in enumerate(given):
        with world.rank(r):
            sharded(x).square().sum().backward()
    for x in given:
        (plain(x).square().sum() / 4).backward()
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(full(b.grad), a.grad, msg=name)


def test_contributors_start_again_after_a_backward_that_failed():
    """With the first of them, whether the failure was one of a backward or that a rank's was left out."""
    world = fxshard.VirtualWorld(1, contributors=3)
    plain, sharded = pair(Framed, None, world=world)
    given = batches(3)

    def fail(p: Tensor) -> None:
        raise KeyError("a hook of the user's")

    def backward(r: int) -> None:
        with world.rank(r):
            sharded(given[r]).square().sum().backward()

    for r in range(2):
        backward(r)
    hook = next(sharded.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="a hook of the user's"):
        backward(2)
    hook.remove()
    sharded.zero_grad()
    backward(0)  # of a step that goes no further
    with pytest.raises(RuntimeError, match=r"rank 0 reduces .* after 1 other ranks did in this step"):
        backward(0)
    sharded.zero_grad()
    for r, x in enumerate(given):
        backward(r)
        (plain(x).square().sum() / 3).backward()
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(full(b.grad), a.grad, msg=name)


def test_contributors_call_several_entry_points_in_a_step():
    """What has a gradient on any rank is told for each of them."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

        def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

        def second(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.c(x), self.d(x)

    world = fxshard.VirtualWorld(2, contributors=2)
    plain, sharded = pair(Pairs, None, world=world, units=[nn.Linear], entry_points=("first", "second"))
    for r, x in enumerate(batches(2)):
        with world.rank(r):
            for model, share in ((plain, 0.5), (sharded, 1.0)):
                (model.first(x)[0].square().sum() * share).backward()
                (model.second(x)[1].square().sum() * share).backward()
    assert [n for n, p in sharded.named_parameters() if p.grad is None] == ["b.weight", "b.bias", "c.weight", "c.bias"]
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(full(b.grad), a.grad, msg=name)


def test_a_state_dict_has_rank_0s_buffers_while_a_contributor_acts():
    world = fxshard.VirtualWorld(2, contributors=2)
    _, sharded = pair(lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)), None, world=world, units="none")
    given = batches(2)

    def saved() -> Tensor:
        return sharded.state_dict()["0.running_mean"]

    with world.rank(0):
        sharded(given[0])
        of_first = sharded[0].running_mean.clone()
        assert identical(saved(), of_first) and of_first.any()
    with world.rank(1):
        sharded(given[1])
        assert identical(saved(), of_first) and not identical(sharded[0].running_mean, of_first)


def test_contributors_evaluate_between_steps():
    """Each rank sees its own buffers, under no_grad too, and an evaluation is no contribution."""
    world = fxshard.VirtualWorld(2, contributors=2)
    plain, sharded = pair(
        lambda: nn.Sequential(*(nn.Sequential(Block(), nn.BatchNorm1d(8)) for _ in range(2))), None, world=world
    )
    ranks = [copy.deepcopy(plain) for _ in range(2)]
    given = batches(2)
    for r, x in enumerate(given):
        with world.rank(r):
            sharded(x).square().sum().backward()
        ranks[r](x)
    for r, x in enumerate(given):
        with world.rank(r), torch.no_grad():
            assert identical(sharded.eval()(x), ranks[r].eval()(x))
    assert not identical(ranks[0](given[0]), ranks[1](given[0]))


class Adapted(Block):
    """A frozen layer with a trainable one beside it: two FlatParameters a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


def test_partly_frozen_units_train_and_evaluate_within_the_default_limit():
    plain, sharded = pair(lambda: nn.Sequential(Adapted(), Adapted(), Adapted()))
    with torch.no_grad():
        assert identical(plain(batches(1)[0]), sharded(batches(1)[0]))
    train_both(plain, sharded, batches(2))
