"""ShardedParameter: what plain code does with a parameter works as on the whole, or is refused by the parameter's name."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fxshard
from fxshard.parameter import Binding, Generation
from tests.capture.compare import WIDTH, Framed, batches, differences, full, identical, pair, train_both


class Ragged(nn.Module):
    """Parameters of every size that pieces make awkward: a scalar, an empty one, odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.6))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.odd = nn.Parameter(torch.randn(5, 7))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.odd).sum(-1, keepdim=True) * self.gain + self.bias + self.empty.sum()


def sharded_ragged(F: int = 3) -> tuple[Any, Any]:
    plain, sharded = pair(Ragged, F)
    x = batches(1, (4, 5))[0]
    for model in (plain, sharded):
        model(x).square().sum().backward()
    return plain, sharded


def test_shape_and_names_are_the_plain_models():
    plain, sharded = sharded_ragged()
    for (name, a), (other, b) in zip(plain.named_parameters(), sharded.named_parameters()):
        assert name == other and isinstance(b, nn.Parameter) and isinstance(b, fxshard.ShardedParameter)
        for p, q in ((a, b), (a.grad, b.grad)):
            assert (q.shape, q.stride(), q.dtype, q.ndim, q.numel(), len(q.shape)) == (
                p.shape, p.stride(), p.dtype, p.ndim, p.numel(), len(p.shape)
            )  # fmt: skip
        assert identical(a.detach(), full(b)) and identical(a.grad, full(b.grad))
        assert b.full_tensor().stride() == a.stride() and b.is_leaf and b.requires_grad


def test_the_two_dimensional_rule_for_weight_decay():
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        assert decay and rest
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.1
        )

    plain, sharded = pair(Ragged, 3)
    optimizers = [groups(plain), groups(sharded)]
    for x in batches(3, (4, 5)):
        for model, stepper in zip((plain, sharded), optimizers):
            model(x).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    assert differences(plain, sharded) == []


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
}
KINDS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in OPTIMIZERS for k in KINDS if k != "fused" or n in FUSED], ids=str
)
def test_optimizers_equal_plain_ones(name, kind):
    """Values, and the state: whole state tensors equal too, and have the parameter's shape."""
    if (name, kind) == ("Adagrad", "fused"):
        options = {**OPTIMIZERS[name][1], "fused": True, "foreach": False}
    else:
        options = {**OPTIMIZERS[name][1], **KINDS[kind]}
    plain, sharded = pair(Ragged, 3)
    steppers = [OPTIMIZERS[name][0](m.parameters(), **options) for m in (plain, sharded)]
    for x in batches(4, (4, 5)):
        for model, stepper in zip((plain, sharded), steppers):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        assert differences(plain, sharded) == []
    for a, b in zip(plain.parameters(), sharded.parameters()):
        mine, other = steppers[0].state[a], steppers[1].state[b]
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            if isinstance(value, Tensor):
                assert identical(value, full(other[key])), key
            else:
                assert value == other[key], key


def test_a_differentiable_learning_rate_tensor():
    plain, sharded = pair(Ragged, 2)
    steppers = [torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False) for m in (plain, sharded)]
    for x in batches(3, (4, 5)):
        for model, stepper in zip((plain, sharded), steppers):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    assert differences(plain, sharded) == []


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 0.5])
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_equals_plain(order, foreach):
    plain, sharded = sharded_ragged()
    if order == float("inf"):  # torch has no maximum of an empty gradient
        plain.empty.grad = sharded.empty.grad = None
    totals = [nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=order, foreach=foreach) for m in (plain, sharded)]
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-6, atol=0)
    assert not isinstance(totals[1], fxshard.ShardedParameter)
    for a, b in zip(plain.parameters(), sharded.parameters()):
        torch.testing.assert_close(full(b.grad), a.grad, rtol=1e-6, atol=0)


def test_the_norm_of_half_precision_gradients_whose_squares_overflow():
    plain, sharded = pair(lambda: Framed().half())
    for model in (plain, sharded):
        for p in model.parameters():
            p.grad = p.detach() * 0 + 300.0  # its square is beyond fp16, the norm of all is not
    totals = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (plain, sharded)]
    assert totals[0].isfinite()
    torch.testing.assert_close(totals[1], totals[0], rtol=2e-3, atol=0)


def test_clip_grad_value_equals_plain():
    plain, sharded = sharded_ragged()
    for model in (plain, sharded):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert differences(plain, sharded) == []


