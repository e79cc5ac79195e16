"""Models that broke systems of this kind: what a captured, sharded step computes equals eager, bit for bit."""

import contextlib
import copy
import dataclasses
import logging
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

import fxshard
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
    identical,
    mean_of_squares,
    pair,
    sgd,
    train_both,
)  # fmt: skip


class Around(nn.Module):
    """Three units with a function of the whole model around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# -- parameters used in more than one place


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(11, (2, 5), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("F", [1, 2, 3])
def test_a_tied_weight_has_one_shard_and_the_sum_of_both_gradients(F):
    model = check(Tied, tokens(), F=F)
    assert model.head.weight is model.embed.weight
    assert sum(p is model.embed.weight for p in adamw(model.parameters()).param_groups[0]["params"]) == 1


def test_two_tied_middle_layers():
    class TiedLayers(Chain):
        def __init__(self) -> None:
            super().__init__(4)
            self.layers[2].linear.weight = self.layers[1].linear.weight

    model = check(TiedLayers)
    assert model.layers[2].linear.weight is model.layers[1].linear.weight


class ReadTwice(Framed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            linear = layer.linear
            x = x @ linear.weight.T + linear.bias + x @ linear.weight.T
        return self.head(x)


def test_a_weight_read_twice_by_plain_operators():
    model = check(ReadTwice)
    for layer in ("layers.0", "layers.1", "layers.2"):
        assert [len(p.nodes("all_gather", layer)) for p in model.schedule.phases] == [1, 1]
        assert len(model.schedule.backward.nodes("reduce_scatter", layer)) == 1


def test_a_block_called_twice_adds_up_its_gradients():
    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.layers[0](x)) + self.layers[1](x)

    model = check(Twice)
    assert len(model.schedule.backward.reduce_scatters) == 3


def test_a_shared_head_called_for_two_outputs():
    class TwoHeads(Framed):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.layers[0](self.embed(x))
            early = self.head(x)
            return early, self.head(self.layers[2](self.layers[1](x)))

    check(TwoHeads)


class AcrossUnits(Chain):
    """One operator reads two units."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        x = first(x)
        return third(second(x) * first.linear.bias)


def test_a_parameter_of_one_unit_used_inside_another():
    check(AcrossUnits)


