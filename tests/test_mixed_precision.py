"""Mixed precision against the same computation written by hand in eager: dtypes, casts, islands in full precision, buffers."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard import MixedPrecision
from fxshard.ir.nodes import user_line
from fxshard.precision import cast
from tests.capture.compare import WIDTH, batches, full, identical

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Normed(nn.Module):
    """A unit with a norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


class Stack(nn.Module):
    """Two units between the two parts of a root, a norm in the second part."""

    def __init__(self, make: Callable[[], nn.Module] = Normed) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def made(make: Callable[[], nn.Module], dtype: torch.dtype = FP32) -> Any:
    torch.manual_seed(0)
    return make().to(dtype)


def tensors_to(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of tuples and dicts in `dtype`."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: tensors_to(value, dtype) for key, value in values.items()}
    return tuple(tensors_to(value, dtype) for value in values) if isinstance(values, tuple) else values


def by_hand(model: nn.Module, param: torch.dtype, islands: Iterable[str] = (), entered: Iterable[str] = ()) -> Any:
    """A plain copy that computes in `param`: parameters converted, casts by hooks where modules are entered and, of islands,
    left."""
    plain = copy.deepcopy(model)
    kept = {m for name in islands for m in plain.get_submodule(name).modules()}
    for module in plain.modules():
        for p in module._parameters.values():
            if p is not None and module not in kept:
                p.data = p.data.to(param)
    for name in ("", *entered):
        plain.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs: (tensors_to(args, param), tensors_to(kwargs, param)), with_kwargs=True
        )
    for name in islands:
        module = plain.get_submodule(name)
        own = next(module.parameters()).dtype
        module.register_forward_pre_hook(lambda module, args, own=own: tensors_to(args, own))
        module.register_forward_hook(lambda module, args, output: output.to(param))
    return plain


def agree(plain: nn.Module, sharded: nn.Module) -> None:
    """Gradients, rounded to the dtype of the sharded ones, are the same bits, and None where None."""
    for (name, a), (other, b) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other
        assert identical(None if a.grad is None else a.grad.to(b.dtype), full(b.grad)), name


def step_both(plain: nn.Module, sharded: nn.Module, x: Any) -> None:
    """One forward and backward of each: outputs and gradients are the same bits."""
    outputs = [plain(x), sharded(x)]
    assert identical(*(o.detach() for o in outputs))
    for output in outputs:
        output.float().square().sum().backward()
    agree(plain, sharded)


def casts_of(schedule: fxshard.Schedule) -> list[torch.fx.Node]:
    """The casts in forward that are operators of the model."""
    return [node for node in schedule.forward.graph.nodes if node.target is torch.ops.aten._to_copy.default]


# -- islands

NORMS = ["layers.0.norm", "layers.1.norm", "norm"]


@pytest.mark.parametrize(
    ("wanted", "islands", "units"),
    [
        (nn.LayerNorm, NORMS, "auto"),
        pytest.param(nn.LayerNorm, NORMS, "none", marks=pytest.mark.full),
        (nn.LayerNorm, NORMS, [nn.Linear, nn.LayerNorm]),
        pytest.param(("*.norm", "head"), [*NORMS[:2], "head"], "auto", marks=pytest.mark.full),
        (["layers.1", nn.LayerNorm], ["layers.0.norm", "layers.1", "norm"], "auto"),
        pytest.param(Normed, ["layers.0", "layers.1"], "layers.*", marks=pytest.mark.full),
    ],
)
def test_islands_are_gathered_and_computed_with_in_their_own_dtype(wanted: Any, islands: list[str], units: Any) -> None:
    master = made(Stack)
    entered = [] if units == "none" else ["layers.0", "layers.1"] if units != [nn.Linear, nn.LayerNorm] else [
        name for name, m in master.named_modules() if isinstance(m, nn.Linear)
    ]  # fmt: skip
    plain = by_hand(master, BF16, islands, [name for name in entered if name not in islands])
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision=wanted)
    sharded = fxshard.compile(copy.deepcopy(master), F=2, units=units, mixed_precision=precision)
    for x in batches(2):
        step_both(plain, sharded, x)
        plain.zero_grad(), sharded.zero_grad()
    assert len(sharded.schedules) == 1, "a second call captures nothing new"
    gathered = {fqn: flat.param_dtype for flat in sharded.schedule.flats.values() for fqn in flat.fqns}
    below = {n for n in gathered if any(n.startswith(f"{name}.") for name in islands)}
    assert gathered == {n: FP32 if n in below else BF16 for n in gathered} and below