def test_the_norm_of_tied_frozen_and_missing_gradients_counts_each_once():
    class Tied(Framed):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].linear.weight = self.layers[0].linear.weight
            self.layers[1].requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(4))

    plain, sharded = pair(Tied, 3)
    for model in (plain, sharded):
        model(batches(1)[0]).sum().backward()
    totals = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (plain, sharded)]
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [2, 1, 3, 0, float("inf")])
def test_norms_equal_plain(order):
    plain, sharded = sharded_ragged()
    for a, b in zip(plain.parameters(), sharded.parameters()):
        if a.numel() or order != float("inf"):  # torch refuses the maximum of nothing
            expected = torch.linalg.vector_norm(a.detach(), order)
            torch.testing.assert_close(torch.linalg.vector_norm(b.detach(), order), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(sharded.odd.grad.norm(), plain.odd.grad.norm(), rtol=1e-6, atol=0)


ELEMENTWISE = {
    "p * 2 + 1": lambda p: p * 2 + 1,
    "p.sign()": lambda p: p.sign(),
    "p.abs().sqrt()": lambda p: p.abs().sqrt(),
    "p.clamp": lambda p: p.clamp(-0.5, 0.5),
    "p > 0": lambda p: p > 0,
    "torch.where": lambda p: torch.where(p > 0, p, -p),
    "p + p": lambda p: p + p,
    "torch.zeros_like": torch.zeros_like,
    "torch.full_like": lambda p: torch.full_like(p, 3.0),
    "p.clone()": lambda p: p.clone(),
    "p.double()": lambda p: p.double(),
    "p.bfloat16()": lambda p: p.bfloat16(),
    "p + plain": lambda p: p + torch.arange(p.numel()).view(p.shape),
    "p * row": lambda p: p * torch.arange(1, 8) if p.shape == (5, 7) else p * 1,
    "p.isnan()": lambda p: p.isnan(),
    "p ** 2": lambda p: p**2,
    "2 - p": lambda p: 2 - p,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_equal_plain(name):
    plain, sharded = sharded_ragged()
    with torch.no_grad():
        for a, b in zip(plain.parameters(), sharded.parameters()):
            assert identical(ELEMENTWISE[name](a), full(ELEMENTWISE[name](b)))


def test_a_gradient_is_no_parameter_change():
    """Scaling gradients between forward and backward, or stepping state, is none of the parameter's business."""
    _, sharded = sharded_ragged()
    x = batches(1, (4, 5))[0]
    loss = sharded(x).sum()
    for p in sharded.parameters():
        p.grad.mul_(0.5)
        (p * 2).add_(1)  # a value computed from the parameter is not the parameter
    loss.backward()


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.mul_(2),
        lambda p: p.data.mul_(2),
        lambda p: p.copy_(torch.ones(5, 7)),
        lambda p: p.data.copy_(torch.ones(5, 7)),
        lambda p: p.detach().zero_(),
        lambda p: torch._foreach_mul_([p], 2),
        lambda p: nn.init.constant_(p, 1.0),
        lambda p: p.fill_(3),
    ],
    ids=["mul_", "data.mul_", "copy_", "data.copy_", "detach", "foreach", "init", "fill_"],
)
def test_every_edit_is_seen_by_the_model_and_refuses_a_stale_backward(edit):
    plain, sharded = sharded_ragged()
    x = batches(1, (4, 5))[0]
    loss = sharded(x).sum()
    with torch.no_grad():
        edit(plain.odd), edit(sharded.odd)
    assert identical(plain.odd.detach(), full(sharded.odd))
    assert identical(plain(x).detach(), sharded(x).detach())
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()


