"""Which parameters are gathered together: every way to say it, ties, nesting, and errors that help."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.options import MixedPrecision
from fxshard.units import flat_parameters, partition, unit_modules
from tests.capture.compare import WIDTH, Block, Chain, Framed, batches, check


def units_of(model: nn.Module, units="auto") -> dict[str, list[str]]:
    """Unit names to parameter names, the root's parts together."""
    result: dict[str, list[str]] = {}
    for unit in partition(model, units):
        result.setdefault(unit.name, []).extend(fqn for fqn, _ in unit.parameters)
    return result


def flats_of(model: nn.Module, units="auto") -> dict[str, fxshard.FlatParameter]:
    return flat_parameters(model, partition(model, units), 2, MixedPrecision())


def linear(prefix: str) -> list[str]:
    return [f"{prefix}.weight", f"{prefix}.bias"]


def test_auto_takes_the_elements_of_repeated_blocks():
    assert units_of(Framed()) == {
        "(root)": linear("embed") + linear("head"),
        **{f"layers.{i}": linear(f"layers.{i}.linear") for i in range(3)},
    }


def test_auto_leaves_lists_of_different_classes_and_without_parameters_alone():
    mixed = nn.ModuleDict({"a": nn.ModuleList([Block(), nn.Linear(2, 2)]), "b": nn.Sequential(nn.ReLU(), nn.ReLU())})
    assert unit_modules(mixed, "auto") == []
    assert unit_modules(nn.Sequential(Block()), "auto") == []  # one block repeats nothing


