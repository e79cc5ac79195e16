"""Runs schedules: binds every communication node to its buffers, streams and collectives, then runs the lowered phases.

[Note: order on streams]
Each communication node runs on its queue. What a node reads was written on another queue before: the reader waits for
an event recorded there. At the start of a phase every queue waits for `compute` (the optimizer wrote the shards there;
the last phase ended there). A slot is reused behind the event that ended its last use. Every collective is waited for on
`compute` in the end (a ReduceScatter that an AllReduce follows by way of that), so at the end of a phase nothing is under
way. The host never waits for a CUDA device, unless shards are in its own memory: then it waits at the WAIT of a STORE,
before it adds to `.grad`, and at the end of a phase for the last LOAD, for it may write the shard next.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard.ir import Accumulation, FlatParameter, Phase, Schedule, Slot, ops
from fxshard.ir.layout import aligned
from fxshard.ir.nodes import info, takes_kept
from fxshard.ir.specialise import specialise
from fxshard.parameter import Generation
from fxshard.runtime.accumulation import Flatten, KeptGradients
from fxshard.runtime.kernels import FlattenPlan, cast_shard, flatten_cast_scale
from fxshard.runtime.lowering import Lowered, lower
from fxshard.runtime.storage import FlatStorage
from fxshard.runtime.streams import QUEUES, CudaStreams, Streams
from fxshard.runtime.world import DONE, Pending, World

NOTHING_KEPT = Accumulation()

Derive = Callable[[Schedule, Accumulation], Schedule]
"""Makes the schedule whose backward does that with its gradients."""


class Executor:
    """Memory, streams and collectives of one model on this process; programs are made for its schedules."""

    def __init__(
        self, storages: dict[str, FlatStorage], world: World, generation: Generation, *, debug: bool = False,
        streams: Streams | None = None, derive: Callable[[], Derive | None] = lambda: None,
    ):  # fmt: skip
        self.storages, self.world, self.generation, self.debug = storages, world, generation, debug
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
        return lower(phase, self.root, _Binder(self.executor, schedule, phase).bind())

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
            for kept in list(executor.kept.values()) if name == "backward" else ():  # a part of it may be reduced
                kept.clear()
            executor.world.abandon()
            if executor.world.W > 1 and executor.world.kind != "virtual":
                executor.broken = f"{name} was interrupted by {type(error).__name__}: {error}"
            raise
        finally:
            executor.running = None


class _Binder:
    """Makes the functions and views of one phase, see [Note: order on streams]."""

    def __init__(self, executor: Executor, schedule: Schedule, phase: Phase):
        self.executor, self.schedule, self.phase = executor, schedule, phase
        self.streams, self.world = executor.streams, executor.world
        self.events: dict[str, Any] = {}
        self.buffers: dict[fx.Node, Tensor] = {}
        slots = (n.meta["slot"] for n in phase.graph.nodes if "slot" in n.meta)
        self.ends = {name for slot in slots for name in slot.after}
        self.ends |= {n.args[0].name for n in phase.nodes("throttle")}  # type: ignore[union-attr]

    def bind(self) -> dict[fx.Node, Any]:
        bound: dict[fx.Node, Any] = {}
        for node in self.phase.graph.nodes:
            kind = info(node).kind
            if kind in ops.MODEL_KINDS:
                continue
            if node.op == "placeholder":
                self.buffers[node] = self._external(node)
            else:
                function = getattr(self, f"_{kind}")(node)
                bound[node] = function if kind == "param_view" else self._observed(node, function)
        return bound

    # -- helpers

    def _flat(self, node: fx.Node) -> Any:
        return self.executor.storages[info(node).flat or ""]

    def _external(self, node: fx.Node) -> Tensor:
        return self._flat(node).shard if info(node).kind == "shard" else self.executor.resident(info(node).flat or "")

    def _place(self, node: fx.Node, dtype: torch.dtype, numel: int) -> Tensor:
        if (slot := node.meta.get("slot")) is not None:
            return self.executor.slot(slot, dtype, numel)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.world.device)
        assert info(node).flat in self.schedule.resident, f"{node} has no slot"
        return self.executor.resident(info(node).flat or "")

    def _before(self, node: fx.Node, queue: str) -> Callable[[], None]:
        """Wait on `queue` for the ends that free the node's slot."""
        slot = node.meta.get("slot")
        after = slot.after if slot is not None else ()
        streams, events = self.streams, self.events

        def wait() -> None:
            for name in after:
                streams.wait(queue, events[name])

        return wait

    def _observed(self, node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark the end of slots on the node's queue; in debug mode delay collectives; note what ran when observed."""
        found, events, streams = info(node), self.events, self.streams
        inner = function
        if node.name in self.ends:

            def function(*arguments: Any) -> Any:
                result = inner(*arguments)
                events[node.name] = streams.record(found.queue)
                return result

        executor, phase = self.executor, self.phase.name
        if not executor.debug and executor.events is None:
            return function

        def watched(*arguments: Any) -> Any:
            if executor.debug and found.kind in ops.COLLECTIVES:
                time.sleep(executor.random.random() * 0.002)
            if executor.events is not None:
                executor.events.append((phase, found.kind, found.flat or ""))
            return function(*arguments)

        return watched

    # -- one method a kind

    def _cast_shard(self, node: fx.Node) -> Callable[..., Any]:
        source = self.buffers[node.args[0]]  # type: ignore[index]
        out = self._place(node, self._flat(node).flat.param_dtype, source.numel())
        self.buffers[node] = out
        return self._filling(node, lambda: cast_shard(source, out))

    def _filling(self, node: fx.Node, fill: Callable[[], None]) -> Callable[..., Any]:
        """`fill`, from what the node reads into its buffer, on its queue and behind what frees its slot."""
        queue, streams, before = info(node).queue, self.streams, self._before(node, info(node).queue)
        read, label = self._label(node.args[0]), self._label(node)  # type: ignore[arg-type]

        def run() -> None:
            before()
            with streams.on(queue):
                streams.touch(queue, read, False)
                streams.touch(queue, label, True)
                fill()

        return run

    def _load_shard(self, node: fx.Node) -> Callable[..., Any]:
        """Copies from the host; one that casts does so behind what it makes, in the same slot."""
        flat, queue, streams, executor = self._flat(node).flat, info(node).queue, self.streams, self.executor
        source = self.buffers[node.args[0]]  # type: ignore[index]
        if flat.F == 1 and flat.name in self.schedule.resident:
            out, made = executor.resident(flat.name), 0
        else:
            out = self._place(node, flat.param_dtype, source.numel())
            made = aligned(out.nbytes)
        brought = out
        if flat.param_dtype != flat.dtype and source.numel():
            slot = node.meta["slot"]
            beside = dataclasses.replace(slot, offset=slot.offset + made, num_bytes=slot.num_bytes - made)
            brought = executor.slot(beside, flat.dtype, source.numel())
        self.buffers[node] = out

        def fill() -> None:
            brought.copy_(source, non_blocking=True)
            if brought is not out:
                cast_shard(brought, out)
            executor.loaded = streams.record(queue)

        return self._filling(node, fill)

    def _all_gather(self, node: fx.Node) -> Callable[..., Any]:
        if info(node).members:
            return self._bucket(node)
        storage, streams, events = self._flat(node), self.streams, self.events
        source_node: Any = node.args[0]
        shard = self.buffers[source_node]
        full = self._place(node, storage.flat.param_dtype, storage.flat.padded_numel)
        self.buffers[node] = full
        issue, before = self.world.bind_all_gather(storage.flat, shard, full), self._before(node, "unshard")
        read, label, done = self._label(source_node), self._label(node), _done(node)

        def run() -> Pending:
            before()
            with streams.on("unshard"):
                streams.touch("unshard", read, False)
                streams.touch("unshard", label, True)
                pending = issue(None)
                events[done] = streams.record("unshard")
            return pending

        return run

    def _bucket(self, node: fx.Node) -> Callable[..., Any]:
        """An AllGather of several: the members' buffers lie one after another in its slot, what is staged behind them."""
        streams, events = self.streams, self.events
        flats = [self.executor.storages[flat].flat for flat in info(node).members]
        sources: Any = node.args[0]
        fulls, staging = self._members(node, flats)
        place = dict(zip(info(node).members, fulls))
        self.buffers.update({wait: place[info(wait).flat or ""] for wait in node.users})
        shards = [self.buffers[source] for source in sources]
        issue, before = self.world.bind_bucket(flats, shards, fulls, staging), self._before(node, "unshard")
        reads, writes = map(self._label, sources), map(self._label, node.users)
        touched = [(label, False) for label in reads] + [(label, True) for label in dict.fromkeys(writes)]
        done = _done(node)

        def run() -> Pending:
            before()
            with streams.on("unshard"):
                for label, write in touched:
                    streams.touch("unshard", label, write)
                pending = issue(None)
                events[done] = streams.record("unshard")
            return pending

        return run

    def _members(self, node: fx.Node, flats: Sequence[FlatParameter]) -> tuple[list[Tensor], Tensor | None]:
        """Where each member of a bucket is gathered to, (padded,), and the staging (bytes of all,) of a direct exchange."""
        slot, fulls, end = node.meta.get("slot") or Slot(0, 0), [], 0
        for flat in flats:
            if flat.name in self.schedule.resident:
                fulls.append(self.executor.resident(flat.name))
                continue
            at = dataclasses.replace(slot, offset=slot.offset + end, num_bytes=slot.num_bytes - end)
            fulls.append(self.executor.slot(at, flat.param_dtype, flat.padded_numel))
            end += aligned(flat.full_bytes)
        if not self.schedule.direct_exchange:
            return fulls, None
        at = dataclasses.replace(slot, offset=slot.offset + end, num_bytes=slot.num_bytes - end)
        return fulls, self.executor.slot(at, torch.uint8, sum(flat.full_bytes for flat in flats))

    def _wait(self, node: fx.Node) -> Callable[..., Any]:
        source: Any = node.args[0]
        if info(source).kind == "presence":
            return lambda pending: pending()
        if node not in self.buffers:  # a bucket has told its members' WAITs theirs
            self.buffers[node] = self.buffers[source]
        done, queue, streams, events = _done(source), info(node).queue, self.streams, self.events
        if queue == "replicate":

            def chain(pending: Pending) -> Pending:
                streams.wait(queue, events[done])
                return pending

            return chain

        label, on_host = self._label(node), info(source).kind == "store_grad"

        def run(pending: Pending) -> None:
            pending.wait()
            streams.wait("compute", events[done])
            if on_host:
                streams.wait_on_host(events[done])
            streams.touch("compute", label, False)

        return run

    def _param_view(self, node: fx.Node) -> Tensor:
        full_node, _, offset, shape, stride = node.args
        full = self.buffers[full_node]  # type: ignore[index]
        with torch.inference_mode(False):
            return full.as_strided(shape, stride, full.storage_offset() + offset)  # type: ignore[operator, arg-type]

    def _free(self, node: fx.Node) -> Callable[..., Any]:
        streams, executor = self.streams, self.executor
        full: Any = node.args[0]
        buffer, label = self.buffers[full], self._label(full)
        # A resident's memory may still be read by the backward of another call.
        fill = executor.debug and buffer.numel() > 0 and info(node).flat not in self.schedule.resident
        raw = buffer.view(torch.uint8) if fill else buffer

        def run() -> None:
            # The last reads of the buffer are on compute; what reuses it waits for this point.
            streams.touch("compute", label, fill)
            if fill:
                raw.fill_(0xFF)  # NaN in every floating dtype

        return run

    def _label(self, node: fx.Node) -> str:
        """The name under which a buffer's accesses are recorded: `phase:node` of the node that fills it."""
        kind = info(node).kind
        if kind in ("wait", "all_reduce") and isinstance(source := node.args[0], fx.Node):
            if info(source).members and info(node).flat in self.schedule.resident:
                return f"resident:{info(node).flat}"
            return self._label(source)  # an AllReduce works in place
        if node.op == "placeholder" or (info(node).flat in self.schedule.resident and kind == "all_gather"):
            return f"{'shard' if kind == 'shard' else 'resident'}:{info(node).flat}"
        return f"{self.phase.name}:{node.name}"

    def _throttle(self, node: fx.Node) -> Callable[..., Any]:
        freed: Any = node.args[0]
        streams, events, name = self.streams, self.events, freed.name

        def run() -> None:
            streams.wait("unshard", events[name])

        return run

    def _flattener(self, node: fx.Node) -> Flatten:
        """What a FLAT or a KEEP of whole gradients does with them: gradients, a flat buffer, whether to add to it."""
        flat = self._flat(node).flat
        numels = [p.numel for p in flat.parameters]
        strides = [p.stride for p in flat.parameters]
        plan = FlattenPlan(flat.offsets, numels, flat.padded_numel, self.world.device)
        divisor: Any = node.args[4]
        scale = 1.0 / divisor

        def flatten(gradients: Sequence[Tensor | None], out: Tensor, accumulate: bool) -> None:
            flatten_cast_scale(
                gradients, flat.offsets, numels, out, scale, strides=strides, plan=plan, accumulate=accumulate
            )

        return flatten

    def _flatten_grads(self, node: fx.Node) -> Callable[..., Any]:
        storage, streams, events = self._flat(node), self.streams, self.events
        flat = storage.flat
        out = self._place(node, flat.reduce_dtype, flat.padded_numel)
        self.buffers[node] = out
        flatten, before = self._flattener(node), self._before(node, "compute")
        label, done, adds_kept = self._label(node), _done(node), takes_kept(node)
        accumulates = self.schedule.accumulation != NOTHING_KEPT  # then ACC does not know what was not asked for

        def run(gradients: Sequence[Tensor | None]) -> None:
            if accumulates:
                gradients = self._wanted(storage, gradients)
            before()
            streams.touch("compute", label, True)
            if adds_kept:
                total = storage.kept.take_whole()
                flatten(gradients, total, True)
                cast_shard(total, out)
            else:
                flatten(gradients, out, False)
            events[done] = streams.record("compute")

        return run

    def _wanted(self, storage: FlatStorage, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients but those that this backward was not asked for."""
        skipped = self.executor.skipped
        return [None if fqn in skipped else g for fqn, g in zip(storage.flat.fqns, gradients)] if skipped else gradients

    def _keep_grads(self, node: fx.Node) -> Callable[..., Any]:
        storage, flatten = self._flat(node), self._flattener(node)
        return lambda gradients: storage.kept.keep_whole(self._wanted(storage, gradients), flatten)

    def _keep_shard(self, node: fx.Node) -> Callable[..., Any]:
        storage, world, streams, executor = self._flat(node), self.world, self.streams, self.executor
        source: Any = node.args[0]
        value, label = self.buffers[source], self._label(source)
        flatten = self.phase.one("flatten_grads", storage.flat.name)
        assert flatten is not None
        present = [g is not None for g in flatten.args[0]]  # type: ignore[union-attr]

        def run() -> None:
            streams.touch("compute", label, False)
            skipped = executor.skipped
            storage.kept.note([p and fqn not in skipped for p, fqn in zip(present, storage.flat.fqns)])
            if world.completes():
                storage.kept.keep_shards(world.reduced_shards(storage.flat, value))

        return run

    def _reduce_scatter(self, node: fx.Node) -> Callable[..., Any]:
        storage, streams, events = self._flat(node), self.streams, self.events
        flat = storage.flat
        source: Any = node.args[0]
        held = self.world.held_numel(flat)
        dtype = self.schedule.reduced_dtype(flat)
        out, staging = self._out_and_staging(node, dtype, held, (flat.F - 1) * flat.shard_numel, flat.reduce_dtype)
        self.buffers[node] = out
        issue = self.world.bind_reduce_scatter(flat, self.buffers[source], out, staging)
        before, ready, done = self._before(node, "reduce"), _done(source), _done(node)
        read, label = self._label(source), self._label(node)

        def run() -> Pending:
            before()
            streams.wait("reduce", events[ready])
            with streams.on("reduce"):
                streams.touch("reduce", read, False)
                streams.touch("reduce", label, True)
                pending = issue(None)
                events[done] = streams.record("reduce")
            return pending

        return run

    def _out_and_staging(
        self, node: fx.Node, dtype: torch.dtype, numel: int, staging_numel: int, staging_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        slot = node.meta.get("slot")
        if slot is None:
            empty = torch.empty(0, dtype=dtype, device=self.world.device)
            return empty, empty
        out = self.executor.slot(slot, dtype, numel)
        if not self.schedule.direct_exchange:
            return out, None
        staging_bytes = staging_numel * staging_dtype.itemsize
        start = slot.offset + aligned(numel * dtype.itemsize)
        return out, self.executor.arena[start : start + staging_bytes].view(staging_dtype)

    def _all_reduce(self, node: fx.Node) -> Callable[..., Any]:
        storage, streams, events = self._flat(node), self.streams, self.events
        source: Any = node.args[0]
        value = self.buffers[source]
        self.buffers[node] = value
        slot = node.meta.get("slot")
        staging = self.executor.slot(slot, value.dtype, slot.num_bytes // value.dtype.itemsize) if slot else value[:0]
        kept = (lambda: storage.kept.shards) if takes_kept(node) else None
        issue, before = self.world.bind_all_reduce(storage.flat, value, staging, kept), self._before(node, "replicate")
        label, done = self._label(node), _done(node)
        ready = _done(source) if info(source).kind != "wait" else None

        def run(previous: Pending | None = None) -> Pending:
            before()
            if ready is not None:
                streams.wait("replicate", events[ready])
            with streams.on("replicate"):
                streams.touch("replicate", label, True)
                pending = issue(previous)
                events[done] = streams.record("replicate")
            return pending

        return run

    def _store_grad(self, node: fx.Node) -> Callable[..., Any]:
        queue, streams, events = info(node).queue, self.streams, self.events
        source: Any = node.args[0]
        held = self.world.held_numel(self._flat(node).flat)
        value = self.buffers[source][:held]
        slot = node.meta.get("slot")
        out = self.executor.slot(slot, value.dtype, held, on_host=True) if slot else torch.empty(0, dtype=value.dtype)
        self.buffers[node] = out
        before, ready, done = self._before(node, queue), _done(source), _done(node)
        read, label = self._label(source), self._label(node)

        def run(previous: Pending = DONE) -> Pending:
            before()
            streams.wait(queue, events[ready])
            with streams.on(queue):
                streams.touch(queue, read, False)
                streams.touch(queue, label, True)
                if previous is DONE:
                    out.copy_(value, non_blocking=True)
                    pending: Pending = DONE
                else:
                    pending = _Stored(previous, value, out)
                events[done] = streams.record(queue)
            return pending

        return run

    def _accumulate_grad(self, node: fx.Node) -> Callable[..., Any]:
        storage, world, streams, executor = self._flat(node), self.world, self.streams, self.executor
        source: Any = node.args[0]
        fqns = storage.flat.fqns
        accumulate = storage.bind_accumulate(self.buffers[source][: world.held_numel(storage.flat)])
        start: Any = node.args[3] if len(node.args) > 3 else 0
        stop = start + len(storage.flat.parameters)
        static = [g is not None for g in self._gradients(info(node).flat or "")]
        missing, label = not all(static), self._label(source)
        reader = "host" if self.schedule.offloaded else "compute"

        taken = {*self.schedule.accumulation.kept, *self.schedule.accumulation.kept_shards}

        def end_accumulation(present: list[bool]) -> None:
            streams.touch(reader, label, False)
            if world.completes():
                storage.kept.clear()
                accumulate(present[start:stop])

        if taken:  # then `presence` knows what is kept and what is skipped
            return end_accumulation

        def run(present: list[bool] | None = None) -> None:
            streams.touch(reader, label, False)
            if world.completes():
                flags = present[start:stop] if present is not None else static if missing else None
                if executor.skipped:
                    flags = [f not in executor.skipped and w for f, w in zip(fqns, flags or [True] * len(fqns))]
                accumulate(flags)

        return run

    def _gradients(self, flat: str) -> Sequence[Any]:
        """The gradients of a FlatParameter in the unpruned backward: what is None there is None on every rank."""
        assert self.schedule.backward is not None
        node = self.schedule.backward.one("flatten_grads", flat)
        assert node is not None
        return node.args[0]  # type: ignore[return-value]

    def _presence(self, node: fx.Node) -> Callable[..., Any]:
        flags: Any = node.args[0]
        world, executor = self.world, self.executor
        accumulation = self.schedule.accumulation
        if not (accumulation.kept or accumulation.kept_shards):
            return lambda: world.presence(flags)
        ends = sorted(self.phase.nodes("accumulate_grad"), key=lambda n: n.args[3])  # type: ignore[arg-type, return-value]
        places = [
            (storage.kept, i, fqn)
            for n in ends
            for storage in [self._flat(n)]
            for i, fqn in enumerate(storage.flat.fqns)
        ]

        def run() -> Callable[[], list[bool]]:
            own = (flag and fqn not in executor.skipped for flag, (_, _, fqn) in zip(flags, places, strict=True))
            return world.presence([a or kept.present(i) for a, (kept, i, _) in zip(own, places)])

        return run


class _Stored(Pending):
    """A gradient that is copied once the collective before it has ended."""

    def __init__(self, previous: Pending, value: Tensor, out: Tensor):
        self.previous, self.value, self.out = previous, value, out

    def wait(self) -> None:
        self.previous.wait()
        self.out.copy_(self.value)


def _done(node: fx.Node) -> str:
    """Key of the event that marks the node's result as written."""
    return f"{node.name}:done"
