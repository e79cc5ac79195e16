"""`fxshard.compile` and `fxshard.trace`: from a model to a sharded model, or to its schedule without devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard.passes as passes
from fxshard import deferred
from fxshard.calls import capturing, find_entry, input_dtype, install
from fxshard.capture import torch_private
from fxshard.capture.failures import capture_error
from fxshard.capture.harmless import prepare
from fxshard.checkpoint import model as checkpoint_model
from fxshard.checkpoint import optimizer as checkpoint_optimizer
from fxshard.errors import CaptureError
from fxshard.ir import FlatParameter, Schedule
from fxshard.module import is_compiled
from fxshard.options import InitFunction, Options, check_factor, listed
from fxshard.parameter import Generation, ShardedParameter
from fxshard.precision import cast, full_precision_modules, full_precision_parameters
from fxshard.runtime import ControlPlane, Executor, GlooWorld, NcclWorld, VirtualWorld, World
from fxshard.sharding import cast_buffers, shard, uninitialisable
from fxshard.state import Place, State
from fxshard.units import BytesOfFirstUse, Unit, flat_parameters, partition, units_by_bytes


def compile(
    model: nn.Module,
    F: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    world: VirtualWorld | None = None,
    example_inputs: Any = None,
    init: InitFunction | None = None,
    **options: Any,
) -> Any:
    """Shard `model` in place and return it: the same object, its forward captured, its communication a schedule.

    F: ranks that share one copy of the parameters. F = 1 replicates (DDP), F = W shards fully (ZeRO-3), between is
    hybrid; it must divide W. Default: W. Without a process group a virtual world of F shards (default 1) runs in this
    process.
    mesh: a 2-D DeviceMesh (replicate, shard) to take the groups from; F is then its second size.
    world: a `VirtualWorld(F, contributors=W)`, which runs W ranks' batches in turn; it settles F and takes no mesh.
    example_inputs: arguments of forward: a tuple, list or dict, or the only one. The forward is then captured before
    anything is sharded, and what cannot be captured leaves the model as it was.
    init: for a model (or parts of one) on the meta device: called with each module whose own parameters or buffers
    were made empty on the device, unit by unit; no rank ever holds the whole model. Without it a model made by
    `fxshard.deferred_init` gets the values its constructor gives, any other module's own `reset_parameters` and the
    `_init_weights` of the model around it are called, on the same terms.
    Other options: see `fxshard.Options`.

    Parameters keep their identity, so an optimizer made before holds the right ones; state that it has is cut into pieces at
    its next step. A gradient that is there is dropped.

    Raises TypeError or ValueError for wrong options, CaptureError for a forward that cannot be captured, AgreementError
    when ranks disagree. Source: FSDP paper; torch.distributed.fsdp.fully_shard.
    """
    ranks = ControlPlane() if world is None and dist.is_available() and dist.is_initialized() else None
    try:
        settings = Options.from_keywords(options)
        _check_model(model, "fxshard.compile")
        for path in settings.entry_points:
            find_entry(model, path)
        _check_placement(model, init)
        prepare(model)
        device = _device(model)
        F, W = _factor_and_size(F, mesh, world)
        units = _units(model, settings, example_inputs, device)
        full_precision = full_precision_modules(model, settings.mixed_precision)
        flats = _flats(model, units, F, settings, full_precision)
        passes.check_complete(passes.pipeline(settings), settings)
        if ranks is None:
            world = world or VirtualWorld(F, device=device)
            world.check_free(device)
            place = Place(W, F, device, held_shards=world.held, num_batches=world.data_ranks)
        else:
            place = Place(W, F, device, direct_exchange=_backend(device) == "gloo", ranks=ranks)
        state = State(model, flats, full_precision, place, settings)
        if example_inputs is not None:
            state.traced = _trace(State(model, flats, full_precision, place, settings), example_inputs)
    except Exception as error:
        if ranks is not None:
            ranks.fail("model", error)
        raise
    if ranks is not None:
        text = _fingerprint(state, mesh, init)
        ranks.agree(
            "model", text, settings.timeout_s, "ranks compile different models or options, and nothing was sharded"
        )
    home: World = world or (GlooWorld(F, mesh) if _backend(device) == "gloo" else NcclWorld(F, device, mesh))
    generation = Generation()
    state.storages = shard(model, flats, home, settings, init, generation)
    cast_buffers(model, settings.mixed_precision.buffers, state.full_precision)
    if world is not None:
        world.attach(model)
    state.executor = Executor(
        state.storages, home, generation, debug=settings.debug, keep_memory=settings.keep_memory,
        derive=weakref.WeakMethod(state.derive),
    )  # fmt: skip
    install(model, state)
    checkpoint_model.install(model, state.storages, lambda: state.plain)
    checkpoint_optimizer.watch()
    return model


def trace(model: nn.Module, example_inputs: Any, F: int, W: int | None = None, **options: Any) -> Schedule:
    """The schedule of one training step, without devices, memory or a process group. The model is left as it was.

    `model` may be on the meta device: its parameters take no memory, its buffers and inputs there count as zeros on the
    CPU. example_inputs are arguments of forward (a tuple, list or dict, or the only one), whose values are not read. W:
    world size, default F. Options as for `compile`; those about running (`debug`, `sync_parameters`, `timeout_s`,
    `entry_points`) change nothing here. The memory plan is of a world whose collectives bring their own staging memory
    (NCCL); over gloo the arena also holds what is received.

    Raises TypeError or ValueError for wrong options, CaptureError for a forward that cannot be captured, ScheduleError where no
    order keeps the rate limit, PassError where a pass fails.
    """
    settings = Options.from_keywords(options, "fxshard.trace")
    _check_model(model, "fxshard.trace")
    W = F if W is None else W
    check_factor(F, W)
    for path in settings.entry_points:
        find_entry(model, path)
    prepare(model)
    device = _placed(model) or torch.device("cpu")
    units = _units(model, settings, example_inputs, device)
    full_precision = full_precision_modules(model, settings.mixed_precision)
    flats = _flats(model, units, F, settings, full_precision)
    return _trace(State(model, flats, full_precision, Place(W, F, device), settings), example_inputs)


# -- steps of compile


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function} takes an nn.Module, not {given}")
    if is_compiled(model):
        raise ValueError(f"this {type(model).__name__} is already compiled by fxshard")
    sharded = [name for name, p in model.named_parameters() if isinstance(p, ShardedParameter)]
    if sharded:
        raise ValueError(
            f"parameter '{sharded[0]}' is already sharded by fxshard.compile of another module; compile the outermost one"
        )


def _check_placement(model: nn.Module, init: InitFunction | None) -> None:
    if init is not None and not callable(init):
        raise TypeError(f"init={init!r}: a function of a module was expected")
    if init is None and (bare := uninitialisable(model)):
        raise ValueError(
            f"what is on the meta device ({listed(bare)}) needs an init function, compile(model, init=...), or a module that "
            "has `reset_parameters` or `_init_weights`, or a model made by fxshard.deferred_init"
        )
    kinds = {p.device.type for _, p in model.named_parameters()} - {"meta"}
    if len(kinds) > 1:
        raise ValueError(f"parameters are on several devices ({', '.join(sorted(kinds))}); move the model to one")
    hooked = [n for n, p in model.named_parameters() if torch_private.gradient_hooks(p)[0]]
    if hooked:
        raise ValueError(
            f"parameters have tensor hooks ({', '.join(hooked[:4])}): sharded gradients do not pass through autograd. "
            "Remove them; register_post_accumulate_grad_hook sees the reduced gradient"
        )
    if shared := _shared_memory(model):
        raise ValueError(
            f"'{shared[0]}' and '{shared[1]}' are different tensors in the same memory: a shard is memory of its own, and they "
            "would part with the first step. Tie them as one parameter (b.weight = a.weight), or clone one"
        )


def _shared_memory(model: nn.Module) -> tuple[str, str] | None:
    """Names of a parameter and of another parameter, or of a buffer beside one that trains, with elements in common."""
    spans: dict[int, list[tuple[int, int, bool, bool, str]]] = {}
    parameters = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        span = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.layout is torch.strided else 0
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer) or deferred.has_no_memory(t) or not 0 < span == t.numel():
            continue  # of tensors with holes the spans say nothing
        start = t.data_ptr()
        found = (start, start + span * t.itemsize, name not in parameters, parameters.get(name, False), name)
        spans.setdefault(t.untyped_storage().data_ptr(), []).append(found)
    for held in spans.values():
        held.sort()
        for i, (_, end, is_buffer, trains, name) in enumerate(held):
            for start, _, other_is_buffer, other_trains, other in held[i + 1 :]:
                if start >= end:
                    break
                if not (is_buffer or other_is_buffer) or trains or other_trains:
                    return name, other
    return None


def _placed(model: nn.Module) -> torch.device | None:
    """Where the model's parameters are, or None if all are on meta."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), None)


