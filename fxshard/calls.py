"""What runs in place of a compiled model's forward and of its entry points."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxshard.capture import torch_private
from fxshard.capture.backend import CaptureBackend
from fxshard.capture.failures import capture_error
from fxshard.errors import CaptureError
from fxshard.module import STATE, sharded_class
from fxshard.options import Options, did_you_mean
from fxshard.parameter import ShardedParameter
from fxshard.precision import cast
from fxshard.state import State


def install(model: nn.Module, state: State) -> None:
    """Swap the class for one with the mixin, whose forward runs the captured step. Hooks stay outside of it."""
    state.handles = _compute_handles(model, state)
    entries = [find_entry(model, name) for name in state.options.entry_points]
    cast_to = input_dtype(state.options)
    state.run = _runner(state, state.user_forward, capturing(model.forward, state), cast_to)
    state.own_forward = model.__dict__.pop("forward", None)
    model.__class__ = sharded_class(type(model))
    model.__dict__[STATE] = state
    for owner, name in entries:
        owner.__dict__[name] = _entry_point(owner, name, state)


def find_entry(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module and the name of its method that an entry point is: `encode`, or `head`, the forward of a submodule.

    Raises ValueError where there is neither.
    """
    above, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(above)
    except AttributeError:
        owner = None
    if owner is not None and (child := owner._modules.get(name)) is not None:
        return child, "forward"
    if owner is model and name == "forward":
        raise ValueError("entry_points: forward is always one; name other methods, and submodules")
    if owner is None or not inspect.isroutine(getattr(owner, name, None)):
        there = [n for n, _ in model.named_children()]
        methods = {} if type(model).__module__.startswith("torch.") else vars(type(model))  # not those of containers
        there += [n for n, f in methods.items() if inspect.isfunction(f) and not n.startswith("_")]
        hint = did_you_mean(path, there)
        raise ValueError(
            f"entry_points: {type(model).__name__} has no method and no submodule '{path}' to be called by itself.{hint} "
            f"There are {', '.join(n for n in there if n != 'forward')}"
        )
    return owner, name


def _entry_point(owner: nn.Module, name: str, state: State) -> Callable[..., Any]:
    """Stands for a method that is also called from outside forward: captured there, traced through inside."""
    function = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)  # through the casts that are there during a call

    in_full_precision = any(owner is module for chosen in state.full_precision for module in chosen.modules())
    cast_to = None if in_full_precision else input_dtype(state.options)
    run = _runner(state, lambda: function, capturing(called, state), cast_to)

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return run(*args, **kwargs)

    return entry


def capturing(user_forward: Callable[..., Any], state: State) -> Callable[..., Any]:
    """The model's own forward, or another entry point, under torch.compile.

    A code object of its own keeps Dynamo's cache, and the limit on captures, per model and not per class.
    """
    output = state.options.mixed_precision.output

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = user_forward(*args, **kwargs)
        return outputs if output is None else cast(outputs, output)

    return torch.compile(
        torch_private.own_code(forward),
        backend=CaptureBackend(state),
        fullgraph=state.options.fullgraph,
        dynamic=state.options.dynamic,
    )


def _compute_handles(model: nn.Module, state: State) -> list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]]:
    """Where parameters are computed with in another dtype or on another device: what stands in their place during a call.

    Code in forward that asks for a parameter's dtype then sees what it is computed with, as under FSDP.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for storage in state.storages.values():
        flat = storage.flat
        if flat.param_dtype == flat.dtype and storage.shard.device.type == storage.world.device.type:
            continue
        for spec in flat.parameters:
            master: Any = storage.parameters[spec.fqn]
            handle = ShardedParameter(
                master.local,
                spec.shape,
                spec.stride,
                spec.fqn,
                master.binding,
                dtype=flat.param_dtype,
                device=storage.world.device,
            )
            made[master] = nn.Parameter(handle, requires_grad=master.requires_grad)
    return [
        (module._parameters, name, p, made[p])
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and p in made
    ]


def _runner(
    state: State,
    plainly: Callable[[], Callable[..., Any]],
    captured: Callable[..., Any],
    cast_to: torch.dtype | None,
) -> Callable[..., Any]:
    """What `model(...)` runs: compute dtypes in place, the captured step, errors with the user's line.

    `plainly()` is what it stands for; `cast_to` what floating inputs are cast to.
    """
    handles = state.handles
    reference = state.reference

    def run(*args: Any, **kwargs: Any) -> Any:
        if state.plain:
            return plainly()(*args, **kwargs)
        if torch_private.any_dispatch_mode():
            raise RuntimeError(
                f"a TorchDispatchMode is active ({', '.join(torch_private.dispatch_modes())}): torch.compile captures nothing "
                "under one, and a sharded model runs what is captured. Call the model outside of it, or in "
                "`with model.unsharded():`"
            )
        if cast_to is not None:
            args, kwargs = cast((args, kwargs), cast_to)
        outermost, state.in_call = not state.in_call, True
        failure: Exception | None = None
        outputs = None
        try:
            if outermost:
                for table, name, master, handle in handles:
                    if table.get(name) is master:  # what was put in its place since is refused where it is read
                        if handle.requires_grad != master.requires_grad:
                            handle.requires_grad_(master.requires_grad)
                        table[name] = handle
                for entrance in state.entrances:
                    entrance.open()
            with torch_private.while_capturing():
                outputs = captured(*args, **kwargs)
        except torch_private.CAPTURE_FAILURES as error:
            failure = _wrong_call(plainly(), args, kwargs) or capture_error(error, reference(), sharded=True)
            failure.__cause__ = error
        finally:
            if outermost:
                state.in_call = False
                for entrance in state.entrances:
                    entrance.close()
                for table, name, master, handle in handles:
                    if table.get(name) is handle:
                        table[name] = master
        if failure is not None:
            state.tell(failure)
            raise failure
        if type(outputs) is not torch.Tensor:
            for leaf in torch_private.pytree.tree_leaves(outputs):
                if isinstance(leaf, ShardedParameter):
                    raise CaptureError(
                        f"forward returns parameter '{leaf.fqn}'; only its piece is here. "
                        "Return a clone, or use parameter.full_tensor() outside forward"
                    )
        return outputs

    return run


def _wrong_call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError | None:
    """What Python would have said about arguments that do not fit; Dynamo says it in words of its own."""
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"forward of the model: {error}")
    return None


def input_dtype(options: Options) -> torch.dtype | None:
    """What floating inputs of the model are cast to."""
    return options.mixed_precision.param if options.mixed_precision.cast_forward_inputs else None
