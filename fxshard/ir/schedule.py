"""The schedule: the one object that passes edit, the verifier proves, the runtime runs and viz draws.

A `Phase` is an fx.Graph whose node order IS the issue order. Every node of a unit says so in its info, stamped when it
is made; nothing is recognised by name or by an operator pattern.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import ops
from fxshard.ir.layout import FlatParameter

INFO = "fxshard"
"""Key of a node's `NodeInfo` in `node.meta`."""


@dataclass
class NodeInfo:
    """What a node is to the schedule.

    `kind` is one of `ops.NODE_KINDS`.
    """

    kind: str
    flat: str | None = None
    unit: str | None = None
    queue: str = "compute"
    fqn: str | None = None
    by: str = "capture"
    """The pass that put the node there."""
    moved_by: tuple[str, ...] = ()
    """The passes that moved it, in order."""
    num_bytes: int = 0


@dataclass(frozen=True)
class Slot:
    """A place in the arena: `num_bytes` from `offset`. `after` names the nodes whose end frees the bytes for this
    use."""

    offset: int
    num_bytes: int
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remark:
    """What a pass did (`passed`) or could not do (`missed`) for one unit, and why."""

    by: str
    kind: str
    unit: str
    text: str


class Remarks:
    """Collects what one pass says; the manager hands one to each pass."""

    def __init__(self, by: str):
        self.by = by
        self.items: list[Remark] = []

    def passed(self, unit: str, text: str) -> None:
        self.items.append(Remark(self.by, "passed", unit, text))

    def missed(self, unit: str, text: str) -> None:
        self.items.append(Remark(self.by, "missed", unit, text))


@dataclass(frozen=True)
class PassRecord:
    """One pass as it ran: its text form, seconds taken, nodes added and moved."""

    text: str
    seconds: float
    added: int
    moved: int


@dataclass
class MemoryPlan:
    """What plan-memory decided, in bytes."""

    arena_bytes: int = 0
    """Size of the arena all phases of this schedule share."""
    resident_bytes: int = 0
    """Buffers kept from forward to backward; they lie outside the arena."""
    peak_gathered_bytes: int = 0
    """Most bytes of gathered parameters alive at once, residents included."""
    peak_gradient_bytes: int = 0
    """Most bytes of unsharded gradients and reduce staging alive at once."""
    saved_weight_bytes: int = 0
    """What forward keeps for backward because it is made from a parameter and data together; outside the arena."""


def info(node: fx.Node) -> NodeInfo:
    """The node's info; a plain operator of the model is `compute`."""
    found = node.meta.get(INFO)
    return found if found is not None else _COMPUTE


_COMPUTE = NodeInfo("compute")