def _device(model: nn.Module) -> torch.device:
    """Where the model is, or is to be made."""
    if (placed := _placed(model)) is not None:
        return placed
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _backend(device: torch.device) -> str:
    """The backend for a model on this device. Raises ValueError where the process group has another, or none is known."""
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
    if wanted is None:
        raise ValueError(f"the model is on {device}; ranks share models on CPUs, over gloo, and on CUDA, over NCCL")
    have = dist.get_backend()
    if have in ("gloo", "nccl") and have != wanted:
        raise ValueError(
            f"the model is on {device} and the process group is of backend {have}; "
            f"move the model, or call init_process_group('{wanted}')"
        )
    return wanted


def _factor_and_size(F: int | None, mesh: DeviceMesh | None, world: VirtualWorld | None) -> tuple[int, int]:
    if world is not None:
        if not isinstance(world, VirtualWorld):
            raise TypeError(
                f"world={world!r}: an fxshard.VirtualWorld was expected (ranks of a process group need none)"
            )
        if mesh is not None:
            raise ValueError("world and mesh both say who shards with whom; leave one out")
        if F is not None and F != world.F:
            raise ValueError(f"F={F} differs from the given world's F={world.F}; leave one out")
        return world.F, world.W
    if dist.is_available() and dist.is_initialized():
        W = dist.get_world_size()
        if mesh is not None and mesh.ndim == 2:
            if F is not None and mesh.size(1) != F:
                raise ValueError(f"F={F} differs from the mesh's shard axis of {mesh.size(1)}; leave one out")
            F = mesh.size(1)
        return check_factor(W if F is None else F, W), W
    if mesh is not None:
        raise ValueError("mesh needs an initialised process group: call torch.distributed.init_process_group first")
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":  # each would train a model of its own
        raise RuntimeError(
            f"WORLD_SIZE={ranks} says that this process is one of several ranks, and there is no process group: call "
            "torch.distributed.init_process_group first, or give world=fxshard.VirtualWorld(F) to run alone"
        )
    F = 1 if F is None else F
    if isinstance(F, bool) or not isinstance(F, int):
        raise TypeError(f"F={F!r}: the sharding factor is a positive int")
    if F < 1:
        raise ValueError(
            f"F={F}: the sharding factor is a positive int (no process group: a virtual world of F shards)"
        )
    return F, F