REFUSED = {
    "view": lambda p: p.view(-1),
    "matmul": lambda p: torch.ones(2, 5) @ p,
    "index": lambda p: p[0],
    "sum": lambda p: p.sum(),
    "t": lambda p: p.t(),
    "max": lambda p: p.max(),
    "cat": lambda p: torch.cat([p, p]),
    "qr": lambda p: torch.linalg.qr(p),
    "norm along a dim": lambda p: p.norm(dim=0),
    "random": lambda p: nn.init.normal_(p),
    "cumsum": lambda p: p.cumsum(0),
    "index_put": lambda p: p.__setitem__(0, 1.0),
    "plain += p": lambda p: torch.ones(5, 7).add_(p),
    "foreach with plain": lambda p: torch._foreach_add_([p], [torch.ones(5, 7)]),
    "foreach into plain": lambda p: torch._foreach_add_([torch.ones(5, 7)], [p]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_need_the_whole_are_refused_by_name(name):
    _, sharded = sharded_ragged()
    with pytest.raises((RuntimeError, TypeError), match="odd"), torch.no_grad():
        REFUSED[name](sharded.odd)


def test_other_memory_for_a_parameter_is_refused_by_name():
    """Its piece lies in a flat shard; assigning the values it already has (an optimizer's no-op) is fine."""
    _, sharded = sharded_ragged()
    before = full(sharded.odd)
    for value in (sharded.odd.data * 2, torch.ones(5, 7)):
        with pytest.raises(TypeError, match=r"'odd'.*copy_"):
            sharded.odd.data = value
    sharded.odd.data = sharded.odd.data
    assert identical(full(sharded.odd), before)


@pytest.mark.parametrize("convert", [Tensor.tolist, Tensor.numpy, Tensor.item])
def test_values_never_leave_as_python_or_numpy(convert):
    _, sharded = sharded_ragged()
    with pytest.raises((RuntimeError, TypeError)):
        convert(sharded.gain.detach())


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.half, lambda m: m.to_empty(device="cpu")])
def test_converting_the_model_after_compile_is_refused_by_name(change):
    """The shards stay what they are; a model that trained on with parameters of its own would no longer learn."""
    _, sharded = pair(Framed)

    def change_and_call() -> None:
        change(sharded)
        sharded(batches(1)[0])

    with pytest.raises((RuntimeError, TypeError), match=r"embed|head|layers"):
        change_and_call()


def test_a_conversion_that_changes_nothing_is_none():
    plain, sharded = pair(Framed)
    for _ in range(2):  # torch.compile refers to parameters weakly from the first call on
        sharded.to("cpu").float().train()
        train_both(plain, sharded, batches(2))


def test_a_conversion_of_buffers_alone_is_made():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))
    fxshard.compile(model, F=2, units="none")
    weight = model[0].weight
    loss = model(batches(1)[0]).sum()
    assert model.float() is model
    assert model.scale.dtype == torch.float32 and model[0].weight is weight
    loss.backward()
    assert weight.grad is not None


def test_two_parameters_of_different_shape_do_not_mix():
    _, sharded = sharded_ragged()
    with pytest.raises(RuntimeError, match=r"odd.*bias|bias.*odd|gain|odd"), torch.no_grad():
        sharded.odd * sharded.gain


def piece(local: Tensor, start: int, shape: tuple[int, ...], stride: tuple[int, ...], name: str):
    """A part of a parameter as a rank of a larger world holds it."""
    binding = Binding(
        name, math.prod(shape), start, local.numel(), Generation(), torch.clone, lambda values, op: values
    )
    return fxshard.ShardedParameter(local, shape, stride, name, binding)


TOGETHER = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "foreach_add_": lambda a, b: torch._foreach_add_([a], [b]),
    "foreach_lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.5),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_pieces_of_different_elements_do_not_mix(name):
    """Of another place, another order of elements, or another shape: never element by element."""
    first = piece(torch.ones(4), 0, (2, 4), (4, 1), "first")
    for other, why in (
        (piece(torch.ones(4), 4, (2, 4), (4, 1), "second"), "another part"),
        (piece(torch.ones(4), 0, (2, 4), (1, 2), "second"), "stride"),
        (piece(torch.ones(4), 0, (4, 2), (2, 1), "second"), "shape"),
    ):
        with pytest.raises(RuntimeError, match=f"'first' is sharded.*together with 'second'.*{why}"):
            TOGETHER[name](first, other)
    same = piece(torch.full((4,), 3.0), 0, (2, 4), (4, 1), "second")
    TOGETHER[name](first, same)


