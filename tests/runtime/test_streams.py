"""CUDA lowering without a GPU: the lowered code driven over recording streams, its memory accesses checked for races."""

from __future__ import annotations

import pytest
import torch

import fxshard
from examples.models import GPT, GPTConfig
from fxshard.ir.nodes import info
from fxshard.runtime import VirtualWorld
from fxshard.runtime.binder import Binder
from fxshard.runtime.streams import QUEUES, RecordingStreams


def train(streams, F, contributors, steps=2, **options):
    """Run steps over the given streams; returns the model. The optimizer's writes to the shards are recorded too."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, width=16, heads=2, vocabulary=32, length=8))
    world = VirtualWorld(F, contributors=contributors)
    fxshard.compile(model, world=world, **options)
    state = model.__dict__["_fxshard"]
    state.executor.streams = streams
    for _ in range(steps):
        for rank in range(contributors):
            with world.rank(rank):
                tokens = torch.randint(32, (2, 8))
                model(tokens=tokens, targets=tokens).backward()
        for flat in state.flats:
            streams.touch("host" if options.get("cpu_offload") else "compute", f"shard:{flat}", True)
    return model


def shares_memory(schedule):
    """Whether two recorded buffer names have bytes in common: shards and residents by name, the rest by arena and slot."""
    nodes = {f"{p.name}:{n.name}": n for p in schedule.phases for n in p.graph.nodes if "slot" in n.meta}
    slots = {name: n.meta["slot"] for name, n in nodes.items()}
    on_host = {name for name, n in nodes.items() if info(n).kind == "store_grad"}

    def share(a: str, b: str) -> bool:
        if a == b:
            return True
        if a not in slots or b not in slots or (a in on_host) != (b in on_host):
            return False
        x, y = slots[a], slots[b]
        return x.offset < y.offset + y.num_bytes and y.offset < x.offset + x.num_bytes

    return share


CONFIGURATIONS = [
    pytest.param(4, 1, {}, id="full-shard"),
    pytest.param(2, 4, {}, id="hybrid"),
    pytest.param(1, 2, {}, id="replicate"),
    pytest.param(4, 1, {"rate_limit": 1}, id="limit-1"),
    pytest.param(4, 1, {"backward_prefetch": 2, "forward_prefetch": 2, "rate_limit": None}, id="deep-prefetch"),
    pytest.param(4, 1, {"reshard_after_forward": False}, id="all-resident"),
    pytest.param(
        2, 4, {"mixed_precision": fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)}, id="bf16-hybrid"
    ),
    pytest.param(1, 2, {"mixed_precision": fxshard.MixedPrecision(param=torch.bfloat16)}, id="bf16-replicate"),
    pytest.param(4, 1, {"cpu_offload": True}, id="offload"),
    pytest.param(
        2, 4, {"cpu_offload": True, "mixed_precision": fxshard.MixedPrecision(torch.bfloat16)}, id="offload-hybrid"
    ),
    pytest.param(1, 2, {"cpu_offload": True}, id="offload-replicate"),
    pytest.param(1, 1, {"cpu_offload": True}, id="offload-alone"),
]


@pytest.mark.parametrize(("F", "contributors", "options"), CONFIGURATIONS)
def test_every_access_is_ordered(F, contributors, options):
    streams = RecordingStreams()
    model = train(streams, F, contributors, **options)
    assert streams.races(shares_memory(model.schedule)) == []
    queues = {a.queue for a in streams.accesses}
    assert ("unshard" in queues) == (F > 1)
    assert ("replicate" in queues) == (contributors > F)
    # Every planned buffer was written, every gathered one read on compute after it.
    schedule = model.schedule
    written = {a.buffer for a in streams.accesses if a.write}
    read = {a.buffer for a in streams.accesses if a.queue == "compute"}
    for phase in schedule.phases:
        for gather in phase.all_gathers:
            flat = info(gather).flat
            label = f"resident:{flat}" if flat in schedule.resident else f"{phase.name}:{gather.name}"
            assert label in written and label in read


class Impatient(RecordingStreams):
    """A host that does not wait for copies from and to its memory."""

    def wait_on_host(self, event):
        return None


def test_the_host_waits_for_gradients_before_it_reads_them():
    streams = Impatient()
    model = train(streams, 2, 4, cpu_offload=True)
    stores = {f"backward:{n.name}" for n in model.schedule.backward.nodes("store_grad")}
    races = streams.races(shares_memory(model.schedule))
    assert {a.buffer for a, b in races if a.queue == "replicate" and b.queue == "host"} == stores


@pytest.mark.parametrize("streams", [RecordingStreams(), Impatient()], ids=["waits", "does-not"])
def test_the_host_waits_for_shards_to_be_read_before_it_writes_them(streams):
    """After a forward alone, which no gradient follows."""
    model = train(RecordingStreams(), 4, 1, steps=0, cpu_offload=True)
    state = model.__dict__["_fxshard"]
    state.executor.streams = streams
    with torch.no_grad():
        model(tokens=torch.zeros(2, 8, dtype=torch.int64))
    for flat in state.flats:
        streams.touch("host", f"shard:{flat}", True)
    raced = {a.buffer for a, b in streams.races() if b.queue == "host"}
    assert raced == ({f"shard:{flat}" for flat in state.flats} if isinstance(streams, Impatient) else set())


class Forgetful(RecordingStreams):
    """Drops the waits of one queue, as a runtime with a missing event would."""

    def __init__(self, queue):
        super().__init__()
        self.deaf = queue

    def wait(self, queue, event):
        if queue != self.deaf:
            super().wait(queue, event)


@pytest.mark.parametrize("queue", ["compute", "unshard", "reduce", "replicate"])
def test_a_missing_wait_is_a_race(queue):
    streams = Forgetful(queue)
    model = train(streams, 2, 4)
    races = streams.races(shares_memory(model.schedule))
    assert any(queue in (a.queue, b.queue) for a, b in races)


def test_a_reused_slot_needs_its_event():
    """Without the free's event a gather would overwrite weights that compute still reads."""

    class NoReuse(RecordingStreams):
        def record(self, queue):
            event = super().record(queue)
            return event if queue != "compute" or self.starting else None

        starting = True

    streams = NoReuse()
    train(streams, 4, 1, steps=1)
    before = len(streams.accesses)
    streams.starting = False
    torch.manual_seed(1)
    model = train(streams, 4, 1, steps=1)
    share = shares_memory(model.schedule)
    late = streams.accesses[before:]
    streams.accesses = late
    assert any(a.queue == "compute" and b.queue == "unshard" and b.write for a, b in streams.races(share)), (
        "frees are not what orders slot reuse"
    )


