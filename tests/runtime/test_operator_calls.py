"""How lowered code calls operators: the same ones as the schedule says, without views that come to nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from examples.models import GPT, GPTConfig
from fxshard.capture.torch_private import OpOverload
from fxshard.ir import FlatParameter, ParameterSpec
from fxshard.ir.nodes import info
from fxshard.runtime.calls import Simplified
from fxshard.runtime.kernels import flatten_cast_scale
from fxshard.runtime.kernels.bound import BoundFlatten

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.detach.default)


class Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def program(model: nn.Module) -> Any:
    return model.__dict__["_fxshard"].executor.programs[0]


def said(phase: Any) -> list[Any]:
    """The operators of a phase that compute something, in order."""
    return [n.target for n in phase.graph.nodes if info(n).kind == "compute" and isinstance(n.target, OpOverload)]


def test_what_runs_is_what_the_schedule_says() -> None:
    config = GPTConfig(layers=2, width=32, heads=2, vocabulary=64, length=8)
    model, tokens = fxshard.compile(GPT(config), F=2), torch.randint(64, (2, 8))
    model(tokens=tokens, targets=tokens).backward()
    code, phase = program(model)._forward_code(), model.schedule.forward
    arguments: list[Any] = []
    code_function, code.function = code.function, lambda given: arguments.extend(given) or code_function(given)
    model(tokens=tokens, targets=tokens)
    code.function = code_function
    with torch.no_grad(), Ran() as ran:
        code.function(list(arguments))
    computing = [op for op in said(phase) if op not in VIEWS and op is not aten.clone.default]
    assert [op for op in ran.operators if op in computing] == computing
    assert "aten_detach" not in program(model).source("backward")
    assert "aten__unsafe_view" not in program(model).source() + program(model).source("backward")
    # Transposed weights are views made once; backward transposes only what it multiplies.
    assert "aten_t_default(p_" not in program(model).source() + program(model).source("backward")
    backward = model.schedule.backward
    assert program(model).source("backward").count("aten_t_default") < said(backward).count(aten.t.default) / 3


def test_operators_are_called_as_torch_calls_them() -> None:
    model = fxshard.compile(GPT(GPTConfig(layers=1, width=32, heads=2, vocabulary=64, length=8)), F=1)
    tokens = torch.randint(64, (2, 8))
    model(tokens=tokens, targets=tokens).backward()
    found = program(model)._forward_code().globals
    direct = {key for key, value in found.items() if key.startswith("aten_") and not isinstance(value, OpOverload)}
    assert {"aten_addmm_default", "aten_view_default", "aten_gelu_default", "aten_native_layer_norm_default"} <= direct
    # One without tensors is not: a default device would change where it is made.
    assert isinstance(found["aten_arange_default"], OpOverload)


class Odd(nn.Module):
    """Views that may and that may not be left out, values that are read again after their clone, outputs that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ self.weight  # (3, 6)
        again = y.clone()
        self.seen += y.detach().sum(1)
        turned = y.t().reshape(9, 2).view(18)  # of a transposed tensor: a copy, then a view
        both = y.view(18).view(2, 9).view(3, 6).t().t()
        swapped = y.unsqueeze(0).transpose(0, 1).transpose(1, 0)
        return again * y, turned, both, swapped, self.weight.t() * 1, y.detach(), (again + 1).clone()


@pytest.mark.parametrize("F", [1, 3])
def test_views_left_out_change_nothing(F: int) -> None:
    torch.manual_seed(0)
    plain = Odd()
    model, x = fxshard.compile(copy.deepcopy(plain), F=F), torch.randn(3, 4)
    for _ in range(2):
        expected, found = plain(x), model(x)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.requires_grad == b.requires_grad
        assert found[2].data_ptr() != found[0].data_ptr()
        sum(t.sum() for t in expected if t.requires_grad).backward()
        sum(t.sum() for t in found if t.requires_grad).backward()
        # What is returned is the caller's: edits of one output are not seen in what belongs to others or to backward.
        with torch.no_grad():
            found[6].add_(1)
        assert torch.equal(found[0], expected[0])
    (parameter,) = model.parameters()
    assert torch.equal(parameter.grad.full_tensor(), plain.weight.grad)
    assert torch.equal(model.seen, plain.seen)


def test_symbolic_shapes_run_for_every_size() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = fxshard.compile(copy.deepcopy(plain), F=1, dynamic=True, units="none")
    for size in (2, 5, 7):
        x = torch.randn(size, 3, 4)
        assert torch.equal(model(x), plain(x))
        model(x).sum().backward()


SHAPES = [((3, 5), (5, 1)), ((4, 2), (1, 4)), ((7,), (1,)), ((), ()), ((0,), (1,)), ((2, 3, 2), (6, 1, 3))]


def layout() -> FlatParameter:
    specs = [ParameterSpec(f"p{i}", shape, stride, torch.float32, True) for i, (shape, stride) in enumerate(SHAPES)]
    return FlatParameter.build("unit", "unit", False, tuple(specs), F=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("odd", ["none", "absent", "expanded", "turned", "wider", "flat"])
def test_bound_flatten_gives_the_bits_of_the_kernel(dtype: torch.dtype, odd: str) -> None:
    flat, generator = layout(), torch.Generator().manual_seed(0)
    bound = BoundFlatten(flat, 1 / 3, torch.device("cpu"))
    out = torch.empty(flat.padded_numel, dtype=dtype)
    for step in range(4):
        gradients: list[Tensor | None] = [
            torch.empty_strided(shape, stride, dtype=dtype).copy_(torch.randn(shape, generator=generator))
            for shape, stride in SHAPES
        ]
        if step == 2:  # another kind of gradient in the midst of those it knows
            if odd == "absent":
                gradients[1] = None
            elif odd == "expanded":
                gradients[0] = torch.randn((), dtype=dtype, generator=generator).expand(3, 5)
            elif odd == "turned":
                gradients[0] = torch.randn(5, 3, dtype=dtype, generator=generator).t()
            elif odd == "wider":
                gradients = [None if g is None else g.to(torch.float32) for g in gradients]
            elif odd == "flat":
                gradients[0] = torch.randn(15, dtype=dtype, generator=generator)
        expected = torch.empty_like(out)
        strides, numels = [p.stride for p in flat.parameters], [p.numel for p in flat.parameters]
        flatten_cast_scale(gradients, flat.offsets, numels, expected, 1 / 3, strides=strides)
        out.fill_(torch.nan)  # a slot holds what was there before
        bound(gradients, out, False)
        assert torch.equal(out, expected)
        bound(gradients, out, True)
        flatten_cast_scale(gradients, flat.offsets, numels, expected, 1 / 3, strides=strides, accumulate=True)
        assert torch.equal(out, expected)


def test_simplified_keeps_what_leaves_a_phase() -> None:
    model, x = fxshard.compile(Odd(), F=1), torch.randn(3, 4)
    model(x)
    for phase in model.schedule.phases:
        simplified = Simplified(phase)
        for node in phase.results:
            if isinstance(node, torch.fx.Node):
                assert simplified.resolve(node) in simplified.inputs