def test_a_unit_with_an_island_has_two_flat_parameters() -> None:
    precision = MixedPrecision(param=BF16, full_precision=nn.LayerNorm)
    schedule = fxshard.trace(made(Stack), (batches(1)[0],), F=2, mixed_precision=precision)
    assert {name: (flat.unit, len(flat.fqns), flat.param_dtype) for name, flat in schedule.flats.items()} == {
        "(root).0": ("(root).0", 2, BF16),
        "layers.0": ("layers.0", 4, BF16),
        "layers.0[full precision]": ("layers.0", 2, FP32),
        "layers.1": ("layers.1", 4, BF16),
        "layers.1[full precision]": ("layers.1", 2, FP32),
        "(root).1[full precision]": ("(root).1", 2, FP32),
        "(root).1": ("(root).1", 2, BF16),
    }
    assert len(casts_of(schedule)) == 6  # into each norm and out of it
    assert fxshard.Schedule.from_json(schedule.to_json()).text("all") == schedule.text("all")


@pytest.mark.parametrize(
    ("given", "islands", "others"),
    [
        ({}, (FP32, FP32, FP32), (BF16, BF16, FP32)),
        ({"reduce": BF16, "accumulate": BF16}, (FP32, FP32, FP32), (BF16, BF16, BF16)),
        ({"reduce": FP64, "accumulate": FP64}, (FP32, FP64, FP64), (BF16, FP64, FP64)),
    ],
)
def test_islands_are_reduced_and_added_up_in_their_own_dtype_or_wider(given: Any, islands: Any, others: Any) -> None:
    precision = MixedPrecision(param=BF16, full_precision=nn.LayerNorm, **given)
    flats = fxshard.trace(made(Stack), (batches(1)[0],), F=2, mixed_precision=precision).flats
    for name, wanted in (("layers.0[full precision]", islands), ("layers.0", others)):
        assert (flats[name].param_dtype, flats[name].reduce_dtype, flats[name].accumulate_dtype) == wanted


def test_islands_of_wider_masters_and_without_a_param_dtype() -> None:
    """fp64 masters make fp64 islands. Where nothing has another dtype there is one FlatParameter."""
    x = batches(1)[0]
    for param in (FP16, FP32):
        master = made(Stack, FP64)
        plain = by_hand(master, param, NORMS, ["layers.0", "layers.1"])
        precision = MixedPrecision(param=param, reduce=FP64, full_precision=nn.LayerNorm)
        step_both(plain, fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision), x)
    flats = fxshard.trace(made(Stack), (x,), F=2, mixed_precision=MixedPrecision(full_precision=nn.LayerNorm)).flats
    assert list(flats) == ["(root).0", "layers.0", "layers.1", "(root).1"]