class Phase:
    """The `forward` or `backward` graph of a step, or an `inference` graph; the order of its nodes is the order of issue."""

    def __init__(self, name: str, graph: fx.Graph, flats: Mapping[str, FlatParameter]):
        self.name = name
        self.graph = graph
        self.flats = flats
        self._index: dict[tuple[str | None, str | None], list[fx.Node]] | None = None

    # -- queries

    def nodes(self, kind: str | None = None, flat: str | None = None) -> list[fx.Node]:
        """Nodes of a kind, of a FlatParameter, or both, in issue order."""
        if kind is not None and kind not in ops.NODE_KINDS:
            raise ValueError(f"kind={kind!r}: allowed are {', '.join(ops.NODE_KINDS)}")
        if self._index is not None:
            return list(self._index.get((kind, flat), ()))
        return [
            n
            for n in self.graph.nodes
            if (kind is None or info(n).kind == kind) and (flat is None or info(n).flat == flat)
        ]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """For code that only reads: inside, `nodes` is a look-up instead of a walk over the graph."""
        index: dict[tuple[str | None, str | None], list[fx.Node]] = {}
        for node in self.graph.nodes:
            kind, flat = info(node).kind, info(node).flat
            for key in {(kind, flat), (kind, None), (None, flat), (None, None)}:
                index.setdefault(key, []).append(node)
        self._index = index
        try:
            yield
        finally:
            self._index = None

    def one(self, kind: str, flat: str) -> fx.Node | None:
        """The only node of this kind and FlatParameter, or None."""
        found = self.nodes(kind, flat)
        if len(found) > 1:
            raise ScheduleError(
                f"phase '{self.name}' has {len(found)} {ops.LABELS.get(kind, kind)} of '{flat}', not one"
            )
        return found[0] if found else None

    @property
    def all_gathers(self) -> list[fx.Node]:
        return self.nodes("all_gather")

    @property
    def reduce_scatters(self) -> list[fx.Node]:
        return self.nodes("reduce_scatter")

    @property
    def all_reduces(self) -> list[fx.Node]:
        return self.nodes("all_reduce")

    @property
    def waits(self) -> list[fx.Node]:
        return self.nodes("wait")

    @property
    def frees(self) -> list[fx.Node]:
        return self.nodes("free")

    @property
    def output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def results(self) -> tuple[Any, ...]:
        """What the phase returns: nodes, constants and None."""
        return tuple(self.output.args[0])  # type: ignore[arg-type]

    def views(self, flat: str) -> list[fx.Node]:
        return self.nodes("param_view", flat)

    def full(self, flat: str) -> fx.Node | None:
        """The node the views of `flat` read: a WAIT, a cast, a `resident` or a `shard` placeholder; None if unused."""
        views = self.views(flat)
        return views[0].args[0] if views else None  # type: ignore[return-value]

    def steps(self) -> Iterator[tuple[str, list[fx.Node]]]:
        """The phase in issue order: communication nodes one by one, the operators between them as segments.

        A segment comes with the unit whose parameters it reads; where it reads none, the unit before goes on.
        """
        unit = ""
        segment: list[fx.Node] = []
        for node in self.graph.nodes:
            kind = info(node).kind
            if kind == "compute" and node.op == "call_function":
                owner = next((info(i).unit for i in node.all_input_nodes if info(i).kind == "param_view"), None)
                if owner is not None and owner != unit:
                    if segment:
                        yield unit, segment
                    unit, segment = owner, []
                segment.append(node)
            elif kind in ops.LABELS:
                if segment:
                    yield unit, segment
                segment = []
                yield "", [node]
        if segment:
            yield unit, segment

    def first_use(self, flat: str) -> fx.Node | None:
        """The first operator of the model that reads a parameter of `flat`, or None."""
        uses = [u for v in self.views(flat) for u in v.users if info(u).kind == "compute"]
        return min(uses) if uses else None

    def flats_in_use_order(self) -> list[str]:
        """FlatParameters this phase reads, by their first use."""
        flats = dict.fromkeys(
            info(v).flat for v in self.nodes("param_view")
        )  # in order: ties must not depend on hashes
        firsts = {flat: self.first_use(flat) for flat in flats if flat}
        return [flat for flat, _ in sorted(((f, n) for f, n in firsts.items() if n is not None), key=lambda p: p[1])]

    def blocker(self, node: fx.Node, anchor: fx.Node) -> fx.Node | None:
        """What stops `node` from standing before `anchor`: an input that comes later, or, for a collective, one of the
        same kind and FlatParameter that it would overtake. None when the move is legal. A cast travels along and does not
        block; a throttle stays where it is."""
        travelling = self._travelling(node)
        for member in travelling:
            for source in member.all_input_nodes:
                if source not in travelling and not source < anchor:
                    return source
        if anchor < node and info(node).kind in ops.COLLECTIVES:
            current = node.prev
            while current is not anchor.prev:
                if info(current).kind == info(node).kind and info(current).flat == info(node).flat:
                    return current
                current = current.prev
        return None

    def _travelling(self, node: fx.Node) -> list[fx.Node]:
        """The node and the inputs that belong to it alone, in order."""
        group = [node]
        for source in node.all_input_nodes:
            if info(source).kind == "cast_shard" and list(source.users) == [node]:
                group.insert(0, source)
        return group

    # -- moves

    def move_before(self, node: fx.Node, anchor: fx.Node, by: str = "user") -> bool:
        """Put `node` (and its cast) right before `anchor`.

        Returns whether anything moved. Raises ScheduleError, naming the node that pins it, if an input of `node` would
        come after it or a user before it.
        """
        if node.next is anchor or anchor in self._travelling(node):
            return False
        blocker = self.blocker(node, anchor)
        if blocker is not None:
            raise ScheduleError(f"{describe(node)} may not move before {describe(anchor)}: {describe(blocker)} pins it")
        for user in node.users:
            if user is not anchor and user < anchor:
                raise ScheduleError(
                    f"{describe(node)} may not move before {describe(anchor)}: {describe(user)} reads it"
                )
        for member in self._travelling(node):
            anchor.prepend(member)
            if (found := member.meta.get(INFO)) is not None:
                found.moved_by += (by,)
        return True

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        flat: FlatParameter | None,
        by: str,
        queue: str | None = None,
        num_bytes: int = 0,
        fqn: str | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Make a communication node at the graph's insertion point, its info stamped."""
        kind = ops.KINDS[function]
        label = name or f"{kind}_{flat.name if flat else 'all'}"
        node = self.graph.create_node("call_function", function, args, {}, name=identifier(label))
        node.meta[INFO] = NodeInfo(
            kind,
            flat.name if flat else None,
            flat.unit if flat else None,
            queue or ops.QUEUES.get(kind, "compute"),
            fqn,
            by,
            num_bytes=num_bytes,
        )
        return node

    def copy(self) -> tuple[Phase, dict[fx.Node, fx.Node]]:
        """A deep copy and the map from old to new nodes."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        old_output = self.output
        mapping[old_output] = graph.output(output)
        for old, new in mapping.items():
            new.meta = dict(old.meta)
            if INFO in old.meta:
                new.meta[INFO] = dataclasses.replace(old.meta[INFO])
        return Phase(self.name, graph, self.flats), mapping


def identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


def user_line(node: fx.Node) -> str:
    """`model.py:41` of the user's code that made the node, or ''."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    found = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else ""