def _units(model: nn.Module, options: Options, example_inputs: Any, device: torch.device) -> list[Unit]:
    if not isinstance(options.units, BytesOfFirstUse):
        return partition(model, options.units)
    if example_inputs is None:
        raise ValueError(
            "units=BytesOfFirstUse(...) needs example_inputs: the order of first use is read off the graph"
        )
    one = partition(model, "none")
    full_precision = full_precision_modules(model, options.mixed_precision)
    whole = _flats(model, one, 1, options, full_precision)
    plain = Options(units="none", mixed_precision=options.mixed_precision)
    schedule = _trace(State(model, whole, full_precision, Place(1, 1, device), plain), example_inputs)
    views = schedule.forward.nodes("param_view")
    first = {v: min(v.users) for v in views if v.users}
    order = [v.meta["fxshard"].fqn for v in sorted(first, key=lambda v: first[v])]
    return units_by_bytes(model, order, options.units.num_bytes)


def _flats(
    model: nn.Module, units: list[Unit], F: int, options: Options, full_precision: Iterable[nn.Module]
) -> dict[str, FlatParameter]:
    chosen = full_precision_parameters(model, full_precision)
    return flat_parameters(model, units, F, options.mixed_precision, chosen)


def _fingerprint(state: State, mesh: DeviceMesh | None, init: InitFunction | None) -> str:
    """What all ranks must have in common before a collective, as text."""
    lines = [f"torch {torch.__version__}", state.options.fingerprint(), f"F={state.place.F}"]
    lines += [f"mesh {None if mesh is None else mesh.mesh.tolist()}", f"init {'given' if init else 'not given'}"]
    for flat in state.flats.values():
        lines.append(f"unit {flat.name}: {flat.numel} {flat.dtype} gathered as {flat.param_dtype}")
        lines += [f"  {p.fqn} {p.shape} {p.stride} {p.requires_grad}" for p in flat.parameters]
    if state.options.sync_parameters:
        lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in state.module.named_buffers()]
    if state.traced is not None:
        lines += ["traced", *state.traced.skeleton()]
    return "\n".join(lines)