class Routed(nn.Module):
    """Its island takes a dict by name, with indices, and returns a nested output; it sees what dtypes it is given."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2, bias=False)

        def forward(self, index: Tensor, given: dict[str, Tensor]) -> Any:
            assert index.dtype == torch.int64 and given["x"].dtype == given["noise"].dtype == self.gate.weight.dtype
            scores = self.gate(given["x"] + given["noise"])[index].softmax(-1)
            return {"weights": (scores, scores.argmax(-1))}

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Routed.Router(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[0]).flip(0)
        out = self.router(index, given={"x": x, "noise": torch.ones(1)})
        weights, chosen = out["weights"]
        assert weights.dtype == x.dtype and chosen.dtype == torch.int64
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def test_an_island_of_any_inputs_and_outputs() -> None:
    master = made(Routed)
    x = batches(1)[0]
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision="*router")
    sharded = fxshard.compile(copy.deepcopy(master), F=2, units="experts.*", mixed_precision=precision)
    low, gate = x.bfloat16(), master.router.gate.weight.detach().requires_grad_()
    weights = nn.functional.linear(low.float() + 1, gate).flip(0).softmax(-1).bfloat16()
    experts = copy.deepcopy(master.experts).bfloat16()
    wanted = sum(weights[:, i : i + 1] * expert(low) for i, expert in enumerate(experts))
    got = sharded(x)
    assert identical(got.detach(), wanted.detach())
    for output in (got, wanted):
        output.float().square().sum().backward()
    assert identical(gate.grad, full(sharded.router.gate.weight.grad))
    assert identical(experts[1].weight.grad.float(), full(sharded.experts[1].weight.grad))


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.linspace(1, 300, WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.frequency).cos()


def test_islands_without_parameters_compute_as_their_buffers_or_as_the_model() -> None:
    master = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Softmax(), nn.Linear(WIDTH, WIDTH)))
    master.append(Rotary())
    precision = MixedPrecision(param=BF16, buffers=BF16, full_precision=(Softmax, Rotary))
    sharded = fxshard.compile(copy.deepcopy(master), F=2, units=nn.Linear, mixed_precision=precision)
    assert sharded[3].frequency.dtype == FP64  # no dtype applies to an island, that for buffers neither
    x = batches(1)[0].bfloat16()
    first, second = copy.deepcopy(master[0]).bfloat16(), copy.deepcopy(master[2]).bfloat16()
    soft = Softmax()(first(x).float()).bfloat16()
    assert identical(sharded(x).detach(), master[3](second(soft).double()).bfloat16().detach())


@pytest.mark.parametrize(
    ("wanted", "error", "texts"),
    [
        (nn.Conv2d, ValueError, ["full_precision=Conv2d: no module of this class. Classes here:", "LayerNorm, Linear"]),
        ("*.nrom", ValueError, [r"full_precision='*.nrom' matches no module. Close names: norm"]),
        ("xyz", ValueError, ["full_precision='xyz' matches no module. Modules here: embed, layers, layers.0", "and 4 more"]),
        ((nn.Conv2d, "norm", "haed"), ValueError, ["full_precision=Conv2d", "full_precision='haed'", "Close names: head"]),
        (3, TypeError, ["full_precision=3", "a module class, a pattern of module names"]),
        (["norm", None], TypeError, ["full_precision=['norm', None]"]),
    ],
)  # fmt: skip
def test_what_chooses_no_island_is_an_error_that_lists_what_there_is(wanted: Any, error: Any, texts: list[str]) -> None:
    model = made(Stack)
    with pytest.raises(error) as raised:
        fxshard.compile(model, F=2, mixed_precision=MixedPrecision(param=BF16, full_precision=wanted))
    assert all(text in str(raised.value) for text in texts), str(raised.value)
    assert type(model) is Stack


class Tied(nn.Module):
    """A head whose weight is that of the embedding, and one norm at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.before = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Normed() for _ in range(2))
        self.after = self.before
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.after(x))


@pytest.mark.parametrize("wanted", ["head", nn.Embedding])
def test_a_parameter_tied_between_an_island_and_other_code_is_refused(wanted: Any) -> None:
    model = made(Tied)
    with pytest.raises(ValueError, match="share a parameter and not all") as raised:
        fxshard.compile(model, F=2, mixed_precision=MixedPrecision(param=BF16, full_precision=wanted))
    assert "'embed.weight'" in str(raised.value) and "'head.weight'" in str(raised.value)


def test_a_parameter_tied_among_islands_and_a_module_at_two_places() -> None:
    """`after` is the same module as `before`: choosing one place chooses it, and nothing is tied to other code."""
    master = made(Tied)
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision=("head", "embed", "after"))
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision)
    plain = copy.deepcopy(master)
    plain.layers.bfloat16()
    x = torch.arange(5)

    def forward() -> Tensor:
        y = plain.before(plain.embed(x))
        for layer in plain.layers:
            y = layer(y.bfloat16())
        return plain.head(plain.after(y.float()).bfloat16().float()).bfloat16()

    outputs = [forward(), sharded(x)]
    assert identical(*(o.detach() for o in outputs))
    for output in outputs:
        output.float().square().sum().backward()
    agree(plain, sharded)


# -- casts where a unit is entered


class Widens(nn.Module):
    """A unit that returns fp32, as many norms and losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float()


def test_every_unit_casts_its_inputs() -> None:
    """Else the second layer is a dtype error."""
    master = made(lambda: nn.ModuleList(Widens() for _ in range(2)))

    class Chain(nn.Module):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            assert x.dtype == FP32
            return self.layers[1](x + torch.ones(WIDTH))

    precision = MixedPrecision(param=BF16, reduce=FP32)
    model = Chain(copy.deepcopy(master))
    plain = by_hand(model, BF16, entered=["layers.0", "layers.1"])
    step_both(plain, fxshard.compile(model, F=2, mixed_precision=precision), batches(1)[0])
    precision = MixedPrecision(param=BF16, cast_forward_inputs=False)
    off = fxshard.compile(Chain(copy.deepcopy(master)), F=2, mixed_precision=precision)
    with pytest.raises(RuntimeError, match="dtype"):
        off(batches(1)[0].bfloat16())


def test_a_norm_after_fp32_does_not_widen_what_follows() -> None:
    """Element by element torch promotes: without the cast everything from here on would be fp32 in silence."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scale() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x).float())

    for switch, dtype in ((True, BF16), (False, FP32)):
        precision = MixedPrecision(param=BF16, cast_forward_inputs=switch)
        assert fxshard.compile(made(Between), F=2, mixed_precision=precision)(batches(1)[0]).dtype == dtype