def test_the_outermost_of_nested_repeated_lists_wins():
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage() for _ in range(3))

    assert unit_modules(Stages(), "auto") == ["stages.0", "stages.1", "stages.2"]
    assert unit_modules(Stages(), Block) == [f"stages.{s}.blocks.{b}" for s in range(3) for b in range(2)]
    assert unit_modules(Stages(), ["stages.1.blocks.0", "stages.1", Block]) == [
        "stages.0.blocks.0", "stages.0.blocks.1", "stages.1", "stages.2.blocks.0", "stages.2.blocks.1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("none", []),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.1", ["layers.1"]),
        ("*.linear", ["layers.0.linear", "layers.1.linear", "layers.2.linear"]),
        (Block, ["layers.0", "layers.1", "layers.2"]),
        (nn.Linear, ["embed", "layers.0.linear", "layers.1.linear", "layers.2.linear", "head"]),
        (["embed", "layers.[12]"], ["embed", "layers.1", "layers.2"]),
        ([Block, "head"], ["layers.0", "layers.1", "layers.2", "head"]),
        (("head", "embed"), ["embed", "head"]),
        (lambda name, module: name.endswith("1"), ["layers.1"]),
        (lambda name, module: isinstance(module, Block), ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_every_way_to_name_units(units, expected):
    assert unit_modules(Framed(), units) == expected


def test_every_parameter_is_in_exactly_one_unit():
    model = Framed()
    for units in ("auto", "none", Block, nn.Linear, "layers.1", ["embed"], lambda n, m: "2" in n):
        named = [fqn for fqns in units_of(model, units).values() for fqn in fqns]
        assert sorted(named) == sorted(n for n, _ in model.named_parameters())


class TiedAcross(Framed):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight = self.layers[0].linear.weight


def test_a_tie_across_units_goes_to_the_root_once():
    units = units_of(TiedAcross())
    assert "layers.0.linear.weight" in units["(root)"]
    assert units["layers.0"] == ["layers.0.linear.bias"] and units["layers.2"] == ["layers.2.linear.bias"]
    flats = flats_of(TiedAcross())
    specs = {p.fqn: p.aliases for flat in flats.values() for p in flat.parameters}
    assert specs["layers.0.linear.weight"] == ("layers.2.linear.weight",) and "layers.2.linear.weight" not in specs
    check(TiedAcross)


def test_a_tie_inside_a_unit_stays_there():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = check(lambda: nn.Sequential(*(Tied() for _ in range(3))))
    assert model.schedule.flats["1"].fqns == ("1.a.weight", "1.a.bias", "1.b.bias")
    assert model[1].a.weight is model[1].b.weight


def test_a_module_in_two_places_is_tied_and_goes_to_the_root_once():
    class Shared(Framed):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = self.layers[0]

    model = check(Shared)
    flats = model.schedule.flats
    assert [(flat.name, len(flat.fqns)) for flat in flats.values()] == [
        ("(root).0", 4),
        ("layers.1", 2),
        ("(root).1", 2),
    ]
    assert len(model.schedule.backward.reduce_scatters) == 3


def test_the_root_is_split_where_units_lie_between():
    flats = flats_of(Framed())
    assert list(flats) == ["(root).0", "layers.0", "layers.1", "layers.2", "(root).1"]
    assert [f.is_root for f in flats.values()] == [True, False, False, False, True]
    assert list(flats_of(Framed(), "none")) == ["(root)"]


def test_names_tell_dtypes_and_frozen_parts_apart():
    model = Framed()
    model.layers[0].linear.weight.requires_grad_(False)
    model.layers[1].linear.weight.data = model.layers[1].linear.weight.data.bfloat16()
    names = list(flats_of(model))
    assert names == [
        "(root).0", "layers.0[frozen]", "layers.0", "layers.1[bfloat16]", "layers.1[float32]", "layers.2", "(root).1"
    ]  # fmt: skip


class OutOfOrder(nn.Module):
    """Registered c, b, a; used a, b, c."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = (nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a * self.b * self.c


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1, [("a",), ("b",), ("c",), ("unused",)]),
        (64, [("a", "b"), ("c", "unused")]),
        (65, [("a", "b", "c"), ("unused",)]),
        (10**6, [("a", "b", "c", "unused")]),
    ],
)
def test_bytes_of_first_use(num_bytes, expected):
    schedule = fxshard.trace(OutOfOrder(), (batches(1)[0],), F=2, units=fxshard.BytesOfFirstUse(num_bytes))
    assert [flat.fqns for flat in schedule.flats.values()] == expected


def test_units_by_bytes_train_as_the_plain_model():
    x = batches(1)[0]
    check(Framed, example_inputs=(x,), units=fxshard.BytesOfFirstUse(300))
    check(OutOfOrder, example_inputs=(x,), units=fxshard.BytesOfFirstUse(64))


def test_units_by_bytes_need_example_inputs():
    with pytest.raises(ValueError, match="example_inputs"):
        fxshard.compile(Framed(), F=2, units=fxshard.BytesOfFirstUse(100))


@pytest.mark.parametrize("num_bytes", [0, -5, "10", 1.5])
def test_a_wrong_number_of_bytes_is_refused(num_bytes):
    with pytest.raises((ValueError, TypeError), match=r"BytesOfFirstUse|num_bytes"):
        fxshard.compile(Framed(), F=2, units=fxshard.BytesOfFirstUse(num_bytes), example_inputs=(batches(1)[0],))


@pytest.mark.parametrize(
    ("units", "error", "text"),
    [
        ("layer.1", ValueError, r"'layer\.1' matches no module.*Close names:.*layers\.1"),
        ("atuo", ValueError, "'auto' and 'none'"),
        (["embed", "haed"], ValueError, r"'haed' matches no module.*head"),
        (nn.Conv2d, ValueError, r"Conv2d.*Classes here:.*Block.*Linear"),
        ([nn.Conv2d], ValueError, "Conv2d"),
        ([3], TypeError, "3"),
        (3, TypeError, "BytesOfFirstUse"),
        (None, TypeError, "not understood"),
        (lambda module: True, TypeError, r"called with \(name, module\): too many positional"),
        (lambda name, module: name == "haed", ValueError, r"chose none of the \d+ modules"),
        (nn.Dropout, ValueError, "no parameter belongs to drop alone"),
        ([], ValueError, r"units=\[\]: it names no module"),
    ],
)
def test_errors_list_what_there_is(units, error, text):
    model = Framed()
    model.drop = nn.Dropout(0.0)  # a module without parameters
    with pytest.raises(error, match=text):
        fxshard.compile(model, F=2, units=units)
    assert type(model) is Framed and not fxshard.is_compiled(model)


def test_one_unit_for_everything_is_warned_about_unless_asked_for():
    with pytest.warns(UserWarning, match=r"'auto' found no repeated blocks in Linear") as caught:
        fxshard.compile(nn.Linear(2, 2), F=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxshard.compile(nn.Linear(2, 2), F=2, units="none")


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        fxshard.compile(nn.ReLU(), F=2)


def test_units_in_chain():
    """No root at all is fine."""
    assert "(root)" not in units_of(Chain())