def test_one_operator_that_reads_two_units():
    class Two(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            return third(first(x) * (second.linear.weight @ first.linear.bias))

    check(Two)


# -- random operators


class Drop(Around):
    """Each kind of random operator once."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.layers[0](x), 0.5, self.training)
        x = self.layers[1](x) * torch.bernoulli(torch.full_like(x, 0.7))
        return self.layers[2](x) + torch.rand_like(x)


def test_dropout_and_other_random_operators_draw_the_same_numbers():
    check(Drop)


def test_dropout_of_attention():
    class Attention(Around):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)[None, None]
            x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)[0, 0]
            return self.layers[2](self.layers[1](x))

    check(Attention)


# -- activation checkpointing


class CheckpointedBlock(nn.Module):
    """Recomputes a part of itself, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def part(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.up(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.part, x, use_reentrant=False)) + x


class InsideUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class AroundUnits(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class AcrossTwoUnits(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(self.layers[1](self.layers[0](y))), x, use_reentrant=False)
        return self.layers[2](x)


@pytest.mark.parametrize("make", [InsideUnits, AroundUnits, AcrossTwoUnits])
def test_activation_checkpointing_gathers_a_unit_once_in_backward(make):
    model = check(make)
    backward = model.schedule.backward
    assert sorted(n.meta["fxshard"].flat for n in backward.all_gathers) == ["layers.0", "layers.1", "layers.2"]
    assert len(backward.reduce_scatters) == 3


def test_checkpointing_recomputes():
    """What is saved for backward shrinks: the recomputation was not undone by the capture."""
    x = batches(1)[0]

    def saved(make: type[nn.Module]) -> int:
        forward = fxshard.trace(make(), (x,), F=2).forward
        return len(forward.output.args[0])

    assert saved(AroundUnits) < saved(Chain)


class MadeWeight(Block):
    """Its weight hangs on the data, so backward cannot make it again from the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.linear.weight * x.mean()).t() + self.linear.bias


def test_a_weight_made_from_data_is_saved_and_remarked():
    model = check(lambda: nn.Sequential(MadeWeight(), MadeWeight()))
    schedule = model.schedule
    found = [r for r in schedule.remarks if r.by == "capture"]
    assert [(r.kind, r.unit) for r in found] == [("missed", "1")]  # the first one's input needs no gradient
    assert re.fullmatch(
        r"a weight made from '1.linear.weight' and data is kept for backward, 256 B \(test_cases.py:\d+\)",
        found[0].text,
    )
    assert schedule.memory.saved_weight_bytes == 8 * 8 * 4


def test_ordinary_layers_keep_no_weight():
    assert fxshard.trace(Framed(), (batches(1)[0],), F=2).memory.saved_weight_bytes == 0


# -- buffers


class SharedBuffers(nn.Module):
    """Two buffers of one memory, one of them written to: AOTAutograd puts their base in place of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("whole", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.part.sum()
        return x


def test_buffers_that_share_memory_and_are_written_to():
    plain, sharded = pair(SharedBuffers, units="none")
    for model in (plain, sharded):
        model.register_buffer("part", model.whole[:2])
    train_both(plain, sharded, batches(3))
    assert sharded.part.tolist() == [3, 3]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_batch_norm_statistics_equal_eager_and_keep_their_tensor():
    plain, sharded = pair(Normed)
    before = [b for _, b in sharded.named_buffers()]
    train_both(plain, sharded, batches(3))
    assert all(a is b for a, b in zip(before, sharded.buffers()))
    plain.eval(), sharded.eval()
    x = batches(4)[3]
    assert identical(plain(x).detach(), sharded(x).detach())
    assert differences(plain, sharded) == []


def test_batch_norm_under_checkpoint():
    class Recomputed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    # Eager updates the statistics again when it recomputes; a capture updates them once a forward, so compare with that.
    plain, _ = pair(Normed)
    torch.manual_seed(0)
    sharded = fxshard.compile(Recomputed(), F=2)
    train_both(plain, sharded, batches(3))


def test_buffers_keep_their_dtype_under_bf16_parameters():
    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(WIDTH) / WIDTH))
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
            return x * (self.inv_freq * 300.5).cos().to(x.dtype)

    torch.manual_seed(0)
    plain = nn.Sequential(*(Rotates() for _ in range(3)))
    sharded = fxshard.compile(copy.deepcopy(plain), F=2, mixed_precision=fxshard.MixedPrecision(param=torch.bfloat16))
    for module in plain:
        module.linear.bfloat16()
    for x in batches(3):
        for model in (plain, sharded):
            model(x.bfloat16()).float().sum().backward()
    for (name, a), b in zip(plain.named_buffers(), sharded.buffers()):
        assert b.dtype == torch.float32 and identical(a, b), name


class Parametrized(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_spectral_and_weight_norm_for_ten_steps(wrap):
    check(lambda: Parametrized(wrap), batches(10))


# -- parameters that come and go


class TwoOutputs(nn.Module):
    """Two branches of a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.a(x), self.b(x)


def test_an_output_the_loss_does_not_use_leaves_its_parameters_alone():
    """Under AdamW a zero gradient would decay the weight; None leaves it."""
    plain, sharded = pair(TwoOutputs)
    start = full(sharded.b.weight)
    train_both(plain, sharded, batches(3), loss=lambda out: out[0].square().mean())
    assert identical(full(sharded.b.weight), start)


def test_which_output_is_used_may_change_from_step_to_step():
    plain, sharded = pair(TwoOutputs)
    optimizers = [adamw(plain.parameters()), adamw(sharded.parameters())]
    for step, x in enumerate(batches(6)):
        for model in (plain, sharded):
            out = model(x)
            chosen = (out[0], out[1], out[0] + out[1])[step % 3]
            chosen.square().mean().backward()
        assert differences(plain, sharded) == []
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad()
    assert differences(plain, sharded) == []


def test_gradients_of_different_outputs_add_up_over_backwards():
    plain, sharded = pair(TwoOutputs)
    for model in (plain, sharded):
        first, second = (model(x) for x in batches(2))
        first[0].sum().backward()
        second[1].square().sum().backward()
    assert differences(plain, sharded) == []


class SquareRoot(TwoOutputs):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.a(x), (self.b(x) * 0).sqrt()


def test_an_unused_output_through_a_root_at_zero_stays_finite():
    model = check(SquareRoot, loss=lambda out: out[0].square().mean())
    assert all(full(p).isfinite().all() for p in model.parameters())


def test_freeze_and_unfreeze():
    """The unfrozen layer moves again, with the schedule of its own."""

    def between(model: nn.Module, step: int) -> None:
        model.layers[1].requires_grad_(step >= 2)

    def frozen() -> nn.Module:
        model = Chain()
        model.layers[1].requires_grad_(False)
        return model

    check(frozen, batches(4), between=between)


def test_freezing_a_layer_that_trained():
    def between(model: nn.Module, step: int) -> None:
        model.layers[1].requires_grad_(step < 2)

    check(Chain, batches(4), between=between)


@pytest.mark.parametrize("frozen", ["layers.0.linear.weight", "layers.0.linear.bias", "layers.2.linear.weight"])
def test_one_frozen_parameter(frozen):
    def make() -> nn.Module:
        model = Chain()
        model.get_parameter(frozen).requires_grad_(False)
        return model

    check(make)


def test_low_rank_adapters_reduce_only_themselves():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.A, self.B = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.W + x @ self.A @ self.B

    model = check(lambda: nn.Sequential(*(Adapted() for _ in range(3))))
    reduces = model.schedule.backward.reduce_scatters
    assert sum(n.meta["fxshard"].num_bytes for n in reduces) == 3 * 4 * WIDTH * 4  # A and B: 4 by WIDTH in fp32
    assert all(model.get_parameter(f"{i}.W").grad is None for i in range(3))


def test_a_parameter_forward_does_not_use():
    class Unused(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(3))

    model = check(Unused)
    assert model.extra.grad is None


# -- outputs


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]
    note: str | None = None


register_dataclass(Result, field_names=["logits", "hidden", "note"])


class Returns(Framed):
    """Returns what `self.shape_of` makes of the logits and a hidden state."""

    def __init__(self, shape_of) -> None:
        super().__init__()
        self.shape_of = shape_of

    def forward(self, x: Tensor):
        hidden = self.layers[0](self.embed(x))
        out = self.layers[2](self.layers[1](hidden))
        return self.shape_of(self.head(out), hidden)


SHAPES = {
    "dict": lambda a, b: {"logits": a, "hidden": b},
    "nested": lambda a, b: [a, {"states": (b, [a * 2, None])}],
    "dataclass": lambda a, b: Result(a, [b], None),
    "None and numbers": lambda a, b: (a, None, 3, 2.5, True, b),
    "detached": lambda a, b: (a, b.detach()),
    "an integer tensor": lambda a, b: (a, b.argmax(-1)),
    "the same twice": lambda a, b: (a, a),
    "hidden and a view of it": lambda a, b: (b, b.view(-1)),
    "two views": lambda a, b: (b.t(), b.view(-1), a),
    "a chunked pair": lambda a, b: b.chunk(2, -1),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_of_every_shape(kind):
    plain, sharded = pair(lambda: Returns(SHAPES[kind]))
    x = batches(1)[0]
    a, b = plain(x), sharded(x)
    leaves_a, tree_a = torch.utils._pytree.tree_flatten(a)
    leaves_b, tree_b = torch.utils._pytree.tree_flatten(b)
    assert tree_a == tree_b and type(a) is type(b)
    for left, right in zip(leaves_a, leaves_b):
        assert type(left) is type(right)
        if isinstance(left, Tensor):
            assert identical(left.detach(), right.detach())
            assert left.requires_grad == right.requires_grad and left.stride() == right.stride()
        else:
            assert left == right
    train_both(plain, sharded, batches(3))


def test_a_returned_input_keeps_its_gradient():
    plain, sharded = pair(lambda: Returns(lambda a, b: (a, b)))

    class WithInput(Framed):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    plain, sharded = pair(WithInput)
    x = batches(1)[0]
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for model, given in zip((plain, sharded), inputs):
        out, same = model(given)
        assert same is given
        (out.sum() + (same * 3).sum()).backward()
    assert identical(inputs[0].grad, inputs[1].grad)
    assert differences(plain, sharded) == []


def test_the_gradient_of_an_input():
    plain, sharded = pair(Framed)
    inputs = [batches(1)[0].requires_grad_(), batches(1)[0].requires_grad_()]
    for model, given in zip((plain, sharded), inputs):
        model(given * 2).square().sum().backward()
    assert identical(inputs[0].grad, inputs[1].grad)
    assert differences(plain, sharded) == []


class ReturnsParameter(Framed):
    def __init__(self, pick) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor):
        return super().forward(x), self.pick(self.layers[1].linear.weight)


@pytest.mark.parametrize(
    "pick", [lambda w: w, lambda w: w.t(), lambda w: w[0], lambda w: w.view(-1), lambda w: w.detach()]
)
def test_a_returned_parameter_is_refused_by_name(pick):
    _, sharded = pair(lambda: ReturnsParameter(pick))
    with pytest.raises(fxshard.CaptureError, match=r"layers\.1\.linear\.weight"):
        sharded(batches(1)[0])


def test_a_parameter_may_be_returned_as_a_copy():
    check(lambda: ReturnsParameter(lambda w: w * 1.0))


LOSSES = {
    "out.sum()": lambda out: out.sum(),
    "out.t()": lambda out: (out.t() @ out).square().sum(),
    "out[..., ::2]": lambda out: out[..., ::2].sum(),
    "out.expand": lambda out: out.mean().expand(3).sum(),
    "a transposed tangent": lambda out: (out.t() * torch.arange(out.numel()).view(out.t().shape)).sum(),
    "a tangent of another layout": lambda out: out.t().contiguous().t().square().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_whose_tangents_are_not_contiguous(name):
    check(Framed, loss=LOSSES[name])


class Conv(nn.Module):
    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        self.layers.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).relu()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("input_format", [torch.contiguous_format, torch.channels_last])
def test_channels_last_inputs_outputs_and_weights(memory_format, input_format):
    images = [x.to(memory_format=input_format) for x in batches(3, (2, 4, 5, 5))]
    plain, sharded = pair(lambda: Conv(memory_format), F=3)
    train_both(plain, sharded, images)
    assert sharded.layers[0].weight.stride() == plain.layers[0].weight.stride()
    assert sharded(images[0]).stride() == plain(images[0]).stride()


class Squeezed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x.unsqueeze(1)).squeeze(1)
        y += 1
        return self.layers[2](self.layers[1](y))


def test_an_in_place_edit_of_a_squeezed_output():
    check(Squeezed)


def test_in_place_edits_of_the_input_reach_the_caller():
    class Edits(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return super().forward(x)

    plain, sharded = pair(Edits)
    inputs = [batches(1)[0], batches(1)[0]]
    for model, given in zip((plain, sharded), inputs):
        model(given).sum().backward()
    assert identical(*inputs)
    assert differences(plain, sharded) == []


# -- state of the module


class Scaled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.n = 1.0, 0
        self.layers[1].flag = False

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        x = super().forward(x) * self.scale
        return x.tanh() if self.layers[1].flag else x


def test_changed_attributes_are_seen():
    def between(model: nn.Module, step: int) -> None:
        model.scale = (1.0, 3.0, 1.0, 0.5)[step]
        model.layers[1].flag = step == 3

    check(Scaled, batches(4), between=between)


def test_a_counter_counts_calls():
    plain, sharded = pair(Scaled)
    train_both(plain, sharded, batches(3))
    sharded.eval()
    with torch.no_grad():
        sharded(batches(1)[0])
    assert sharded.n == 4


class Written(nn.Module):
    """Writes to buffers without dims and to an input: what torch takes for numbers, of which one is used as one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("peak", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor, level: Tensor, factor: float) -> Tensor:
        x = self.linear(x) * factor * self.gain + level.clone()
        level.add_(1.0)
        with torch.no_grad():
            self.peak.copy_(torch.maximum(self.peak, x.abs().max()))
        self.total.add_(x.detach().sum())
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_writes_to_tensors_without_dims_are_kept(dtype):
    torch.manual_seed(0)
    plain = Written().to(dtype)
    sharded = fxshard.compile(copy.deepcopy(plain), F=2, units="none")
    for step, x in enumerate(batches(4)):
        levels = [torch.tensor(0.5 * step, dtype=dtype) for _ in range(2)]
        outputs = [m(x.to(dtype), level, 1.0 + step) for m, level in zip((plain, sharded), levels)]
        assert identical(*outputs)
        assert identical(*levels) and levels[0] == 0.5 * step + 1
        assert [b.tolist() for b in plain.buffers()] == [b.tolist() for b in sharded.buffers()]
    assert len(sharded.schedules) == 2  # the factor is a number that changes: captured once more, and for good


def test_autocast_on_and_off():
    plain, sharded = pair(Framed)
    for step, x in enumerate(batches(4)):
        outputs = []
        for model in (plain, sharded):
            context = torch.autocast("cpu", torch.bfloat16) if step % 2 else contextlib.nullcontext()
            with context:
                outputs.append(model(x))
            outputs[-1].float().square().mean().backward()
        assert outputs[0].dtype == outputs[1].dtype == (torch.bfloat16 if step % 2 else torch.float32)
        assert identical(outputs[0].detach(), outputs[1].detach())
        assert differences(plain, sharded) == []


def test_backward_is_not_under_autocast():
    """A region of fp32 inside autocast has an fp32 backward, as eager gives it outside of the context."""

    class Exact(Framed):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    plain, sharded = pair(Exact)
    for model in (plain, sharded):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batches(1)[0])
        output.square().mean().backward()
    assert differences(plain, sharded) == []


def test_training_mode_is_seen():
    plain, sharded = pair(Drop)

    class Switch(Around):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.body(x), 0.5, self.training)

    plain, sharded = pair(Switch)
    x = batches(1)[0]
    for training in (True, False, True):
        outputs = []
        for model in (plain, sharded):
            model.train(training)
            torch.manual_seed(7)
            outputs.append(model(x).detach())
        assert identical(*outputs)