@dataclasses.dataclass
class Batch:
    x: Tensor
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Batch
    scale: int = 2


class Named(NamedTuple):
    x: Tensor
    index: Tensor


class Kind(enum.Enum):
    ODD = 1


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, frozen: Frozen, named: Named, *, ordered: OrderedDict[str, list[Any]]) -> Any:
        floats = [frozen.inner.x, frozen.inner.more["deep"][0], named.x, ordered["a"][0]]
        assert all(x.dtype == self.linear.weight.dtype for x in floats)
        assert named.index.dtype == torch.int32 and ordered["a"][1] == "text" and frozen.scale == 2
        assert isinstance(ordered["odd"][0], torch.dtype) and ordered["odd"][1:] == [
            named.x.device,
            Kind.ODD,
            len,
            slice(2),
        ]
        assert isinstance(named, Named) and isinstance(ordered, OrderedDict) and ordered["mask"][0].dtype == torch.bool
        total = sum(self.linear(x) for x in floats).float()
        return Frozen(Batch(total, {"deep": (total + 1,)})), Named(total, named.index)


class OfStructures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structured() for _ in range(2))

    def forward(self, frozen: Frozen, named: Named) -> tuple[Frozen, Named]:
        for layer in self.layers:
            odd = [named.x.dtype, named.x.device, Kind.ODD, len, slice(2)]
            ordered = OrderedDict(odd=odd, a=[torch.ones(WIDTH), "text"], mask=[torch.ones(1, dtype=torch.bool)])
            frozen, named = layer(frozen, named, ordered=ordered)
        return frozen, named


@pytest.mark.parametrize("output", [None, BF16, FP64])
def test_dataclasses_dicts_and_named_tuples_are_cast_and_integers_never(output: torch.dtype | None) -> None:
    master = made(OfStructures)
    precision = MixedPrecision(param=BF16, reduce=FP32, output=output)
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision)
    x = batches(1)[0]
    frozen, named = sharded(Frozen(Batch(x, {"deep": (x + 1,)})), Named(x, torch.arange(3, dtype=torch.int32)))
    assert isinstance(frozen, Frozen) and isinstance(named, Named) and frozen.scale == 2
    plain = copy.deepcopy(master).bfloat16()
    y = [x.bfloat16(), (x + 1).bfloat16(), x.bfloat16()]
    for layer in plain.layers:
        total = sum(layer.linear(v) for v in [*y, torch.ones(WIDTH, dtype=BF16)]).float()
        y = [total.bfloat16(), (total + 1).bfloat16(), total.bfloat16()]
    wanted = total if output is None else total.to(output)
    deep = total + 1 if output is None else (total + 1).to(output)
    assert identical(frozen.inner.x.detach(), wanted.detach()) and identical(named.x.detach(), wanted.detach())
    assert identical(frozen.inner.more["deep"][0].detach(), deep.detach()) and named.index.dtype == torch.int32
    for loss in (frozen.inner.x.float().square().sum(), wanted.float().square().sum()):
        loss.backward()
    agree(plain, sharded)


@dataclasses.dataclass(frozen=True)
class Masked:
    """Two fields that its constructor does not take, one of which may be set later."""

    x: Tensor
    size: int = dataclasses.field(init=False)
    mask: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.x.shape[-1])


class OfMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Masked) -> Masked:
        y = self.linear(given.x)
        if given.mask is not None:
            assert given.mask.dtype == given.x.dtype
            y = y * given.mask
        result = Masked(y)
        object.__setattr__(result, "mask", y + 1)
        return result


@pytest.mark.parametrize("masked", [True, False])
def test_fields_that_a_dataclass_sets_itself_are_kept_and_cast(masked: bool) -> None:
    master = made(OfMasked)
    precision = MixedPrecision(param=BF16, reduce=FP32, output=FP64)
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision, units="none")
    given, mask = Masked(batches(1)[0]), torch.linspace(0, 1, WIDTH)
    if masked:
        object.__setattr__(given, "mask", mask)
    out = sharded(given)
    assert given.x.dtype == FP32 and (given.mask is mask or not masked)
    y = copy.deepcopy(master).bfloat16().linear(given.x.bfloat16()) * (mask.bfloat16() if masked else 1)
    assert isinstance(out, Masked) and out.size == WIDTH
    assert identical(out.x.detach(), y.detach().double()) and identical(out.mask.detach(), (y + 1).detach().double())


