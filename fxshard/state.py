"""What compile made for one module: its schedules, and what makes, runs and replaces them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxshard.passes as passes
from fxshard.capture.build import Captured
from fxshard.errors import AgreementError
from fxshard.ir import Accumulation, FlatParameter, Remark, Schedule
from fxshard.ir.nodes import bytes_text
from fxshard.ir.verify import verify
from fxshard.options import Options
from fxshard.precision import entrances
from fxshard.runtime import ControlPlane, Executor, FlatStorage, Program
from fxshard.units import check_unit_patterns


@dataclass(frozen=True)
class Place:
    """Where a schedule is to run: what of a world shapes the schedule, and the other ranks if there are any."""

    W: int
    F: int
    device: torch.device
    direct_exchange: bool = False
    held_shards: int = 1
    num_batches: int | None = None
    """Ranks that bring a batch, W unless told."""
    ranks: ControlPlane | None = None


class State:
    """What compile made for one module."""

    def __init__(
        self,
        module: nn.Module,
        flats: dict[str, FlatParameter],
        full_precision: Mapping[nn.Module, torch.dtype],
        place: Place,
        options: Options,
    ):
        self.reference = weakref.ref(module)
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
        self.full_precision = full_precision
        self.entrances = entrances(module, options.units, options.mixed_precision, full_precision)
        self.plain = False
        self.in_call = False
        """Whether a call is under way, from which eager code may enter another."""

    @property
    def module(self) -> nn.Module:
        module = self.reference()
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
            f"{' in host memory' if s.offloaded else ''}"
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
            parameters: list[Any] = list(storage.parameters.values())
            with torch.no_grad():
                wholes = storage.wholes([p.local for p in parameters])
                full.update(
                    {p: nn.Parameter(w, requires_grad=False) for p, w in zip(parameters, wholes) if w is not None}
                )
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
