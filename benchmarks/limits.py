"""What bounds a step of fxshard: the same schedule without its communication, and its communication without the rest.

Both run what the model runs, lowered and bound as ever, over a world that stands before the real one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import fx

from benchmarks.systems import Trainer
from fxshard.ir import ops
from fxshard.ir.nodes import info
from fxshard.runtime.binder import Binder
from fxshard.runtime.world import DONE, Pending

BINDS = ("bind_all_gather", "bind_bucket", "bind_reduce_scatter", "bind_all_reduce")


class Before:
    """Stands before a world: `around(kind, flat, issue)` gives what is issued in place of each bound collective."""

    def __init__(self, world: Any, around: Callable[[str, str, Callable[[Any], Pending]], Callable[[Any], Pending]]):
        self.world, self.around = world, around

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.world, name)
        if name not in BINDS:
            return found

        def bind(flats: Any, *arguments: Any) -> Callable[[Any], Pending]:
            flat = flats.name if hasattr(flats, "name") else "+".join(f.name for f in flats)
            return self.around(name.removeprefix("bind_"), flat, found(flats, *arguments))

        return bind


class ComputeAlone(Trainer):
    """A step whose collectives do nothing. What it computes means nothing."""

    def __init__(self, *arguments: Any):
        super().__init__("fxshard", *arguments)
        super().step()  # the buffers hold numbers of the usual size from then on
        put_before(self.model, lambda kind, flat, issue: lambda previous: DONE)


class CommunicationAlone:
    """The collectives and waits of a step in their order, of a model that took a step, and nothing between them."""

    def __init__(self, trainer: Trainer):
        executor, schedule = executor_of(trainer.model), trainer.model.schedule
        executor.reserve(schedule.memory.arena_bytes, schedule.memory.host_bytes)
        self.storages = list(executor.storages.values())
        self.calls = [call for phase in schedule.phases for call in _calls(Binder(executor, schedule, phase))]

    def step(self) -> float:
        pending: dict[fx.Node, Any] = {}
        for storage in self.storages:
            storage.land()
        for node, function, sources in self.calls:
            pending[node] = function(*(pending[source] for source in sources))
        return 0.0


def _calls(binder: Binder) -> list[tuple[fx.Node, Callable[..., Any], list[fx.Node]]]:
    """Node, what runs it, and the nodes whose pending results it takes."""
    binder.events = defaultdict(lambda: None)  # of what is left out there are none, and a CPU waits for none
    found, issued = [], set()
    bound = binder.bind()
    for node in binder.phase.graph.nodes:
        kind = info(node).kind
        if kind in ops.COLLECTIVES or (kind == "wait" and node.args[0] in issued):
            takes_result = kind == "wait" or (kind == "all_reduce" and node.args[0] in issued)
            found.append((node, bound[node], [node.args[0]] if takes_result else []))
            issued.add(node)
    return found


class Exposed:
    """Seconds that the host waits in each collective of a model, from now on."""

    def __init__(self, model: Any):
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        """(kind, FlatParameter): one a wait."""
        put_before(model, self._timed)

    def _timed(self, kind: str, flat: str, issue: Callable[[Any], Pending]) -> Callable[[Any], Pending]:
        return lambda previous: _Timed(issue(previous), self.seconds[kind, flat])


class _Timed(Pending):
    def __init__(self, pending: Pending, seconds: list[float]):
        self.pending, self.seconds = pending, seconds

    def wait(self) -> None:
        started = time.perf_counter()
        self.pending.wait()
        self.seconds.append(time.perf_counter() - started)


def executor_of(model: Any) -> Any:
    return model.__dict__["_fxshard"].executor


def put_before(model: Any, around: Callable[[str, str, Callable[[Any], Pending]], Callable[[Any], Pending]]) -> None:
    executor = executor_of(model)
    executor.world = Before(executor.world, around)
    for program in executor.programs:
        program.unbind()