def test_what_needs_no_cast_is_the_same_object() -> None:
    values = {
        "x": torch.ones(1, dtype=BF16),
        "n": torch.ones(1, dtype=torch.int64),
        "batch": Batch(torch.ones(1, dtype=BF16)),
    }
    assert cast(values, BF16) is values
    made = cast(values, FP32)
    assert (
        made is not values and made["n"] is values["n"] and made["batch"].x.dtype == FP32 and values["x"].dtype == BF16
    )
    complex_and_fp8 = (torch.ones(1, dtype=torch.complex64), torch.ones(1).to(torch.float8_e4m3fn))
    assert cast(complex_and_fp8, BF16) is complex_and_fp8


class Sees(nn.Module):
    """Returns what it computes and the dtype it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        return self.linear(x.to(self.linear.weight.dtype)), x.dtype


class MakesItself(nn.Module):
    """Its forward gives a unit fp32 that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sees() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        y, first = self.layers[0](x)
        z, second = self.layers[1](torch.ones(3, WIDTH) + y.float())
        return z, (x.dtype, first, second)


@pytest.mark.parametrize(
    ("switch", "output", "seen"),
    [(True, None, (FP16, FP16, FP16)), (True, FP32, (FP16, FP16, FP16)), (False, None, (FP32, FP32, FP32))],
)
def test_what_units_see(switch: bool, output: torch.dtype | None, seen: Any) -> None:
    precision = MixedPrecision(param=FP16, cast_forward_inputs=switch, output=output)
    model = fxshard.compile(made(MakesItself), F=2, mixed_precision=precision)
    out, dtypes = model(batches(1)[0])
    assert dtypes == seen and out.dtype == (output or FP16)
    out.sum().backward()
    assert all(p.grad.dtype == FP32 for p in model.parameters())
    with model.unsharded():
        assert model(batches(1)[0])[1] == (FP32, FP32, FP32)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_recomputation_sees_the_dtypes_of_its_forward(early_stop: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Widens() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, early_stop=early_stop)
            return x

    master = made(Recomputed)
    plain = by_hand(master, BF16, entered=["layers.0", "layers.1"])
    sharded = fxshard.compile(master, F=2, mixed_precision=MixedPrecision(param=BF16, reduce=FP32, output=FP32))
    step_both(plain, sharded, batches(1)[0])


