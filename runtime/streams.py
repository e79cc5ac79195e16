"""Queues of the device: CUDA streams, nothing at all on a CPU, or a recorder that shows what the lowered code asks of
them.

Queues are `compute` (the caller's stream), `unshard`, `reduce` and `replicate`. A node is issued on its queue; `record`
marks a point of a queue, `wait` makes a queue wait for such a point. On CUDA the host waits for nothing but copies from and
to its own memory, where shards are offloaded.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

QUEUES = ("compute", "unshard", "reduce", "replicate")


class Streams:
    """A CPU has no streams: the host issues and waits in order, collectives run in their own threads."""

    def on(self, queue: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record(self, queue: str) -> Any:
        return None

    def wait(self, queue: str, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        """Wait on the host until all queues are empty: when memory moves, never in a step."""

    def wait_on_host(self, event: Any) -> None:
        """Let the host wait for an event: for what was copied from and to its own memory."""

    def touch(self, queue: str, buffer: str, write: bool) -> None:
        """Note that work on `queue` reads or writes a buffer; only the recorder keeps it."""


class CudaStreams(Streams):
    """One CUDA stream a queue; the compute queue is whatever stream is current.

    What may overlap: each queue with every other. Who records: the end of a gather, a flatten, a reduce and a phase, and
    whatever a throttle or the reuse of a slot waits for. Who waits: `compute` at a WAIT and for the phase before;
    `unshard` at a throttle; `reduce` for the flatten; `replicate` for the reduce; the queue of a node for the end of its
    slot's last use; all for the start of the phase (the optimizer wrote the shards on `compute`). Memory: arena,
    shards and residents outlive the step, so no stream needs to be recorded on a tensor.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {q: torch.cuda.Stream(device) for q in QUEUES if q != "compute"}

    def _stream(self, queue: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if queue == "compute" else self.streams[queue]

    def on(self, queue: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if queue == "compute" else torch.cuda.stream(self.streams[queue])

    def record(self, queue: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: str, event: Any) -> None:
        if event is not None:
            self._stream(queue).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def wait_on_host(self, event: Any) -> None:
        if event is not None:
            event.synchronize()


@dataclass
class Access:
    """Work on a queue that touches a buffer; `clock` is what had happened before it on every queue."""

    queue: str
    buffer: str
    write: bool
    time: int
    clock: dict[str, int]


@dataclass
class RecordingStreams(Streams):
    """Executes nothing asynchronously, but keeps the order that streams and events alone guarantee.

    Each queue, and the host, has a vector clock: its own position and the latest position of every other queue that it
    knows to be past. `races` lists pairs of accesses to one memory, one of them a write, that no chain of events orders.
    """

    clocks: dict[str, dict[str, int]] = field(
        default_factory=lambda: {q: dict.fromkeys((*QUEUES, "host"), 0) for q in (*QUEUES, "host")}
    )
    accesses: list[Access] = field(default_factory=list)

    def record(self, queue: str) -> dict[str, int]:
        return dict(self.clocks[queue])

    def wait(self, queue: str, event: dict[str, int] | None) -> None:
        mine = self.clocks[queue]
        for q, time in (event or {}).items():
            mine[q] = max(mine[q], time)

    def wait_on_host(self, event: dict[str, int] | None) -> None:
        for queue in self.clocks:  # what the host issues afterwards starts afterwards
            self.wait(queue, event)

    def touch(self, queue: str, buffer: str, write: bool) -> None:
        mine = self.clocks[queue]
        mine[queue] += 1
        mine["host"] = self.clocks["host"]["host"]  # what the host did before it issued this
        self.accesses.append(Access(queue, buffer, write, mine[queue], dict(mine)))

    def races(self, share: Callable[[str, str], bool] = operator.eq) -> list[tuple[Access, Access]]:
        """Unordered pairs. `share(a, b)` says whether two buffers have memory in common; by default equal names do."""
        return [
            (first, second)
            for i, first in enumerate(self.accesses)
            for second in self.accesses[i + 1 :]
            if (first.write or second.write)
            and second.clock[first.queue] < first.time
            and share(first.buffer, second.buffer)
        ]
