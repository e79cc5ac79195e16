"""Every option is validated before anything is touched, and a wrong one says what is allowed."""

import dataclasses

import pytest
import torch
from torch import nn

import fxshard
from fxshard.options import MixedPrecision, Options
from tests.capture.compare import Framed, batches


@pytest.mark.parametrize("entry", ["compile", "trace"])
def test_an_unknown_option_lists_the_allowed_and_suggests(entry):
    model = Framed()
    call = {
        "compile": lambda **o: fxshard.compile(model, F=2, **o),
        "trace": lambda **o: fxshard.trace(model, (batches(1)[0],), F=2, **o),
    }[entry]
    with pytest.raises(TypeError) as caught:
        call(no_shrad=True, rate_limt=2)
    message = str(caught.value)
    assert "'no_shrad'" in message and "'rate_limt'" in message and "'rate_limit'?" in message
    for field in dataclasses.fields(Options):
        assert field.name in message


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"backward_prefetch": -1}, ValueError, r"backward_prefetch=-1"),
        ({"backward_prefetch": True}, ValueError, r"backward_prefetch=True"),
        ({"forward_prefetch": 1.5}, ValueError, r"forward_prefetch=1\.5"),
        ({"forward_prefetch": None}, ValueError, r"forward_prefetch=None"),
        ({"rate_limit": 0}, ValueError, r"rate_limit=0"),
        ({"rate_limit": "two"}, ValueError, r"rate_limit='two'"),
        ({"rate_limit_bytes": -3}, ValueError, r"rate_limit_bytes=-3"),
        ({"keep_root_resident": 1}, TypeError, r"keep_root_resident=1: True or False"),
        ({"reshard_after_forward": "no"}, TypeError, r"reshard_after_forward='no'"),
        ({"debug": None}, TypeError, r"debug=None"),
        ({"fullgraph": 0}, TypeError, r"fullgraph=0"),
        ({"sync_parameters": "yes"}, TypeError, r"sync_parameters='yes'"),
        ({"compute": "inductr"}, ValueError, r"compute='inductr': allowed are 'eager'"),
        ({"compute": "egaer"}, ValueError, r"Did you mean 'eager'"),
        ({"compute": ["eager"]}, ValueError, r"compute=\['eager'\]"),
        (
            {"mixed_precision": torch.bfloat16},
            TypeError,
            r"mixed_precision=torch\.bfloat16.*MixedPrecision\(param=, reduce=, ",
        ),
        ({"passes": 3}, TypeError, r"passes=3"),
        ({"passes": ["backward-prefetch"]}, TypeError, r"passes holds 'backward-prefetch'"),
        ({"passes": lambda passes: [*passes, None]}, TypeError, r"passes holds None"),
        ({"dynamic": "maybe"}, ValueError, r"dynamic='maybe'"),
        ({"dynamic": 1}, ValueError, r"dynamic=1"),
        ({"timeout_s": -1}, ValueError, r"timeout_s=-1"),
        ({"timeout_s": float("inf")}, ValueError, r"timeout_s=inf.*at most 1e\+09"),
        ({"timeout_s": float("nan")}, ValueError, r"timeout_s=nan"),
        ({"timeout_s": "long"}, (TypeError, ValueError), r"timeout_s='long'"),
    ],
)
def test_wrong_values(options, error, text):
    model = Framed()
    before = dict(model.named_parameters())
    with pytest.raises(error, match=text):
        fxshard.compile(model, F=2, **options)
    assert type(model) is Framed and not fxshard.is_compiled(model)
    assert all(p is before[n] and type(p) is nn.Parameter for n, p in model.named_parameters())
    model(batches(1)[0]).sum().backward()


@pytest.mark.parametrize("field", ["param", "reduce", "buffers"])
@pytest.mark.parametrize("value", [torch.int32, torch.uint8, "bfloat16", 16])
def test_mixed_precision_takes_floating_dtypes(field, value):
    with pytest.raises(ValueError, match=rf"MixedPrecision\({field}=.*floating dtype.*torch\.bfloat16"):
        MixedPrecision(**{field: value})


def test_mixed_precision_none_is_the_default():
    assert Options.from_keywords({"mixed_precision": None}).mixed_precision == MixedPrecision()


@pytest.mark.parametrize(
    ("F", "W", "error", "text"),
    [
        (3, 4, ValueError, r"F=3 does not divide the world size W=4; allowed are 1, 2, 4"),
        (0, 4, ValueError, r"F=0.*W=4; allowed are 1, 2, 4"),
        (-2, 4, ValueError, r"F=-2.*allowed are 1, 2, 4"),
        (8, 4, ValueError, r"F=8 is larger than the world size W=4; allowed are 1, 2, 4"),
        ("2", 4, TypeError, r"F='2'"),
        (2.0, 4, TypeError, r"F=2\.0"),
        (True, 4, TypeError, r"F=True"),
        (None, 4, TypeError, r"F=None"),
        (1, 0, ValueError, r"W=0"),
        (2, "4", TypeError, r"W='4'"),
    ],
)
def test_wrong_factors_in_trace(F, W, error, text):
    model = Framed()
    with pytest.raises(error, match=text):
        fxshard.trace(model, (batches(1)[0],), F=F, W=W)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize(
    ("F", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.5, TypeError), ("2", TypeError)]
)
def test_wrong_factors_in_compile(F, error):
    model = Framed()
    with pytest.raises(error, match=rf"F={F!r}"):
        fxshard.compile(model, F=F)
    assert type(model) is Framed and all(type(p) is nn.Parameter for p in model.parameters())