def describe(node: fx.Node) -> str:
    """The node as a user knows it: `AG layers.1`, or the operator and the line it comes from, `mm.default (model.py:41)`."""
    found = info(node)
    if found.kind in ops.LABELS:
        return f"{ops.LABELS[found.kind]} {found.flat or ''}".strip()
    if found.kind == "param_view":
        return f"view of '{found.fqn}'"
    if node.op == "call_function":
        line = user_line(node)
        return f"{getattr(node.target, '__name__', node.target)}{f' ({line})' if line else ''}"
    return node.name


@dataclass
class Schedule:
    """Units, phases, memory plan and history of one captured call signature.

    `backward` is None for a forward-only schedule (no_grad, inference_mode).
    """

    flats: dict[str, FlatParameter]
    forward: Phase
    backward: Phase | None
    W: int
    F: int
    rate_limit: int | None = None
    rate_limit_bytes: int | None = None
    history: list[PassRecord] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    gradients: dict[str, fx.Node] = field(default_factory=dict)
    """Gradient node in backward of each trainable parameter that the outputs reach, by parameter name."""
    parameter_outputs: frozenset[int] = frozenset()
    """Positions of parameters among the outputs of backward: their gradients leave by ACC, not as outputs."""
    needs_presence: bool = False
    """Whether some choice of used outputs leaves a reached parameter without gradient."""
    direct_exchange: bool = True
    """Whether collectives need staging memory of ours (direct exchange) or bring their own (NCCL, virtual)."""
    held_shards: int = 1
    """Shards a process holds: 1, or all F in a virtual world."""
    resident: set[str] = field(default_factory=set)
    """FlatParameters that stay gathered from forward to backward."""
    established: set[str] = field(default_factory=set)
    """What the passes that ran provide."""

    renderer: ClassVar[Callable[[Schedule, str], None] | None] = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def units(self) -> list[str]:
        """Unit names in registration order; the root's parts count as one."""
        return list(dict.fromkeys(flat.unit for flat in self.flats.values()))

    @property
    def replicas(self) -> int:
        """R = W / F: ranks that hold the same shard."""
        return self.W // self.F

    def reduced_dtype(self, flat: FlatParameter) -> torch.dtype:
        """What a ReduceScatter's sum is rounded to: the dtype to sum further across replicas in, or that of `.grad`."""
        return flat.reduce_dtype if self.replicas > 1 else flat.dtype

    def counts(self, flat: str) -> bool:
        """Whether the rate limit counts this FlatParameter: residents are not, nor is the root in a forward-only schedule."""
        kept = "residents-kept" in self.established and self.backward is None and self.flats[flat].is_root
        return not kept and flat not in self.resident

    def text(self, level: str = "communication") -> str:
        """The schedule as text. `level`: `units`, `communication` (every communication node), or `all`."""
        from fxshard.ir.text import schedule_text

        return schedule_text(self, level)

    def skeleton(self) -> list[str]:
        """One line per collective in issue order: what all ranks must agree on."""
        lines = []
        for phase in self.phases:
            for n in phase.graph.nodes:
                kind = info(n).kind
                if kind in ops.COLLECTIVES or kind == "presence":
                    lines.append(f"{phase.name} {ops.LABELS[kind]} {info(n).flat} {info(n).num_bytes}")
        return lines

    def render(self, path: str) -> None:
        """Draw the schedule; the format follows the suffix of `path` (svg)."""
        assert Schedule.renderer is not None, "fxshard registers one when it is imported"
        Schedule.renderer(self, path)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def bytes_text(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or suffix == "GiB":
            return f"{num_bytes:.0f} {suffix}" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} {suffix}"
        num_bytes /= 1024
    raise AssertionError


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the node's fake value, symbolic sizes by their hints."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(hint, value.shape)) * value.dtype.itemsize


def hint(size: int | torch.SymInt) -> int:
    """A size as it was when captured; asking a symbolic size itself would fix it for good."""
    return size if isinstance(size, int) else int(size.node.hint)


def flatten_nodes(tree: Any) -> Iterator[fx.Node]:
    """Every node in a tree of arguments."""
    if isinstance(tree, fx.Node):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from flatten_nodes(value)
    elif isinstance(tree, (list, tuple, Sequence, Iterable)) and not isinstance(tree, (str, torch.Tensor)):
        for value in tree:
            yield from flatten_nodes(value)