class TwoCallers(RecordingStreams):
    """The compute queue is the caller's stream, and the caller may change streams."""

    def __init__(self):
        super().__init__()
        names = (*QUEUES, "host", "other")
        self.clocks = {q: dict.fromkeys(names, 0) for q in names}
        self.caller = "compute"

    def _queue(self, queue):
        return self.caller if queue == "compute" else queue

    def record(self, queue):
        return super().record(self._queue(queue))

    def wait(self, queue, event):
        super().wait(self._queue(queue), event)

    def touch(self, queue, buffer, write):
        super().touch(self._queue(queue), buffer, write)


def test_phases_called_on_different_streams_are_ordered():
    streams = TwoCallers()
    torch.manual_seed(0)
    model = fxshard.compile(GPT(GPTConfig(layers=3, width=16, heads=2, vocabulary=32, length=8)), F=4)
    model.__dict__["_fxshard"].executor.streams = streams
    tokens = torch.randint(32, (2, 8))
    for caller in ("compute", "other", "compute"):
        streams.caller = caller
        model(tokens=tokens, targets=tokens).backward()
    assert {a.queue for a in streams.accesses} >= {"compute", "other", "unshard"}
    assert streams.races(shares_memory(model.schedule)) == []


def most_alive_on_the_stream(streams, schedule):
    """Gathered buffers that may be alive at once when every stream runs as far ahead as events let it."""
    most = 0
    for phase in schedule.phases:
        labels = {f"{phase.name}:{g.name}" for g in phase.all_gathers if schedule.counts(info(g).flat)}
        ends = {a.buffer: a.time for a in streams.accesses if a.queue == "compute" and a.buffer in labels}
        issued = []
        for a in streams.accesses:
            if a.queue == "unshard" and a.buffer in labels:
                issued.append(a.buffer)
                most = max(most, sum(ends[b] > a.clock["compute"] for b in issued))
    return most


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_throttles_alone_hold_the_stream_to_the_limit(limit, monkeypatch):
    """The events of reused slots hold it too where buffers are equally large: here they are left out."""
    monkeypatch.setattr(Binder, "_before", lambda self, node, queue: lambda: None)
    deep = {"backward_prefetch": 3, "forward_prefetch": 3}
    streams = RecordingStreams()
    model = train(streams, 4, 1, steps=1, rate_limit=limit, **deep)
    assert most_alive_on_the_stream(streams, model.schedule) == limit
    free = RecordingStreams()
    model = train(free, 4, 1, steps=1, rate_limit=None, **deep)
    assert most_alive_on_the_stream(free, model.schedule) > 3