def test_a_rank_without_a_process_group_is_told(monkeypatch: pytest.MonkeyPatch):
    """Each would train alone, in silence."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for F in (None, 4):
        model = Framed()
        with pytest.raises(RuntimeError, match=r"WORLD_SIZE=4 says .* call torch.distributed.init_process_group first"):
            fxshard.compile(model, F=F)
        assert type(model) is Framed
    assert fxshard.is_compiled(fxshard.compile(Framed(), world=fxshard.VirtualWorld(4)))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fxshard.is_compiled(fxshard.compile(Framed(), F=4))


def test_a_virtual_world_names_its_own_factor():
    with pytest.raises(ValueError, match=r"F=3 differs from the given world's F=2"):
        fxshard.compile(Framed(), F=3, world=fxshard.VirtualWorld(2))
    with pytest.raises(TypeError, match=r"world='gloo': an fxshard.VirtualWorld was expected"):
        fxshard.compile(Framed(), world="gloo")
    world = fxshard.VirtualWorld(2)
    model = fxshard.compile(Framed(), world=world)
    with pytest.raises(ValueError, match="this VirtualWorld has a model already"):
        fxshard.compile(Framed(), world=world)
    assert fxshard.is_compiled(model)
    with pytest.raises(ValueError, match="the model is on cpu and this VirtualWorld on meta"):
        fxshard.compile(Framed(), world=fxshard.VirtualWorld(2, device="meta"))
    with pytest.raises(ValueError, match="world and mesh both say"):
        fxshard.compile(Framed(), world=fxshard.VirtualWorld(2), mesh=object())
    with pytest.raises(ValueError, match=r"F=3 does not divide the world size W=4"):
        fxshard.VirtualWorld(3, contributors=4)


def test_compile_twice():
    model = fxshard.compile(Framed(), F=2)
    kind, before = type(model), list(model.parameters())
    with pytest.raises(ValueError, match="Framed is already compiled"):
        fxshard.compile(model, F=2)
    assert type(model) is kind and all(a is b for a, b in zip(before, model.parameters()))
    model(batches(1)[0]).sum().backward()


def test_a_part_of_a_compiled_model_is_refused():
    model = fxshard.compile(Framed(), F=2)
    with pytest.raises((ValueError, TypeError), match=r"already|sharded"):
        fxshard.compile(model.layers[0], F=2)
    with pytest.raises((ValueError, TypeError), match=r"already|sharded"):
        fxshard.compile(nn.Sequential(model, nn.Linear(5, 1)), F=2)


@pytest.mark.parametrize("thing", [torch.relu, nn.Linear, {"a": 1}, None, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(TypeError, match=r"fxshard\.compile takes an nn\.Module, not"):
        fxshard.compile(thing, F=2)
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not"):
        fxshard.trace(thing, (batches(1)[0],), F=2)


def test_a_callable_that_returns_no_passes():
    with pytest.raises(TypeError, match=r"passes=.* returned None: a list of passes was expected"):
        fxshard.trace(Framed(), (batches(1)[0],), F=2, passes=lambda passes: None)


def test_an_init_that_is_no_function():
    with pytest.raises(TypeError, match="init=3: a function of a module"):
        fxshard.compile(Framed(), F=2, init=3)


def test_a_pass_class_in_place_of_a_pass():
    with pytest.raises(TypeError, match="a list of passes"):
        fxshard.trace(Framed(), (batches(1)[0],), F=2, passes=fxshard.passes.InsertFrees)


def test_trainable_complex_parameters_are_refused_by_name():
    model = Framed()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'phase' is trainable and of torch\.complex64"):
        fxshard.compile(model, F=2)
    assert type(model) is Framed


def test_buffers_on_the_meta_device_need_init():
    model = Framed()
    model.register_buffer("mean", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"meta device \(mean\).*init"):
        fxshard.compile(model, F=2)


def test_init_makes_a_meta_model_equal_to_a_plain_one():
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    with torch.device("meta"):
        model = Framed()
    plain = Framed()
    for module in plain.modules():
        init(module)
    fxshard.compile(model, F=2, init=init)
    assert torch.equal(model(batches(1)[0]), plain(batches(1)[0]))


def test_wrong_example_inputs_leave_the_model_alone():
    model = Framed()
    with pytest.raises((fxshard.CaptureError, TypeError)):
        fxshard.compile(model, F=2, example_inputs=(batches(1)[0], 3, 4))
    assert type(model) is Framed and all(type(p) is nn.Parameter for p in model.parameters())
    model(batches(1)[0]).sum().backward()


def test_trace_leaves_the_model_alone():
    model = Framed()
    before = dict(model.named_parameters())
    fxshard.trace(model, (batches(1)[0],), F=2, W=4)
    assert all(p is before[n] for n, p in model.named_parameters()) and not fxshard.is_compiled(model)
    model(batches(1)[0]).sum().backward()
    fxshard.compile(model, F=2)(batches(1)[0]).sum().backward()


def test_example_inputs_as_tuple_dict_or_tensor():
    x = batches(1)[0]
    texts = {str(fxshard.trace(Framed(), example, F=2)) for example in ((x,), {"x": x}, x)}
    assert len(texts) == 1