# -- tracing


def _trace(state: State, example_inputs: Any) -> Schedule:
    """Capture with parameters that have shapes and no memory; the model is put back as it was, whatever happens.

    What is captured does not run: the state is one for this trace alone.
    """
    model, options, device = state.module, state.options, state.place.device
    stand_ins: dict[str, nn.Parameter] = {}
    for flat in state.flats.values():
        for spec in flat.parameters:
            piece = torch.empty(0, dtype=flat.param_dtype, device=device)
            wrapped = ShardedParameter(piece, spec.shape, spec.stride, spec.fqn)
            stand_in = nn.Parameter(wrapped, requires_grad=spec.requires_grad)
            stand_ins.update(dict.fromkeys((spec.fqn, *spec.aliases), stand_in))
    saved: list[tuple[dict[str, Any], str, Any]] = []
    args, kwargs = _arguments(example_inputs)
    # Operators are chosen by device and some do not differentiate on meta: what is on meta is captured as `device`.
    on_device: dict[Tensor, Tensor] = {}
    args, kwargs = torch_private.pytree.tree_map(lambda x: _made_real(x, device, on_device), (args, kwargs))
    if (dtype := input_dtype(options)) is not None:
        args, kwargs = cast((args, kwargs), dtype)
    captured = capturing(model.forward, state)
    for entrance in state.entrances:
        entrance.open()
    try:
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, p in module._parameters.items():
                if p is not None and not isinstance(p, ShardedParameter):
                    saved.append((module._parameters, name, p))
                    module._parameters[name] = stand_ins[f"{prefix}.{name}" if prefix else name]
            for name, buffer in module._buffers.items():
                if buffer is not None and (real := _made_real(buffer, device, on_device)) is not buffer:
                    saved.append((module._buffers, name, buffer))
                    module._buffers[name] = real
        saved += cast_buffers(model, options.mixed_precision.buffers, state.full_precision)
        with torch_private.without_default_device(), torch_private.while_capturing():
            captured(*args, **kwargs)
    except torch_private.CAPTURE_FAILURES as error:
        if not state.captured:
            raise capture_error(error, model, sharded=False) from error
    finally:
        for entrance in state.entrances:
            entrance.close()
        for table, name, p in reversed(saved):
            table[name] = p
    if not state.captured:
        raise CaptureError(f"forward of {type(model).__name__} reads no parameter: there is nothing to schedule")
    return state.latest_schedule()


def _made_real(x: Any, device: torch.device, made: dict[Tensor, Tensor]) -> Any:
    """Zeros in place of a tensor without memory, the same ones for the same tensor; anything else is left alone."""
    if not isinstance(x, Tensor) or not deferred.has_no_memory(x):
        return x
    if x not in made:
        zeros = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device).zero_()
        made[x] = zeros.requires_grad_(x.requires_grad)
    return made[x]


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


__all__ = ["compile", "trace"]
