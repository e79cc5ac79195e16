"""`fxshard.compile` and `fxshard.trace`: from a model to a sharded model, or to its schedule without devices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard.passes as passes
from fxshard import deferred
from fxshard.capture import torch_private
from fxshard.capture.backend import CaptureBackend
from fxshard.capture.build import Captured
from fxshard.capture.failures import capture_error
from fxshard.capture.harmless import prepare
from fxshard.checkpoint import model as checkpoint_model
from fxshard.checkpoint import optimizer as checkpoint_optimizer
from fxshard.errors import AgreementError, CaptureError
from fxshard.ir import Accumulation, FlatParameter, Remark, Schedule
from fxshard.ir.nodes import bytes_text
from fxshard.ir.verify import verify
from fxshard.options import InitFunction, Options, check_choice, check_factor, did_you_mean
from fxshard.parameter import Generation, ShardedParameter
from fxshard.precision import cast, entrances, full_precision_modules, full_precision_parameters
from fxshard.runtime import (
    ControlPlane,
    Executor,
    FlatStorage,
    GlooWorld,
    NcclWorld,
    Program,
    VirtualWorld,
    World,
)
from fxshard.sharding import cast_buffers, shard, uninitialisable
from fxshard.units import BytesOfFirstUse, Unit, check_unit_patterns, flat_parameters, partition, units_by_bytes

_STATE = "_fxshard"


class ShardedModule:
    """Mixed into the class of a compiled module: what fxshard adds to it. The module object stays the user's own."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest training capture (of the latest capture if there is none).

        Assign an edited `schedule.copy()` to it and the model runs that from its next forward on, the memory planned anew
        where the edits ask for it. It is verified first; where it changes the order of collectives every rank assigns the
        same one. Raises ScheduleError, AgreementError or ValueError (the schedule of another model) with nothing changed.
        """
        return _state(self).latest_schedule()

    @schedule.setter
    def schedule(self, edited: Schedule) -> None:
        _state(self).replace_schedule(edited)

    @property
    def schedules(self) -> list[Schedule]:
        """All captured schedules, oldest first, each with those that `no_sync` made of it behind it."""
        return _state(self).all_schedules()

    def lowered(self, phase: str = "forward") -> str:
        """The Python code that runs a phase (`forward` or `backward`) of the latest training capture."""
        return _state(self).latest_program().source(phase)

    @contextlib.contextmanager
    def no_sync(self, keep: str = "unsharded") -> Iterator[None]:
        """Backwards inside keep their gradients; the first one outside reduces them together with its own.

        keep: "unsharded" communicates no gradient, every rank keeps its own whole ones (in the accumulation dtype).
        "sharded" reduces them in the shard group and keeps the sums: with replicas (F < W) the AllReduce is put off, without
        (F = W) it is what happens outside too, with F = 1 it is "unsharded".

        Where backward runs decides, not where forward ran. Every rank does the same. Meanwhile `.grad` of a parameter
        stands for something no rank has, and nothing can be computed with it; `zero_grad` drops what was kept, of the
        parameters it is for. Contexts nest, the innermost counts; after an exception it is as before the context.
        Source: FSDP paper, 3.3.4; FSDP1's `no_sync`, FSDP2's `set_requires_gradient_sync`.
        """
        check_choice("keep", keep, passes.KEEPS)
        executor = _state(self).executor
        assert executor is not None
        before, executor.keep = executor.keep, keep
        try:
            yield
        finally:
            executor.keep = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all parameters, with one small reduction a dtype in place of one a parameter.

        Each parameter counts once, wherever its pieces are and however often it is tied. Returns the total norm before,
        a plain 0-d tensor, the same on all ranks. A collective of the shard group. Raises RuntimeError where the norm is not
        finite and `error_if_nonfinite`.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
        norms = [n for grads in by_dtype.values() for n in torch_private.norms(grads, float(norm_type))]
        total = torch.linalg.vector_norm(torch.stack(norms), float(norm_type)) if norms else torch.tensor(0.0)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}, and "
                "error_if_nonfinite=True; nothing was clipped"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, True if foreach is None else foreach)
        return total

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"this {type(self).__name__} is sharded: it can neither be copied nor pickled. "
            "Copy the model before fxshard.compile; save its `state_dict()`; keep averages of weights by element-wise "
            "operators on `parameters()`"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        except RuntimeError as error:  # torch names the class of the module; the cause names the parameter
            if isinstance(error.__cause__, TypeError):
                raise error.__cause__ from None
            raise

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """The module with plain, whole parameters without gradients, whose forward runs uncaptured; changes are not kept.

        A collective: every rank enters, and holds the whole model inside.
        """
        state = _state(self)
        with state.plain_parameters():
            yield self  # type: ignore[misc]


def _state(module: Any) -> _State:
    return module.__dict__[_STATE]


@dataclass(frozen=True)
class _Place:
    """Where a schedule is to run: what of a world shapes the schedule, and the other ranks if there are any."""

    W: int
    F: int
    device: torch.device
    direct_exchange: bool = False
    held_shards: int = 1
    num_batches: int | None = None
    """Ranks that bring a batch, W unless told."""
    ranks: ControlPlane | None = None


class _State:
    """What compile made for one module."""

    def __init__(self, module: nn.Module, flats: dict[str, FlatParameter], place: _Place, options: Options):
        self._module = weakref.ref(module)
        self.flats, self.place, self.options = flats, place, options
        if isinstance(options.reshard_after_forward, Mapping):
            check_unit_patterns("reshard_after_forward", options.reshard_after_forward, flats)
        self.pipeline = passes.pipeline(options)
        self.activation_memory_budget = options.activation_memory_budget
        self.storages: dict[str, FlatStorage] = {}
        self.executor: Executor | None = None
        self.captured: list[Schedule] = []
        self.traced: Schedule | None = None
        """The schedule traced before sharding, where example inputs were given."""
        self.skeletons: set[str] = set()
        self.original_class = type(module)
        self.own_forward: Callable[..., Any] | None = None
        """A forward that was set on the module itself, not on its class."""
        self.run: Callable[..., Any]
        self.handles: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self.full_precision = full_precision_modules(module, options.mixed_precision)
        self.entrances = entrances(module, options.units, options.mixed_precision, self.full_precision)
        self.plain = False
        self.in_call = False
        """Whether a call is under way, from which eager code may enter another."""

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    # -- what the capture backend asks (capture.backend.Host)

    def schedule(self, captured: Captured) -> Schedule:
        """Run the passes on what was captured. All ranks of a world then agree on its communication skeleton."""
        reached = {frozenset(tangents) for tangents in captured.reach.values()}
        schedule = Schedule(
            self.flats, captured.forward, captured.backward, self.place.W, self.place.F,
            gradients=captured.gradients,
            parameter_outputs=captured.parameter_outputs,
            needs_presence=len(reached) > 1,
            direct_exchange=self.place.direct_exchange,
            held_shards=self.place.held_shards,
            num_batches=self.place.num_batches or self.place.W,
            gradient_divisor=self.options.gradient_divisor,
            offloaded=self.options.cpu_offload,
        )  # fmt: skip
        unit_of = {fqn: flat.unit for flat in self.flats.values() for fqn in flat.fqns}
        for fqn, num_bytes, line in captured.made_weights:
            text = f"a weight made from '{fqn}' and data is kept for backward, {bytes_text(num_bytes)} ({line})"
            schedule.remarks.append(Remark("capture", "missed", unit_of[fqn], text))
            schedule.memory.saved_weight_bytes += num_bytes
        settings = self.options
        passes.run(self.pipeline, schedule, verify_each=settings.verify_each, print_after=settings.print_after)
        return schedule

    def program(self, schedule: Schedule, root: nn.Module) -> Program:
        if self.executor is not None:
            self.agree(schedule)
        self.captured.append(schedule)
        if self.executor is None:
            raise _Traced
        schedule.runs, schedule.agreed = True, tuple(schedule.skeleton())
        return self.executor.program(schedule, root)

    def derive(self, schedule: Schedule, what: Accumulation) -> Schedule:
        """The schedule whose backward does this with its gradients. All ranks make it at the same time, and agree on it."""
        derived = schedule.copy(reorder=True)
        takes = passes.TakeKept(
            *(tuple(f for f in schedule.flats if f in names) for names in (what.kept, what.kept_shards))
        )
        made = [
            *([passes.DeferReduces(what.keep)] if what.keep else []),
            *([takes] if what.kept or what.kept_shards else []),
            passes.PlanMemory(),
        ]
        passes.run(made, derived, verify_each=self.options.verify_each, print_after=self.options.print_after)
        self.agree(derived)
        derived.runs, derived.agreed = True, tuple(derived.skeleton())
        return derived

    def agree(self, schedule: Schedule) -> None:
        """Compare a new communication skeleton with the other ranks'; one already agreed on needs nobody."""
        text = "\n".join(schedule.skeleton())
        ranks = self.place.ranks
        if ranks is not None and text not in self.skeletons:
            what = "ranks captured different communication, and must run the same model code"
            ranks.agree("skeleton", text, self.options.timeout_s, what)
            self.skeletons.add(text)

    def tell(self, error: Exception) -> None:
        """After a failed capture, before any was agreed on: the other ranks need not wait for this one."""
        if self.place.ranks is not None and not self.skeletons and not isinstance(error, AgreementError):
            self.place.ranks.fail("skeleton", error)

    def foreign(self, tensor: Tensor) -> str | None:
        return next((name for name, p in self.module.named_parameters() if p is tensor), None)

    def module_names(self) -> dict[int, str]:
        return {id(module): name for name, module in self.module.named_modules()}

    def user_forward(self) -> Callable[..., Any]:
        return self.own_forward or functools.partial(self.original_class.forward, self.module)

    # -- for the user

    def latest_schedule(self) -> Schedule:
        if not self.captured:
            if self.traced is not None:
                return self.traced
            raise RuntimeError(
                "the model was not captured yet: call it once, or give example_inputs to fxshard.compile"
            )
        return next((s for s in reversed(self.captured) if s.backward is not None), self.captured[-1])

    def all_schedules(self) -> list[Schedule]:
        programs = [] if self.executor is None else self.executor.programs
        derived = {program.schedule: program.derived.values() for program in programs}
        return [s for captured in self.captured for s in (captured, *derived.get(captured, ()))]

    def latest_program(self) -> Program:
        schedule = self.latest_schedule()
        programs = [] if self.executor is None else self.executor.programs
        program = next((p for p in programs if p.schedule is schedule), None)
        if program is None:
            raise RuntimeError("the schedule was traced but the model has not run yet: call it once")
        return program

    def replace_schedule(self, edited: Schedule) -> None:
        if not isinstance(edited, Schedule):
            raise TypeError(
                f"model.schedule = {type(edited).__name__}: a Schedule was expected, edited from a copy of it"
            )
        program = self.latest_program()
        now = program.schedule
        if edited is now:
            return
        if edited.flats != now.flats or edited.origin != now.origin:
            raise ValueError(
                "this schedule is of another model, or of inputs of other shapes: edit `model.schedule.copy()`"
            )
        if edited.accumulation != now.accumulation:
            raise ValueError(
                f"this schedule's backward {edited.accumulation}: edit `model.schedule.copy()`, from which it was made"
            )
        places = [
            f"W={s.W}, {s.num_batches} batches divided by {s.divisor}, {s.held_shards} shards held by a process"
            for s in (edited, now)
        ]
        if places[0] != places[1]:
            raise ValueError(f"this schedule is for another world, {places[0]}; this model's is {places[1]}")
        if edited.runs:
            raise ValueError("this schedule runs, or ran before it was replaced: give back a copy of it")
        if edited.direct_exchange != now.direct_exchange:  # as `trace` made it: the memory is another, the order is not
            edited.direct_exchange = now.direct_exchange
            edited.unplan()
        needed = set(passes.NEEDED) - {"memory-planned"}
        if missing := sorted(needed - edited.established):
            raise ValueError(f"this schedule lacks what it needs to run: {', '.join(missing)}")
        if "memory-planned" in edited.established:
            verify(edited)
        else:
            passes.run([passes.PlanMemory()], edited, reproducer=False)
        skeleton = edited.skeleton()
        if skeleton != now.skeleton():
            self.skeletons.discard("\n".join(skeleton))  # agreed on before, and not what the others run now
            self.agree(edited)
        edited.runs, edited.agreed = True, tuple(skeleton)
        self.captured[self.captured.index(now)] = edited
        program.replace(edited)

    @contextlib.contextmanager
    def plain_parameters(self) -> Iterator[None]:
        full = {}
        for storage in self.storages.values():
            for p in storage.parameters.values():
                with torch.no_grad():
                    full[p] = nn.Parameter(p.full_tensor(), requires_grad=False)  # type: ignore[attr-defined]
        places = [(d, n, p) for m in self.module.modules() for d in (m._parameters,) for n, p in d.items() if p in full]
        for d, n, p in places:
            d[n] = full[p]
        before, self.plain = self.plain, True
        try:
            yield
        finally:
            self.plain = before
            for d, n, p in places:
                d[n] = p