def test_shapes_may_change():
    plain, sharded = pair(Framed)
    optimizers = [sgd(plain.parameters()), sgd(sharded.parameters())]
    for rows in (3, 5, 1, 7, 2):
        x = batches(1, (rows, WIDTH))[0]
        for model, stepper in zip((plain, sharded), optimizers):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        assert differences(plain, sharded) == []
    assert len(sharded.schedules) <= 3  # the first size, then any size; one row is special to torch


def test_forward_arguments_by_keyword_and_branch():
    class Branch(Chain):
        def forward(self, x: Tensor, *, branch: int = 0, mask: Tensor | None = None) -> Tensor:
            x = self.layers[0](x)
            x = self.layers[1](x) if branch else self.layers[2](x)
            return x if mask is None else x * mask

    plain, sharded = pair(Branch)
    mask = torch.tensor([1.0] * 4 + [0.0] * 4)
    optimizers = [adamw(plain.parameters()), adamw(sharded.parameters())]
    for step, x in enumerate(batches(6)):
        for model in (plain, sharded):
            model(x, branch=step % 2, mask=mask if step > 2 else None).square().mean().backward()
        assert differences(plain, sharded) == []
        unused = sharded.layers[2 if step % 2 else 1]
        assert unused.linear.weight.grad is None
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad()
    assert differences(plain, sharded) == []


