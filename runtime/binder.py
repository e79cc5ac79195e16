"""Binds the communication nodes of a phase to their buffers, streams and collectives: a function or a view for each.

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
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxshard.ir import FlatParameter, Phase, Schedule, Slot, ops
from fxshard.ir.layout import aligned
from fxshard.ir.nodes import info, takes_kept
from fxshard.runtime.accumulation import NOTHING_KEPT, Flatten
from fxshard.runtime.kernels import cast_shard
from fxshard.runtime.kernels.bound import BoundFlatten
from fxshard.runtime.world import DONE, Issue, Pending

if TYPE_CHECKING:
    from fxshard.runtime.executor import Executor
    from fxshard.runtime.storage import FlatStorage


class Binder:
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
        storage = self._flat(node)
        source_node: Any = node.args[0]
        shard = self.buffers[source_node]
        full = self._place(node, storage.flat.param_dtype, storage.flat.padded_numel)
        self.buffers[node] = full
        issue = self.world.bind_all_gather(storage.flat, shard, full)
        return self._gathering(node, issue, [self._label(source_node)], [self._label(node)])

    def _bucket(self, node: fx.Node) -> Callable[..., Any]:
        """An AllGather of several: the members' buffers lie one after another in its slot, what is staged behind them."""
        flats = [self.executor.storages[flat].flat for flat in info(node).members]
        sources: Any = node.args[0]
        fulls, staging = self._members(node, flats)
        place = dict(zip(info(node).members, fulls))
        self.buffers.update({wait: place[info(wait).flat or ""] for wait in node.users})
        shards = [self.buffers[source] for source in sources]
        issue = self.world.bind_bucket(flats, shards, fulls, staging)
        written = dict.fromkeys(map(self._label, node.users))
        return self._gathering(node, issue, map(self._label, sources), written)

    def _gathering(
        self, node: fx.Node, issue: Issue, read: Iterable[str], written: Iterable[str]
    ) -> Callable[..., Any]:
        """`issue` on the queue of AllGathers, behind what frees the slot; the labels of what it reads and writes."""
        streams, events, before, done = self.streams, self.events, self._before(node, "unshard"), _done(node)
        touched = [(label, False) for label in read] + [(label, True) for label in written]

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
        if node not in self.buffers and source in self.buffers:  # a bucket has told its members' WAITs theirs
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
        divisor: Any = node.args[4]
        return BoundFlatten(self._flat(node).flat, 1.0 / divisor, self.world.device)

    def _flatten_grads(self, node: fx.Node) -> Callable[..., Any]:
        storage, streams, events = self._flat(node), self.streams, self.events
        flat = storage.flat
        lands, fixed = self.schedule.lands(flat), None
        if not (lands and flat.F == 1):
            fixed = self.buffers[node] = self._place(node, flat.reduce_dtype, flat.padded_numel)
        flatten, before = self._flattener(node), self._before(node, "compute")
        label, done, adds_kept = self._label(node), _done(node), takes_kept(node)
        accumulates = self.schedule.accumulation != NOTHING_KEPT  # then ACC does not know what was not asked for

        def run(gradients: Sequence[Tensor | None]) -> None:
            if accumulates:
                gradients = self._wanted(storage, gradients)
            before()
            # Memory that was on the compute queue is the reduce queue's from the event below on.
            landed = storage.land() if lands else None
            out = landed if fixed is None else fixed
            assert out is not None
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
        buffer, staging_start = self.buffers[source], 0
        if not self.schedule.lands(flat):
            dtype = self.schedule.reduced_dtype(flat)
            self.buffers[node] = self._place(node, dtype, self.world.held_numel(flat))
            staging_start = aligned(self.buffers[node].numel() * dtype.itemsize)
        staging = self._staging(node, staging_start)
        issue = self._on_result(node, lambda out: self.world.bind_reduce_scatter(flat, buffer, out, staging))
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

    def _staging(self, node: fx.Node, start: int) -> Tensor | None:
        """Where a ReduceScatter receives, behind `start` bytes of its slot; None if it needs nothing."""
        if not self.schedule.direct_exchange:
            return None
        flat = self._flat(node).flat
        numel, slot = self.schedule.received_chunks(flat) * flat.shard_numel, node.meta.get("slot")
        if slot is None:
            assert numel == 0, f"{node} has no slot"
            return torch.empty(0, dtype=flat.reduce_dtype, device=self.world.device)
        behind = dataclasses.replace(slot, offset=slot.offset + start, num_bytes=slot.num_bytes - start)
        return self.executor.slot(behind, flat.reduce_dtype, numel)

    def _on_result(self, node: fx.Node, bind: Callable[[Tensor], Issue]) -> Issue:
        """A collective bound to the buffer of `node`, or to what has landed, again whenever that has moved."""
        return bind(self.buffers[node]) if node in self.buffers else _Landed(self._flat(node), bind)

    def _all_reduce(self, node: fx.Node) -> Callable[..., Any]:
        storage, streams, events = self._flat(node), self.streams, self.events
        source: Any = node.args[0]
        if source in self.buffers:
            self.buffers[node] = self.buffers[source]
        slot, dtype = node.meta.get("slot"), self.schedule.reduced_dtype(storage.flat)
        numel = slot.num_bytes // dtype.itemsize if slot else 0
        staging = self.executor.slot(slot or Slot(0, 0), dtype, numel)
        kept = (lambda: storage.kept.shards) if takes_kept(node) else None
        issue = self._on_result(node, lambda value: self.world.bind_all_reduce(storage.flat, value, staging, kept))
        before = self._before(node, "replicate")
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
        reduced = self.buffers[source][: world.held_numel(storage.flat)] if source in self.buffers else None
        accumulate = storage.bind_accumulate(reduced)
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
        told = (n for n in self.phase.nodes("accumulate_grad") if len(n.args) > 3)
        ends = sorted(told, key=lambda n: n.args[3])  # type: ignore[arg-type, return-value]
        flats = tuple(info(n).flat or "" for n in ends)
        if not (accumulation.kept or accumulation.kept_shards):
            return lambda: world.presence(flats, flags)
        places = [
            (storage.kept, i, fqn)
            for n in ends
            for storage in [self._flat(n)]
            for i, fqn in enumerate(storage.flat.fqns)
        ]

        def run() -> Callable[[], list[bool]]:
            own = (flag and fqn not in executor.skipped for flag, (_, _, fqn) in zip(flags, places, strict=True))
            return world.presence(flats, [a or kept.present(i) for a, (kept, i, _) in zip(own, places)])

        return run


class _Landed:
    """A collective whose result lies where the gradient of this backward has landed."""

    def __init__(self, storage: FlatStorage, bind: Callable[[Tensor], Issue]):
        self.storage, self.bind = storage, bind
        self.bound_to: Tensor | None = None
        self.issue: Issue | None = None

    def __call__(self, previous: Pending | None) -> Pending:
        landed = self.storage.landed
        assert landed is not None
        if landed is not self.storage.own:
            return self.bind(landed)(previous)
        if self.issue is None or self.bound_to is not landed:
            self.issue, self.bound_to = self.bind(landed), landed
        return self.issue(previous)


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