class _Traced(Exception):
    """Ends a trace once the schedule is there; nothing is run."""


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

    Parameters keep their identity, so an optimizer made before holds the right ones; its state has to be made after.

    Raises TypeError or ValueError for wrong options, CaptureError for a forward that cannot be captured, AgreementError
    when ranks disagree. Source: FSDP paper; torch.distributed.fsdp.fully_shard.
    """
    ranks = ControlPlane() if world is None and dist.is_available() and dist.is_initialized() else None
    try:
        settings = Options.from_keywords(options)
        _check_model(model, "fxshard.compile")
        for path in settings.entry_points:
            _entry(model, path)
        _check_placement(model, init)
        prepare(model)
        device = _device(model)
        F, W = _factor_and_size(F, mesh, world)
        units = _units(model, settings, example_inputs, device)
        flats = _flats(model, units, F, settings)
        passes.check_complete(passes.pipeline(settings), settings)
        if ranks is None:
            world = world or VirtualWorld(F, device=device)
            world.check_free(device)
            place = _Place(W, F, device, held_shards=world.held, num_batches=world.data_ranks)
        else:
            place = _Place(W, F, device, direct_exchange=_backend(device) == "gloo", ranks=ranks)
        state = _State(model, flats, place, settings)
        if example_inputs is not None:
            state.traced = _trace(model, flats, example_inputs, place, settings)
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
        state.storages, home, generation, debug=settings.debug, derive=weakref.WeakMethod(state.derive)
    )
    _install(model, state)
    checkpoint_model.install(model, state.storages, lambda: state.plain)
    checkpoint_optimizer.watch()
    return model


def trace(model: nn.Module, example_inputs: Any, F: int, W: int | None = None, **options: Any) -> Schedule:
    """The schedule of one training step, without devices, memory or a process group. The model is left as it was.

    `model` may be on the meta device: its parameters take no memory, its buffers and inputs there count as zeros on the
    CPU. example_inputs are arguments of forward (a tuple, list or dict, or the only one), whose values are not read. W:
    world size, default F. Options as for `compile`; those about running (`debug`, `sync_parameters`, `timeout_s`) change
    nothing here. The memory plan is of a world whose collectives bring their own staging memory (NCCL); over gloo the
    arena also holds what is received.
    """
    settings = Options.from_keywords(options, "fxshard.trace")
    _check_model(model, "fxshard.trace")
    W = F if W is None else W
    check_factor(F, W)
    prepare(model)
    device = _placed(model) or torch.device("cpu")
    units = _units(model, settings, example_inputs, device)
    flats = _flats(model, units, F, settings)
    return _trace(model, flats, example_inputs, _Place(W, F, device), settings)


# -- steps of compile


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function} takes an nn.Module, not {given}")
    if _STATE in model.__dict__:
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
            f"what is on the meta device ({_some(bare)}) needs an init function, compile(model, init=...), or a module that "
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
    whole = _flats(model, partition(model, "none"), 1, options)
    plain = Options(units="none", mixed_precision=options.mixed_precision)
    schedule = _trace(model, whole, example_inputs, _Place(1, 1, device), plain)
    views = schedule.forward.nodes("param_view")
    first = {v: min(v.users) for v in views if v.users}
    order = [v.meta["fxshard"].fqn for v in sorted(first, key=lambda v: first[v])]
    return units_by_bytes(model, order, options.units.num_bytes)


def _flats(model: nn.Module, units: list[Unit], F: int, options: Options) -> dict[str, FlatParameter]:
    precision = options.mixed_precision
    chosen = full_precision_parameters(model, full_precision_modules(model, precision))
    return flat_parameters(model, units, F, precision, chosen)


def _fingerprint(state: _State, mesh: DeviceMesh | None, init: InitFunction | None) -> str:
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


def _install(model: nn.Module, state: _State) -> None:
    """Swap the class for one with the mixin, whose forward runs the captured step. Hooks stay outside of it."""
    state.handles = _compute_handles(model, state)
    entries = [_entry(model, name) for name in state.options.entry_points]
    cast_to = _input_dtype(state.options)
    state.run = _runner(state, state.user_forward, _capturing(model.forward, state), cast_to)
    state.own_forward = model.__dict__.pop("forward", None)
    model.__class__ = _sharded_class(type(model))
    model.__dict__[_STATE] = state
    for owner, name in entries:
        owner.__dict__[name] = _entry_point(owner, name, state)


def _entry(model: nn.Module, path: str) -> tuple[nn.Module, str]:
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
    if owner is None or not inspect.isroutine(getattr(owner, name, None)) or (owner is model and name == "forward"):
        there = [n for n, _ in model.named_children()]
        there += [n for n, f in vars(type(model)).items() if inspect.isfunction(f) and not n.startswith("_")]
        hint = did_you_mean(path, there)
        raise ValueError(
            f"entry_points: {type(model).__name__} has no method and no submodule '{path}' to be called by itself.{hint} "
            f"There are {', '.join(n for n in there if n != 'forward')}"
        )
    return owner, name


def _entry_point(owner: nn.Module, name: str, state: _State) -> Callable[..., Any]:
    """Stands for a method that is also called from outside forward: captured there, traced through inside."""
    function = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)  # through the casts that are there during a call

    in_full_precision = any(owner is module for chosen in state.full_precision for module in chosen.modules())
    cast_to = None if in_full_precision else _input_dtype(state.options)
    run = _runner(state, lambda: function, _capturing(called, state), cast_to)

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return run(*args, **kwargs)

    return entry


_CLASSES: dict[type, type] = {}


def _sharded_class(original: type) -> type:
    """`original` with the mixin; one for each class. It holds no model: Dynamo keeps classes for good."""
    if original in _CLASSES:
        return _CLASSES[original]

    @functools.wraps(original.forward)  # type: ignore[attr-defined]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _state(self).run(*args, **kwargs)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)  # a slice of a Sequential is made by calling its class: it is a plain one

    names = {"__module__": original.__module__, "forward": forward, "__new__": new}
    _CLASSES[original] = type(original.__name__, (ShardedModule, original), names)
    return _CLASSES[original]


def _capturing(user_forward: Callable[..., Any], state: _State) -> Callable[..., Any]:
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


def _compute_handles(model: nn.Module, state: _State) -> list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]]:
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
    state: _State,
    plainly: Callable[[], Callable[..., Any]],
    captured: Callable[..., Any],
    cast_to: torch.dtype | None,
) -> Callable[..., Any]:
    """What `model(...)` runs: compute dtypes in place, the captured step, errors with the user's line.

    `plainly()` is what it stands for; `cast_to` what floating inputs are cast to.
    """
    handles = state.handles
    reference = state._module

    def run(*args: Any, **kwargs: Any) -> Any:
        if state.plain:
            return plainly()(*args, **kwargs)
        if cast_to is not None:
            args, kwargs = cast((args, kwargs), cast_to)
        outermost, state.in_call = not state.in_call, True
        if outermost:
            for table, name, master, handle in handles:
                if handle.requires_grad != master.requires_grad:
                    handle.requires_grad_(master.requires_grad)
                table[name] = handle
            for entrance in state.entrances:
                entrance.open()
        failure: Exception | None = None
        outputs = None
        try:
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
                for table, name, master, _ in handles:
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


def _input_dtype(options: Options) -> torch.dtype | None:
    """What floating inputs of the model are cast to."""
    return options.mixed_precision.param if options.mixed_precision.cast_forward_inputs else None


# -- tracing


def _trace(
    model: nn.Module, flats: dict[str, FlatParameter], example_inputs: Any, place: _Place, options: Options
) -> Schedule:
    """Capture with parameters that have shapes and no memory; the model is put back as it was, whatever happens."""
    state = _State(model, flats, place, options)
    stand_ins: dict[str, nn.Parameter] = {}
    device = place.device
    for flat in flats.values():
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
    if (dtype := _input_dtype(options)) is not None:
        args, kwargs = cast((args, kwargs), dtype)
    captured = _capturing(model.forward, state)
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


def is_compiled(model: nn.Module) -> bool:
    """Whether `fxshard.compile` was applied to this module object."""
    return _STATE in model.__dict__


__all__ = ["ShardedModule", "compile", "is_compiled", "trace"]