def test_module_hooks_run_as_on_the_plain_model():
    plain, sharded = pair(Framed)
    for model in (plain, sharded):
        model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.register_forward_hook(lambda m, args, out: out + 1)
        model.layers[1].register_forward_hook(lambda m, args, out: out * 3)
    train_both(plain, sharded, batches(3))
    assert len(sharded.schedules) == 1


def test_gradient_hooks_run_once_a_backward_and_see_the_gradient():
    plain, sharded = pair(TwoOutputs)
    seen: dict[nn.Module, list[Tensor]] = {plain: [], sharded: []}
    for model in seen:
        for p in (model.a.bias, model.b.bias):
            p.register_post_accumulate_grad_hook(lambda p, model=model: seen[model].append(full(p.grad)))
    train_both(plain, sharded, batches(3), loss=lambda out: out[0].square().mean())
    assert len(seen[sharded]) == len(seen[plain]) == 3  # none for the branch the loss does not use
    assert all(identical(a, b) for a, b in zip(seen[plain], seen[sharded]))


def test_many_models_of_one_class():
    """Captures are counted by model: the ninth of a class is no re-capture of the first."""
    for _ in range(10):
        check(Chain, batches(1))


def test_changing_shapes_of_one_model_make_no_other_dynamic():
    """What Dynamo learns about shapes is kept by file and line of the captured function: each model needs its own."""

    def symbolic(model: nn.Module) -> bool:
        inputs = model.schedule.forward.graph.find_nodes(op="placeholder")
        return any(isinstance(n.meta.get("val"), torch.SymInt) for n in inputs)

    _, first = pair(Framed)
    for rows in (3, 5):
        first(batches(1, (rows, WIDTH))[0]).sum().backward()
    _, second = pair(Framed)
    second(batches(1)[0]).sum().backward()
    assert symbolic(first) and not symbolic(second)


