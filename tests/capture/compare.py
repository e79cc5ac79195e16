"""What the tests share: tiny models, and a training run of a compiled model beside the plain one, compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxshard

WIDTH = 8


class Block(nn.Module):
    """The unit of most tests: one linear layer and a residual."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + x


class Chain(nn.Module):
    """Three units and nothing else: the smallest model with a first, a middle and a last one."""

    def __init__(self, num_units: int = 3, width: int = WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_units))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Framed(nn.Module):
    """Three units between an input and an output layer, which are the two parts of the root."""

    def __init__(self, num_units: int = 3, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_units))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def full(value: Tensor | None) -> Tensor | None:
    """A parameter or gradient whole, sharded or not."""
    if value is None:
        return None
    whole: Tensor = value.full_tensor() if isinstance(value, fxshard.ShardedParameter) else value
    return whole.detach().clone()


def identical(a: Any, b: Any) -> bool:
    """Bit equality of two tensors, NaN equal to NaN; None equals None only."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def differences(plain: nn.Module, sharded: nn.Module) -> list[str]:
    """Names of what differs: parameters, gradients (None included), buffers, and requires_grad flags."""
    found = []
    names = [n for n, _ in plain.named_parameters()]
    if names != [n for n, _ in sharded.named_parameters()]:
        return ["parameter names"]
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters()):
        if not identical(a.detach(), full(b)):
            found.append(name)
        if not identical(a.grad, full(b.grad)):
            found.append(f"{name}.grad")
        if a.requires_grad != b.requires_grad:
            found.append(f"{name}.requires_grad")
    for (name, a), (other, b) in zip(plain.named_buffers(), sharded.named_buffers()):
        if name != other or not identical(a, b):
            found.append(name)
    return found


def pair(make: Callable[[], nn.Module], F: int | None = 2, **options: Any) -> tuple[Any, Any]:
    """A plain model and a compiled copy of it."""
    torch.manual_seed(0)
    plain = make()
    return plain, fxshard.compile(copy.deepcopy(plain), F=F, **options)


def mean_of_squares(outputs: Any) -> Tensor:
    """A loss that every floating output reaches."""
    leaves = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([x.float().square().mean() for x in leaves]).sum()


Step = Callable[[nn.Module, Any, int], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_both(
    plain: nn.Module,
    sharded: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] = mean_of_squares,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    between: Callable[[nn.Module, int], None] | None = None,
) -> None:
    """One optimizer step an input on both models, from the same random state; everything must agree after each."""
    optimizers = [optimizer(plain.parameters()), optimizer(sharded.parameters())]
    for step, given in enumerate(inputs):
        losses = []
        for model in (plain, sharded):
            if between is not None:
                between(model, step)
            torch.manual_seed(step)
            arguments = given if isinstance(given, tuple) else (given,)
            value = loss(model(*copy.deepcopy(arguments)))
            value.backward()
            losses.append(value.detach())
        assert identical(*losses), f"step {step}: loss {losses[0].item()} plain, {losses[1].item()} sharded"
        assert differences(plain, sharded) == [], f"after backward of step {step}"
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad()
        assert differences(plain, sharded) == [], f"after step {step}"


def check(
    make: Callable[[], nn.Module],
    inputs: Sequence[Any] | None = None,
    loss: Callable[[Any], Tensor] = mean_of_squares,
    F: int = 2,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    between: Callable[[nn.Module, int], None] | None = None,
    **options: Any,
) -> Any:
    """Compile a copy, train it beside the plain model and compare. Returns the compiled model."""
    plain, sharded = pair(make, F, **options)
    train_both(plain, sharded, batches(3) if inputs is None else inputs, loss, optimizer, between)
    return sharded


def batches(count: int, shape: tuple[int, ...] = (3, WIDTH)) -> list[Tensor]:
    """Unequal inputs, one a step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def events(model: nn.Module) -> list[tuple[str, str, str]]:
    """From now on the executed communication nodes, as (phase, kind, FlatParameter)."""
    return model.__dict__["_fxshard"].executor.observe()
