"""Runs schedules: memory, streams and collectives of one model, and the lowered phases of its schedules over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.ir import Accumulation, Phase, Schedule, Slot
from fxshard.ir.nodes import info
from fxshard.ir.specialise import specialise
from fxshard.parameter import Generation
from fxshard.runtime.accumulation import NOTHING_KEPT, KeptGradients
from fxshard.runtime.binder import Binder
from fxshard.runtime.lowering import Lowered, lower
from fxshard.runtime.storage import FlatStorage
from fxshard.runtime.streams import QUEUES, CudaStreams, Streams
from fxshard.runtime.world import World

Derive = Callable[[Schedule, Accumulation], Schedule]
"""Makes the schedule whose backward does that with its gradients."""


class Executor:
    """Memory, streams and collectives of one model on this process; programs are made for its schedules."""

    def __init__(
        self, storages: dict[str, FlatStorage], world: World, generation: Generation, *, debug: bool = False,
        keep_memory: bool = False, streams: Streams | None = None, derive: Callable[[], Derive | None] = lambda: None,
    ):  # fmt: skip
        self.storages, self.world, self.generation, self.debug = storages, world, generation, debug
        self.keep_memory = keep_memory or world.F == 1
        self.derive = derive
        self.keep = ""
        """What backward does with gradients now: '' reduces them, else see `Accumulation.keep`. Set by `no_sync`."""
        self.kept: dict[str, KeptGradients] = {}
        """By FlatParameter, gradients kept for a later reduce."""
        for storage in storages.values():
            storage.kept.live = self.kept
        on_cuda = world.device.type == "cuda"
        self.streams = streams or (CudaStreams(world.device) if on_cuda else Streams())
        self.arena = self._memory(0)
        self.host_arena = self.arena
        """Pinned memory of the host, for gradients on their way to `.grad` where shards are offloaded."""
        self.loaded: Any = None
        """The event at the end of the last LOAD."""
        self.residents: dict[str, Tensor] = {}
        self.programs: list[Program] = []
        self.running: str | None = None
        self.skipped: frozenset[str] = frozenset()
        self.ended: Any = None
        """The event at the end of the last phase."""
        self.broken: str | None = None
        """Why no step may be taken any more: an exception in a phase leaves collectives half done."""
        self.events: list[tuple[str, str, str]] | None = None
        """When a list: every communication node as it is executed, (phase, kind, flat). Set by `observe`."""
        self.random = random.Random(world.shard_rank + world.F * world.replica_rank)  # each rank delays as it likes

    def _memory(self, num_bytes: int, on_host: bool = False) -> Tensor:
        # A tensor born in inference mode could never be written outside it.
        with torch.inference_mode(False):
            pinned = on_host and self.world.device.type == "cuda"
            device = "cpu" if on_host else self.world.device
            return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def program(self, schedule: Schedule, root: nn.Module) -> Program:
        """A program for a schedule. It is lowered when it first runs: this is called while tensors are fake."""
        program = Program(self, schedule, root)
        self.programs.append(program)
        return program

    def accumulation(self, schedule: Schedule) -> Accumulation:
        """What the next backward does with its gradients and with those kept before it."""
        if not self.keep and not self.kept:
            return NOTHING_KEPT
        for kept in list(self.kept.values()):
            kept.settle()
        whole = {name for name, kept in self.kept.items() if self.world.contributor in kept.whole}
        shards = {name for name, kept in self.kept.items() if kept.shards}
        keep = self.keep
        if keep == "sharded":
            keep = "unsharded" if schedule.F == 1 else "" if schedule.replicas == 1 else keep
        if keep == "unsharded":
            return Accumulation(keep)
        if not keep and not whole and not shards:
            return NOTHING_KEPT
        if keep == "sharded":
            assert schedule.backward is not None
            reduced = {info(n).flat for n in schedule.backward.nodes("flatten_grads")}
            return Accumulation(keep, frozenset(whole & reduced))
        return Accumulation("", frozenset(whole), frozenset(shards))

    def reserve(self, num_bytes: int, host_bytes: int) -> None:
        """Make the arenas at least this large; programs lowered before are bound anew to larger ones."""
        larger = num_bytes > self.arena.numel(), host_bytes > self.host_arena.numel()
        if not any(larger):
            return
        self.streams.synchronize()  # a phase on another stream may still work in the old ones
        if larger[0]:
            self.arena = self._memory(num_bytes)
        if larger[1]:
            self.host_arena = self._memory(host_bytes, on_host=True)
        for p in self.programs:
            p.unbind()

    def observe(self) -> list[tuple[str, str, str]]:
        """From now on record each communication node as it runs; returns the list that grows."""
        self.events = []
        for p in self.programs:
            p.unbind()
        return self.events

    def resident(self, flat: str) -> Tensor:
        """The buffer of a resident FlatParameter, outside the arena; made when first asked for."""
        if flat not in self.residents:
            layout = self.storages[flat].flat
            with torch.inference_mode(False):
                self.residents[flat] = torch.empty(
                    layout.padded_numel, dtype=layout.param_dtype, device=self.world.device
                )
        return self.residents[flat]

    def release_gradients(self) -> None:
        """Give back the memory of `.grad` where there is none, for what forward saves."""
        if not self.keep_memory:
            for storage in self.storages.values():
                storage.release()

    def slot(self, slot: Slot, dtype: torch.dtype, numel: int, on_host: bool = False) -> Tensor:
        """A typed view (numel,) of an arena at a slot."""
        num_bytes = numel * dtype.itemsize
        assert num_bytes <= slot.num_bytes, f"{num_bytes} bytes asked of a slot of {slot.num_bytes}"
        return (self.host_arena if on_host else self.arena)[slot.offset : slot.offset + num_bytes].view(dtype)


class Program:
    """A schedule made runnable. Backward is lowered once for each set of outputs that got a gradient."""

    def __init__(self, executor: Executor, schedule: Schedule, root: nn.Module):
        self.executor, self.schedule, self.root = executor, schedule, root
        self.derived: dict[Accumulation, Schedule] = {}
        """What `no_sync` made of the schedule: the backwards of an accumulation, by what each does."""
        self._running = schedule
        """The schedule of the backward that runs next: `schedule`, or one of `derived`."""
        self._forward: Lowered | None = None
        self._backward: dict[tuple[Schedule, tuple[bool, ...]], Lowered] = {}

    def unbind(self) -> None:
        """Forget lowered code: buffers have moved or are to be observed."""
        self._forward = None
        self._backward.clear()

    def replace(self, schedule: Schedule) -> None:
        """Run another schedule of the same captured call from the next forward on."""
        self.schedule = schedule
        self.derived.clear()
        self.unbind()

    def source(self, phase: str = "forward", given: tuple[bool, ...] | None = None) -> str:
        """The lowered code of a phase as text."""
        if phase not in ("forward", "backward"):
            raise ValueError(f"phase={phase!r}: allowed are 'forward' and 'backward'")
        if phase == "forward":
            return self._forward_code().source
        backward = self.schedule.backward
        if backward is None:
            raise ValueError("this schedule has no backward: it was captured under no_grad or inference_mode")
        return self._backward_code(self.schedule, given or (True,) * len(backward.nodes("tangent"))).source

    def _forward_code(self) -> Lowered:
        if self._forward is None:
            self._forward = self._lower(self.schedule.forward, self.schedule)
        return self._forward

    def _backward_code(self, schedule: Schedule, given: tuple[bool, ...]) -> Lowered:
        if (schedule, given) not in self._backward:
            phase = schedule.backward
            assert phase is not None
            self._backward[schedule, given] = self._lower(phase if all(given) else specialise(phase, given), schedule)
        return self._backward[schedule, given]

    def _lower(self, phase: Phase, schedule: Schedule) -> Lowered:
        self.executor.reserve(schedule.memory.arena_bytes, schedule.memory.host_bytes)
        return lower(phase, self.root, Binder(self.executor, schedule, phase).bind())

    def _accumulating(self) -> Schedule:
        """The schedule of a backward that keeps gradients, or takes kept ones in; made when first needed."""
        what = self.executor.accumulation(self.schedule)
        if what is NOTHING_KEPT:
            return self.schedule
        if what not in self.derived:
            derive = self.executor.derive()
            assert derive is not None, "the model is gone"
            self.derived[what] = derive(self.schedule, what)
        return self.derived[what]

    # -- one call

    def begin_call(self) -> tuple[int, Schedule]:
        """What `begin_backward` of this call is to be given: the generation of the parameters, and what forward runs."""
        return self.executor.generation.value, self.schedule

    def begin_backward(self, call: tuple[int, Schedule], skipped: frozenset[str] = frozenset()) -> None:
        """Called right before `backward`; `skipped` names parameters this backward is not asked to accumulate into."""
        generation, schedule = call
        if torch.is_grad_enabled():
            raise RuntimeError("double backward (create_graph=True) through a sharded model is not supported")
        if generation != self.executor.generation.value:
            raise RuntimeError(
                "parameters changed between forward and backward (an optimizer step, a load or an in-place edit): the "
                "gradient would mix old activations with new weights. Run forward again"
            )
        if schedule is not self.schedule:
            raise RuntimeError("the schedule was replaced between forward and backward: run forward again")
        self.executor.skipped = skipped
        self._running = self._accumulating()

    def forward(self, arguments: list[Any]) -> Sequence[Any]:
        return self._run("forward", self._forward_code(), arguments)

    def backward(self, arguments: list[Any], given: tuple[bool, ...]) -> Sequence[Any]:
        return self._run("backward", self._backward_code(self._running, given), arguments)

    def _run(self, name: str, code: Lowered, arguments: list[Any]) -> Sequence[Any]:
        executor = self.executor
        if executor.running is not None:
            raise RuntimeError(
                f"{name} of a sharded model was entered while its {executor.running} is running; buffers are shared"
            )
        if executor.broken is not None:
            raise RuntimeError(
                f"an earlier {executor.broken}: ranks may be at different points of the schedule. "
                "Start the processes again, or compile a new model in a new process group"
            )
        executor.running = name
        try:
            streams = executor.streams
            # The caller's stream may be another one than last time; the buffers are the same.
            streams.wait("compute", executor.ended)
            if name == "forward":
                executor.release_gradients()
            start = streams.record("compute")
            for queue in QUEUES[1:]:
                streams.wait(queue, start)
            results = code.function(arguments)
            executor.ended = streams.record("compute")
            streams.wait_on_host(executor.loaded)
            executor.loaded = None
            return results
        except BaseException as error:
            streams.synchronize()  # collectives under way still write to buffers of the next phase
            if name == "backward":  # a part of its gradients may be reduced
                for kept in list(executor.kept.values()):
                    kept.clear()
                executor.world.abandon()
            if executor.world.W > 1 and executor.world.kind != "virtual":
                executor.broken = f"{name} was interrupted by {type(error).__name__}: {error}"
            raise
        finally:
            executor.running = None