def test_a_container_of_torch_is_captured_whole():
    model = check(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    assert len(model.schedules) == 1 and len(model.schedule.forward.all_gathers) == 3
    check(lambda: nn.Linear(WIDTH, WIDTH))


# -- what is refused


class Prints(Around):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        print(x.sum().item())
        return self.layers[2](self.layers[1](x))


def line_of(source: type, text: str) -> str:
    import inspect

    lines, start = inspect.getsourcelines(source)
    return f"test_cases.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_data_dependent_print_is_refused_with_its_line_before_anything_is_sharded():
    model = Prints()
    before = dict(model.named_parameters())
    state = {name: p.clone() for name, p in before.items()}
    where = line_of(Prints, "print(")
    with pytest.raises(fxshard.CaptureError, match=re.escape(where)):
        fxshard.compile(model, F=2, example_inputs=(batches(1)[0],))
    after = dict(model.named_parameters())
    assert type(model) is Prints and not fxshard.is_compiled(model)
    assert all(after[name] is p and type(after[name]) is nn.Parameter for name, p in before.items())
    assert all(torch.equal(after[name], value) for name, value in state.items())
    model(batches(1)[0]).sum().backward()  # still a plain model
    assert all(p.grad is not None for p in model.parameters())


def test_without_example_inputs_the_first_call_refuses_it():
    _, sharded = pair(Prints)
    with pytest.raises(fxshard.CaptureError, match=re.escape(line_of(Prints, "print("))):
        sharded(batches(1)[0])


def test_a_parameter_used_by_an_eager_method_is_refused_by_name():
    class Encoder(Framed):
        def encode(self, x: Tensor) -> Tensor:
            return self.embed(x)

    _, sharded = pair(Encoder)
    with pytest.raises(RuntimeError, match=r"embed\.(weight|bias)"):
        sharded.encode(batches(1)[0])


def test_a_submodule_called_by_itself_is_refused_by_name():
    _, sharded = pair(Framed)
    with pytest.raises(RuntimeError, match=r"layers\.1\.linear\.(weight|bias)"):
        sharded.layers[1](batches(1)[0])


def test_an_in_place_edit_of_a_parameter_in_forward_is_refused_by_name():
    class Edits(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[1].linear.weight.mul_(0.5)
            return super().forward(x)

    _, sharded = pair(Edits)
    with pytest.raises(RuntimeError, match=r"layers\.1\.linear\.weight"):
        sharded(batches(1)[0])


def test_double_backward_is_refused():
    _, sharded = pair(Chain)
    x = batches(1)[0].requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(sharded(x).sum(), x, create_graph=True)[0].sum().backward()


def test_whole_parameters_inside_unsharded():
    plain, sharded = pair(Framed)
    x = batches(1)[0]
    with sharded.unsharded() as module:
        assert identical(module.embed(x).detach(), plain.embed(x).detach())
        assert type(module.embed.weight) is nn.Parameter
    train_both(plain, sharded, batches(3))


def test_a_graph_break_makes_several_schedules():
    class Broken(Framed):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            torch._dynamo.graph_break()
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = check(Broken, fullgraph=False)
    assert len(model.schedules) == 2


# -- precision


def test_norm_in_fp32_and_linear_in_bf16_in_one_unit():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x).bfloat16()).float() + x

    model = check(lambda: nn.Sequential(*(Mixed() for _ in range(3))))
    assert [f.dtype for f in model.schedule.flats.values() if f.unit == "0"] == [torch.float32, torch.bfloat16]
    assert model[0].linear.weight.dtype == torch.bfloat16 and model[0].norm.weight.dtype == torch.float32