def visible(model: nn.Module) -> Any:
    """What a user sees of a model's modules."""
    return [
        (name, type(m), "forward" in m.__dict__, len(m._forward_pre_hooks), len(m._forward_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
        if name
    ]


def test_nothing_is_to_be_seen_outside_of_calls() -> None:
    plain = made(Stack)
    before, keys, x = visible(plain), list(plain.state_dict()), batches(1)[0]
    precision = MixedPrecision(param=BF16, full_precision=nn.LayerNorm)
    schedule = fxshard.trace(plain, (x,), F=2, mixed_precision=precision)
    assert visible(plain) == before and plain(x).dtype == FP32
    copied = copy.deepcopy(plain)
    sharded = fxshard.compile(plain, F=2, mixed_precision=precision)
    assert visible(sharded) == before
    sharded(x).sum().backward()
    assert visible(sharded) == before and list(sharded.state_dict()) == keys
    assert sharded.schedule.skeleton() == schedule.skeleton()
    with sharded.unsharded() as whole:
        assert identical(whole(x).detach(), copied(x).detach())


def test_nothing_is_left_after_a_failed_call_or_trace() -> None:
    class Breaks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if x.sum().item() > 0:
                return x
            return self.head(x)

    model = made(Breaks)
    before, precision = visible(model), MixedPrecision(param=BF16, full_precision=nn.LayerNorm)
    with pytest.raises(fxshard.CaptureError):
        fxshard.trace(model, (batches(1)[0],), F=2, mixed_precision=precision)
    assert visible(model) == before
    fxshard.compile(model, F=2, mixed_precision=precision)
    with pytest.raises(fxshard.CaptureError):
        model(batches(1)[0])
    assert visible(model) == before


def test_hooks_and_forwards_of_the_users_own() -> None:
    """A pre-hook on a unit gets what was given, what it returns is cast; a forward set on a module is the one that is called,
    also one that is set later."""
    master = made(Stack)
    seen = []

    def before(module: nn.Module, args: Any) -> Any:
        seen.append(args[0].dtype)
        return (args[0].double() + 1,)

    sharded = fxshard.compile(copy.deepcopy(master), F=2, fullgraph=False, mixed_precision=MixedPrecision(param=BF16))
    sharded.layers[0].register_forward_pre_hook(before)
    plain = copy.deepcopy(master).bfloat16()
    x = batches(1)[0].bfloat16()

    def wanted(y: Tensor) -> Tensor:
        return plain.head(plain.norm(plain.layers[1](plain.layers[0]((y.double() + 1).bfloat16()))))

    assert identical(sharded(x).detach(), wanted(plain.embed(x)).detach()) and seen[0] == BF16
    own = sharded.layers[1].forward
    sharded.layers[1].forward = lambda x: own(x * 2)
    plain.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert identical(sharded(x).detach(), wanted(plain.embed(x)).detach())
    assert sharded.layers[1].__dict__["forward"].__name__ == "<lambda>"


def test_a_cast_is_the_units_and_of_the_users_line() -> None:
    schedule = fxshard.trace(made(MakesItself), (batches(1)[0],), F=2, mixed_precision=MixedPrecision(param=BF16))
    casts = casts_of(schedule)
    widened, narrowed = casts
    assert [n.meta["val"].dtype for n in casts] == [FP32, BF16]
    assert narrowed.meta["fxshard"].unit == "layers.1"
    assert user_line(narrowed) == user_line(widened) and user_line(narrowed).startswith("test_mixed_precision.py")


def test_a_model_that_is_gone_leaves_nothing() -> None:
    """The forwards that stand in hold modules, and Dynamo guards on them."""
    precision = MixedPrecision(param=BF16, output=FP32, full_precision=nn.LayerNorm)
    model = fxshard.compile(made(Stack), F=2, mixed_precision=precision)
    model(batches(1)[0]).sum().backward()
    left = [weakref.ref(m) for m in model.modules()]
    del model
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []


# -- buffers, evaluation


class BatchNormed(nn.Module):
    def __init__(self, affine: bool = True, track: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3, affine=affine, track_running_stats=track)
        self.again = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    ("param", "buffers", "affine", "track"),
    [
        (BF16, None, True, True),
        pytest.param(FP16, None, True, True, marks=pytest.mark.full),
        pytest.param(FP64, None, False, True, marks=pytest.mark.full),
        (BF16, BF16, True, True),
        pytest.param(BF16, None, False, True, marks=pytest.mark.full),
        pytest.param(BF16, None, True, False, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("units", [pytest.param("none", marks=pytest.mark.full), [nn.Conv2d, nn.BatchNorm2d]])
def test_batch_norm_keeps_fp32_statistics(param: Any, buffers: Any, affine: bool, track: bool, units: Any) -> None:
    """torch has no BatchNorm of low parameters and fp32 statistics: it is in full precision without being named, unless its
    buffers have the dtype of the parameters."""
    master = made(lambda: BatchNormed(affine, track))
    sharded = fxshard.compile(
        copy.deepcopy(master), F=2, units=units, mixed_precision=MixedPrecision(param, FP32, buffers=buffers)
    )
    plain = copy.deepcopy(master)
    plain.conv.to(param), plain.again.to(param)
    wide = track and buffers is None
    plain.norm.to(FP32 if wide else param)
    for seed in range(3):
        x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(seed))
        for training in (True, False):
            plain.train(training), sharded.train(training)
            middle = plain.conv(x.to(param))
            middle = plain.norm(middle.float()).to(param) if wide else plain.norm(middle)
            outputs = [plain.again(middle), sharded(x)]
            assert outputs[1].dtype == param and identical(*(o.detach() for o in outputs))
            for output in outputs:
                output.float().square().mean().backward()
            agree(plain, sharded)
            plain.zero_grad(), sharded.zero_grad()
        for (name, a), b in zip(plain.named_buffers(), sharded.buffers(), strict=True):
            assert identical(a, b), name


def test_buffers_are_cast_before_a_trace_too() -> None:
    """A trace is of the model that will run, and leaves its buffers, those on the meta device too."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift)

    precision = MixedPrecision(param=BF16, buffers=BF16)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(*(Shifted() for _ in range(2)))
            x = torch.ones(3, WIDTH)
        before = list(model.buffers())
        schedule = fxshard.trace(model, (x,), F=2, mixed_precision=precision)
        assert not casts_of(schedule)
        assert all(a is b for a, b in zip(before, model.buffers()))


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, *(pytest.param(m, marks=pytest.mark.full) for m in (torch.no_grad, torch.enable_grad))],
)
def test_evaluation_uses_the_same_dtypes_and_leaves_no_trace(mode: Callable[[], Any]) -> None:
    master = made(lambda: Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision=nn.LayerNorm)
    sharded, undisturbed = (fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision) for _ in range(2))
    plain = by_hand(master, BF16, ["layers.0.1", "layers.1.1", "norm"], ["layers.0", "layers.1"])
    for step, x in enumerate(batches(3)):
        before = {n: (v.dtype, full(v)) for n, v in (*sharded.named_parameters(), *sharded.named_buffers())}
        sharded.eval(), plain.eval()
        with mode():
            evaluated = sharded(x + 1)
            assert identical(evaluated.detach().clone(), plain(x + 1).detach().clone()) and evaluated.dtype == BF16
        sharded.train(), plain.train()
        for name, value in (*sharded.named_parameters(), *sharded.named_buffers()):
            assert value.dtype == before[name][0] and identical(full(value), before[name][1]), name
        outputs = [plain(x), sharded(x), undisturbed(x)]
        for output in outputs:
            assert identical(output.detach(), outputs[0].detach()), step
            output.float().square().mean().backward()
        for model in (sharded, undisturbed):
            agree(plain, model)
            model.zero_grad()
        plain.zero_grad()


# -- every dtype its own


def by_dtypes(master: nn.Module, xs: list[Tensor], W: int, precision: MixedPrecision) -> tuple[list[Tensor], nn.Module]:
    """What W ranks compute of micro-batches that lie W after each other in `xs`, in explicit casts: outputs, `.grad`."""
    plain = copy.deepcopy(master)
    dtype = next(master.parameters()).dtype
    param = precision.param or dtype
    reduce = precision.reduce or param
    accumulate = precision.accumulate or torch.promote_types(dtype, FP32)
    outputs: list[Tensor] = []
    sums: list[Tensor | None] = [None for _ in plain.parameters()]
    for start in range(0, len(xs), W):
        flats: list[list[Tensor]] = []
        for x in xs[start : start + W]:
            low = copy.deepcopy(master).to(param)
            outputs.append(low(x.to(param)))
            outputs[-1].to(FP64).square().sum().backward()
            flats.append([(p.grad.to(reduce) / W) for p in low.parameters()])
        for i, parts in enumerate(zip(*flats)):
            wide = torch.promote_types(reduce, FP32)
            total = sum((part.to(wide) for part in parts[1:]), parts[0].to(wide)).to(dtype)  # rounded once
            before = sums[i]
            sums[i] = total.to(accumulate) if before is None else before + total
    for p, total in zip(plain.parameters(), sums):
        p.grad = total.to(dtype)  # type: ignore[union-attr]
    return outputs, plain


COMBINATIONS: list[Any] = [
    (FP32, MixedPrecision(param=BF16)),
    (FP32, MixedPrecision(param=FP16, reduce=FP32)),
    (FP32, MixedPrecision(reduce=BF16)),
    (FP32, MixedPrecision(param=FP64, reduce=FP32)),
    (BF16, MixedPrecision(reduce=FP32, accumulate=FP32)),
    (BF16, MixedPrecision(accumulate=BF16)),
    (FP64, MixedPrecision(param=BF16, reduce=FP32)),
    *(
        pytest.param(dtype, precision, marks=pytest.mark.full)
        for dtype, precision in [
            (FP32, MixedPrecision()),
            (FP32, MixedPrecision(param=FP16)),
            (FP32, MixedPrecision(param=BF16, reduce=FP32)),
            (FP32, MixedPrecision(param=BF16, reduce=FP16)),
            (FP32, MixedPrecision(param=BF16, accumulate=FP64)),
            (FP32, MixedPrecision(param=BF16, reduce=FP32, output=FP64)),
            (BF16, MixedPrecision()),
            (BF16, MixedPrecision(param=FP32, reduce=FP32)),
            (FP16, MixedPrecision(reduce=FP32)),
            (FP64, MixedPrecision()),
            (FP64, MixedPrecision(param=FP32)),
            (FP64, MixedPrecision(param=FP16, reduce=FP64)),
        ]
    ),
]


def named(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    given = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return "-".join(f"{name}.{named(dtype)}" for name, dtype in given if isinstance(dtype, torch.dtype))


@pytest.mark.parametrize(("dtype", "precision"), COMBINATIONS, ids=named)
def test_combinations_of_dtypes(dtype: torch.dtype, precision: MixedPrecision) -> None:
    """Two ranks, two micro-batches, each reduced: the bits of casts written out."""
    master = made(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), dtype)
    xs = [x.to(dtype) for x in batches(4)]
    world = fxshard.VirtualWorld(2, contributors=2)
    sharded = fxshard.compile(copy.deepcopy(master), world=world, mixed_precision=precision)
    outputs = []
    for micro in range(2):
        for r in range(2):
            with world.rank(r):
                outputs.append(sharded(xs[2 * micro + r]))
                outputs[-1].to(FP64).square().sum().backward()
    wanted, plain = by_dtypes(master, xs, 2, precision)
    final = precision.output or precision.param or dtype
    assert all(identical(a.detach(), b.detach().to(final)) for a, b in zip(outputs, wanted, strict=True))
    assert all(p.dtype == dtype and p.grad.dtype == dtype for p in sharded.parameters())
    agree(plain, sharded)


class Quantised(nn.Module):
    """A frozen fp8 weight and its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == torch.float8_e4m3fn
        return x @ (self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("full_precision", [(), "0"])
def test_fp8_is_gathered_as_it_is(full_precision: Any) -> None:
    torch.manual_seed(0)
    master = nn.Sequential(Quantised(), Quantised())
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision=full_precision)
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision)
    x = batches(1)[0].bfloat16()
    for module in master:
        island = module is master[0] and full_precision
        scale = module.scale.detach().to(FP32 if island else BF16)
        x = (x.to(scale.dtype) @ (module.weight.to(scale.dtype) * scale)).to(BF16)
    assert identical(sharded(batches(1)[0]).detach(), x)
    assert sharded[1].weight.full_tensor().dtype == torch.float8_e4m3fn


# -- beside other things that choose dtypes


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_together_with_mixed_precision(inside: bool) -> None:
    """autocast chooses for the operators of its region, MixedPrecision for parameters and where units are entered. Backward
    runs without autocast, as in eager."""

    class Cast(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16, enabled=inside):
                return super().forward(x)

    master = made(Cast)
    precision = MixedPrecision(param=FP32, output=FP32)
    low = MixedPrecision(param=BF16, reduce=FP32, full_precision=nn.LayerNorm)
    x = batches(1)[0]
    for given, plain in (
        (precision, by_hand(master, FP32, entered=["layers.0", "layers.1"])),
        (low, by_hand(master, BF16, NORMS, ["layers.0", "layers.1"])),
    ):
        sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=given)
        with torch.autocast("cpu", BF16, enabled=not inside):
            outputs = [plain(x), sharded(x)]
        assert identical(*(o.detach().float() for o in outputs))
        for output in outputs:
            output.float().square().sum().backward()
        agree(plain, sharded)


class Reports(nn.Module):
    """A Hugging Face model and the dtype it says it has, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=11, attn_implementation="eager", **sizes))

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids).logits, self.model.dtype, self.model.model.norm.weight.dtype


def test_hugging_face_models_say_the_dtype_they_compute_in() -> None:
    """`model.dtype` is bf16 inside forward, of islands fp32, and that of the masters outside."""
    master = made(Reports)
    precision = MixedPrecision(param=BF16, reduce=FP32, full_precision=("*norm", "*rotary_emb"))
    sharded = fxshard.compile(copy.deepcopy(master), F=2, mixed_precision=precision)
    norms = [name for name, m in master.named_modules() if name.endswith("norm")]
    plain = by_hand(master, BF16, norms, ["model.model.layers.0", "model.model.layers.1"])
    ids = torch.arange(10).view(2, 5)
    outputs = [plain(ids), sharded(ids)]
    assert outputs[1][1:] == outputs[0][1:] == (BF16, FP32) and sharded.model.dtype == FP32
    assert outputs[0][0].dtype == BF16 and identical(*(o[0].detach() for o in outputs))
    for logits, *_ in outputs:
        logits.float().square().mean().backward()
    agree(plain, sharded)


@pytest.mark.parametrize("F", [1, 2, 4])
def test_a_mean_is_divided_before_it_could_overflow(F: int) -> None:
    """Four ranks' gradients of 30000: their sum, and of any three, is beyond fp16."""
    world = fxshard.VirtualWorld(F, contributors=4)
    model = fxshard.compile(nn.Linear(8, 1, bias=False), world=world, mixed_precision=MixedPrecision(reduce=FP16))
    for rank in range(4):
        with world.rank(rank):
            model(torch.full((1, 8), 30000.0)).sum().backward()
    assert full(model.weight.grad).tolist() == [[30000.0] * 8]