def test_two_parameters_of_one_shape_add_up():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.shift, self.b = (nn.Parameter(torch.randn(n)) for n in (6, 3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a * self.b + self.shift.sum()

    plain, sharded = pair(Two, 4, units="none")
    with torch.no_grad():
        assert identical((plain.a + plain.b), full(sharded.a + sharded.b))


def test_one_answer_about_all_elements_is_refused():
    _, sharded = sharded_ragged()
    with pytest.raises(RuntimeError, match=r"'odd' is sharded and was used by aten\.equal"):
        torch.equal(sharded.odd, sharded.odd)


def test_pickle_and_deepcopy_say_what_to_do():
    _, sharded = sharded_ragged()
    for attempt in (
        lambda: pickle.dumps(sharded.odd),
        lambda: torch.save(sharded.odd, io.BytesIO()),
        lambda: copy.copy(sharded.odd),
        lambda: copy.deepcopy(sharded.odd),
    ):
        with pytest.raises(TypeError, match=r"'odd' is sharded.*full_tensor"):
            attempt()
    for attempt in (lambda: pickle.dumps(sharded), lambda: copy.copy(sharded), lambda: AveragedModel(sharded)):
        with pytest.raises(TypeError, match=r"is sharded: it can neither be copied nor pickled.*state_dict"):
            attempt()


def test_an_average_of_the_weights_is_kept_over_the_parameters():
    plain, sharded = sharded_ragged()
    averages = []
    for model in (plain, sharded):
        average = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        torch._foreach_lerp_(average, list(model.parameters()), 0.25)
        averages.append(average)
    assert all(torch.equal(a, full(b)) for a, b in zip(*averages))


def test_a_gradient_can_be_copied():
    """An optimizer's state dict is deep-copied by schedulers and averaging code."""
    _, sharded = sharded_ragged()
    copied = copy.deepcopy(sharded.odd.grad)
    assert identical(full(copied), full(sharded.odd.grad))
    copied.zero_()
    assert full(sharded.odd.grad).any()


def test_a_plain_state_dict_loads():
    _, sharded = pair(Framed, 3)
    torch.manual_seed(4)
    other = Framed()
    before = list(sharded.parameters())
    result = sharded.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert all(a is b for a, b in zip(before, sharded.parameters()))
    train_both(other, sharded, batches(3))


def test_a_hook_on_the_whole_gradient_is_refused_by_name():
    _, sharded = sharded_ragged()
    with pytest.raises(TypeError, match=r"odd.*register_post_accumulate_grad_hook"):
        sharded.odd.register_hook(print)


def test_a_plain_gradient_in_the_way_is_refused_by_name():
    _, sharded = sharded_ragged()
    sharded.odd.grad = None
    loss = sharded(batches(1, (4, 5))[0]).sum()
    try:
        sharded.odd.grad = torch.ones(5, 7)
    except (RuntimeError, TypeError):
        return  # torch itself may refuse the type
    with pytest.raises(TypeError, match="odd"):
        loss.backward()


def test_printing_shows_no_values():
    _, sharded = sharded_ragged()
    text = repr(sharded.odd)
    assert "odd" in text and "(5, 7)" in text
    assert f"{sharded.odd}" and repr(sharded.odd.grad) and repr(list(sharded.parameters()))


def test_one_optimizer_entry_a_parameter_whenever_it_is_made():
    """Before the first call, after it, after an evaluation: the same objects."""
    _, sharded = pair(Framed)
    first = list(sharded.parameters())
    sharded(batches(1)[0]).sum().backward()
    second = list(sharded.parameters())
    with torch.no_grad():
        sharded(batches(1)[0])
    with sharded.unsharded():
        pass
    third = list(sharded.parameters())
    assert all(a is b is c for a, b, c in zip(first, second, third))


def test_a_subset_stays_a_subset():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        stepper = torch.optim.AdamW(model.head.parameters(), lr=0.1)
        for x in batches(3):
            model(x).square().sum().backward()
            stepper.step()
            model.zero_grad()
    assert differences(plain, sharded) == []


def test_float64_and_half_parameters():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        plain, sharded = pair(lambda dtype=dtype: Framed().to(dtype), 3)
        train_both(plain, sharded, [x.to(dtype) for x in batches(3)])


@pytest.mark.parametrize("other", ["parameter", "buffer", "part"])
def test_memory_that_two_tensors_share_is_refused_by_name(other: str):
    """The shards of both would be memory of their own, and part with the first step."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if other == "parameter":
        model[1].weight.data = model[0].weight.data
    elif other == "buffer":
        model.register_buffer("seen", model[0].weight.data)
    else:
        model[1].bias = nn.Parameter(model[0].weight.data[1])
    with pytest.raises(
        ValueError, match=r"'0\.weight' and '(1\.weight|seen|1\.bias)' are different tensors in the same"
    ):
        fxshard.compile(model, F=2, units="none")
    assert type(model[0].weight) is nn.Parameter


def test_parameters_that_are_parts_of_one_tensor_are_taken():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(2 * WIDTH)
            self.a, self.b = (nn.Parameter(part) for part in both.chunk(2))
            self.register_buffer("none", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a + self.b

    train_both(*pair(Parts, 2, units="none"), batches(2))