class Quantised(nn.Module):
    """Frozen bytes and a bf16 scale."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Parameter(torch.randint(256, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.bytes.float() - 128) * self.scale.float()
        return x + x @ weight.to(x.dtype)


@pytest.mark.parametrize("F", [1, 2, 3])
def test_bytes_are_gathered_bit_exact_beside_a_bf16_scale(F):
    plain, sharded = pair(lambda: nn.Sequential(*(Quantised() for _ in range(3))), F)
    train_both(plain, sharded, batches(3))
    assert identical(full(sharded[1].bytes), plain[1].bytes.detach())
    assert sharded[1].bytes.dtype == torch.uint8


def test_bytes_are_never_cast_under_mixed_precision():
    precision = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    plain, sharded = pair(lambda: nn.Sequential(*(Quantised() for _ in range(3))), mixed_precision=precision)
    x = batches(1)[0]
    out = sharded(x)
    out.float().square().mean().backward()
    for flat in sharded.schedule.flats.values():
        if flat.dtype == torch.uint8:
            assert flat.param_dtype == torch.uint8 and flat.full_bytes == flat.padded_numel
            assert not [n for p in sharded.schedule.phases for n in p.nodes("cast_shard", flat.name)]
    assert identical(out.detach(), plain(x.bfloat16()).detach())


def test_bf16_parameters_compute_as_a_bf16_model():
    """Against a plain bf16 model: the same outputs and, reduced in fp32 with one contributor, the same gradients."""
    torch.manual_seed(0)
    master = Framed()
    plain = copy.deepcopy(master).bfloat16()
    precision = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision)
    x = batches(1)[0]
    out = sharded(x)
    assert out.dtype == torch.bfloat16 and identical(out.detach(), plain(x.bfloat16()).detach())
    out.square().mean().backward()
    plain(x.bfloat16()).square().mean().backward()
    for a, b in zip(plain.parameters(), sharded.parameters()):
        assert b.grad.dtype == torch.float32 and identical(a.grad.float(), full(b.grad))


@pytest.mark.parametrize("change", ["step", "load", "edit", "data"])
def test_a_cached_cast_dies_with_every_change_of_the_master(change):
    precision = fxshard.MixedPrecision(param=torch.bfloat16)
    _, sharded = pair(Framed, mixed_precision=precision)
    x = batches(1)[0]
    sharded(x).sum().backward()
    if change == "step":
        sgd(sharded.parameters()).step()
    elif change == "load":
        torch.manual_seed(5)
        sharded.load_state_dict(Framed().state_dict())
    elif change == "edit":
        with torch.no_grad():
            for p in sharded.parameters():
                p.mul_(2)
    else:
        for p in sharded.parameters():
            p.data.mul_(2)
    expected = Framed()
    with torch.no_grad():
        for a, b in zip(expected.parameters(), sharded.parameters()):
            a.copy_(b.full_tensor())
    assert identical(sharded(x).detach(), expected.bfloat16()(x.bfloat16()).detach())


def test_odd_empty_and_scalar_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.6))
            self.one, self.five, self.seven = (nn.Parameter(torch.randn(n)) for n in (1, 5, 7))
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            extra = x @ self.empty.t()
            return x * self.gain + self.one + torch.cat([self.five, self.seven[:3]]) + extra.sum()

    for F in (1, 2, 3, 5, 8):
        model = check(lambda: nn.Sequential(*(Odd() for _ in range(3))), F=F)
        assert [tuple(p.shape) for p in model[0].parameters()] == [(), (1,), (5,), (7,), (0, WIDTH)]
        assert [tuple(p.grad.shape) for p in model[0].parameters() if p.grad is not None] == []


def test_an_odd_vocabulary_on_eight():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(321, WIDTH), nn.Linear(WIDTH, 321, bias=False)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.embed(words))

    model = check(Words, tokens(), F=8)
    assert tuple(model.head.weight.shape) == (321, WIDTH)


def test_a_sparse_embedding_gradient_is_refused_or_equal():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH, sparse=True)

        def forward(self, words: Tensor) -> Tensor:
            return self.embed(words)

    _, sharded = pair(Sparse)
    with pytest.raises((RuntimeError, TypeError), match=r"embed|sparse"):
        sharded(tokens(1)[0]).sum().backward()


logger = logging.getLogger(__name__)


def test_a_logger_call_in_forward_is_no_obstacle():
    class Logs(Framed):
        def forward(self, x: Tensor) -> Tensor:
            logger.info("forward of %s", type(self).__name__)
            return super().forward(x)

    check(Logs)


def test_observed_events_name_every_communication_node():
    _, sharded = pair(Framed)
    x = batches(1)[0]
    sharded(x).sum().backward()
    seen = events(sharded)
    mean_of_squares(sharded(x)).backward()
    for phase in sharded.schedule.phases:
        for kind in ("all_gather", "free", "reduce_scatter", "accumulate_grad"):
            expected = [n.meta["fxshard"].flat for n in phase.nodes(kind)]
            assert [flat for name, k, flat in seen if name == phase.name and k == kind] == expected
