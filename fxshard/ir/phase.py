"""A phase: an fx.Graph whose node order IS the order of issue, what can be asked of it, and the moves.

Every node of a unit says so in its info, stamped when it is made; nothing is recognised by name or by an operator pattern.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import ops
from fxshard.ir.aliasing import alias_roots, has_effect, mutated_inputs, storage_users
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import INFO, NodeInfo, describe, identifier, info

if TYPE_CHECKING:
    from fxshard.ir.schedule import Schedule


class Phase:
    """The `forward` or `backward` graph of a step, or an `inference` graph; the order of its nodes is the order of issue."""

    def __init__(self, name: str, graph: fx.Graph, flats: Mapping[str, FlatParameter]):
        self.name = name
        self.graph = graph
        self.flats = flats
        self.schedule: Schedule | None = None
        """The schedule it belongs to: its limits bound the moves."""
        self._index: dict[tuple[str | None, str | None], list[fx.Node]] | None = None
        self._in_order = True
        """Whether the lists of the index still are in issue order."""

    # -- queries

    def nodes(self, kind: str | None = None, flat: str | None = None) -> list[fx.Node]:
        """Nodes of a kind, of a FlatParameter, or both, in issue order; a bucket is of each of its members."""
        if kind is not None and kind not in ops.NODE_KINDS:
            raise ValueError(f"kind={kind!r}: allowed are {', '.join(ops.NODE_KINDS)}")
        if self._index is not None:
            found = [n for n in self._index.get((kind, flat), ()) if not n._erased]
            return found if self._in_order else sorted(found)
        return [
            n
            for n in self.graph.nodes
            if (kind is None or info(n).kind == kind) and (flat is None or flat in info(n).flats)
        ]

    @contextlib.contextmanager
    def indexed(self) -> Iterator[None]:
        """Inside, `nodes` is a look-up instead of a walk over the graph. For code that changes the graph by `call`, moves
        and erasing nodes only, and the kind and FlatParameter of no node."""
        index: dict[tuple[str | None, str | None], list[fx.Node]] = {}
        self._index, self._in_order = index, True
        for node in self.graph.nodes:
            self._enter(node)
        try:
            yield
        finally:
            self._index = None

    def _enter(self, node: fx.Node) -> None:
        """Put a node into the index."""
        assert self._index is not None
        kind, flats = info(node).kind, (None, *info(node).flats)
        for key in dict.fromkeys((k, f) for k in (None, kind) for f in flats):
            self._index.setdefault(key, []).append(node)

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

        A segment comes with the unit whose code its operators are, as capture found it; '' where there is none.
        """
        unit, segment = "", []  # type: ignore[var-annotated]
        for node in self.graph.nodes:
            found = info(node)
            if found.kind == "compute" and node.op == "call_function":
                if segment and (found.unit or "") != unit:
                    yield unit, segment
                    segment = []
                unit = found.unit or ""
                segment.append(node)
            elif found.kind in ops.LABELS:
                if segment:
                    yield unit, segment
                segment = []
                yield "", [node]
        if segment:
            yield unit, segment

    def wait_of(self, collective: fx.Node) -> fx.Node:
        """The WAIT of a collective. Raises ScheduleError if it has none, or several."""
        waits = [u for u in collective.users if info(u).kind == "wait"]
        if len(waits) != 1:
            raise ScheduleError(f"{describe(collective)} has {len(waits)} waits, not one")
        return waits[0]

    def landing(self, flat: str) -> fx.Node | None:
        """Where the reduced gradient of `flat` ends: its ACC, or the KEEP of its shard; None where nothing is reduced."""
        return self.one("accumulate_grad", flat) or self.one("keep_shard", flat)

    def first_use(self, flat: str) -> fx.Node | None:
        """The first operator of the model that reads a parameter of `flat`, or None."""
        uses = [u for v in self.views(flat) for u in v.users if info(u).kind == "compute"]
        return min(uses) if uses else None

    def flats_in_use_order(self) -> list[str]:
        """FlatParameters this phase reads, by their first use."""
        firsts: dict[str, fx.Node] = {}  # in order: ties must not depend on hashes
        for view in self.nodes("param_view"):
            flat, uses = info(view).flat or "", [u for u in view.users if info(u).kind == "compute"]
            if flat and uses:
                firsts[flat] = min(uses) if flat not in firsts else min(firsts[flat], *uses)
        return sorted(firsts, key=lambda flat: firsts[flat])

    def blocker(self, node: fx.Node, anchor: fx.Node) -> fx.Node | None:
        """What stops `node` from standing right before `anchor`; None when the move is legal.

        An input, a user, a FREE of memory it reads or a reader of what it frees, a write to memory they share, another
        random operator or write, a collective of the same kind and FlatParameter and, where ranks have agreed on the order of
        collectives, any collective. A cast, a load and a throttle travel with their gather, a STORE with its reduce.
        """
        if node.op in _FIXED or anchor.op in ("placeholder", "get_attr"):
            return anchor
        group = self._travelling(node)
        earlier = anchor < node
        tied = {other for member in group for other in (member.all_input_nodes if earlier else member.users)}
        if info(node).kind == "free":
            tied |= set(storage_users(node.args[0]))  # type: ignore[arg-type]
        between = _between(anchor, node) if earlier else _between(node.next, anchor)
        for other in reversed(between) if earlier else between:
            if other not in group and (other in tied or self._conflict(node, other)):
                return other
        return None

    def _travelling(self, node: fx.Node) -> list[fx.Node]:
        """The node and what goes with it, in order: a gather's CAST or LOAD and the throttle that holds it back, a WAIT's
        views, a reduce's STORE."""
        own = [i for i in node.all_input_nodes if info(i).kind in ops.UNSHARDS_LOCALLY and list(i.users) == [node]]
        before = node.prev
        while info(node).kind == "all_gather" and (before in own or self._throttles(before, node)):
            if before not in own:
                own.append(before)
            before = before.prev
        return [*sorted(own), node, *(u for u in node.users if info(u).kind in ("param_view", "store_grad"))]

    @staticmethod
    def _throttles(throttle: fx.Node, gather: fx.Node) -> bool:
        return info(throttle).kind == "throttle" and info(throttle).flat == info(gather).flat

    def _conflict(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether the order of the two matters though neither reads the other."""
        kind, other_kind = info(node).kind, info(other).kind
        if kind in ops.GROUPS and other_kind in ops.GROUPS:
            same = kind == other_kind and not {*info(node).flats}.isdisjoint(info(other).flats)
            return same or (self.schedule is not None and self.schedule.agreed is not None)
        if kind not in ("compute", "param_view"):
            return False
        if other_kind == "free":
            return node in set(storage_users(other.args[0]))  # type: ignore[arg-type]
        if has_effect(node) and has_effect(other):
            return True
        for writer, reader in ((node, other), (other, node)):
            if written := mutated_inputs(writer):
                roots = set().union(*map(alias_roots, written))
                if any(alias_roots(n) & roots for n in (reader, *reader.all_input_nodes)):
                    return True
        return False

    # -- moves

    def move_before(self, node: fx.Node, anchor: fx.Node, by: str | None = None) -> bool:
        """Put `node`, with what goes with it, right before `anchor`, earlier or later than it stands. A gather takes its cast
        and its throttle along, a WAIT the views of what it waits for, a reduce its STORE.

        Returns whether anything moved. Raises ScheduleError, naming the node that pins it, where the move would break a
        dependency, reorder what ranks agreed on, or exceed a rate limit that holds already; nothing has moved then. A
        memory plan does not survive a move. `by`: who moves it, the pass that runs unless told.
        """
        return self._move(node, anchor, f"before {_named(anchor)}", by)

    def move_after(self, node: fx.Node, anchor: fx.Node, by: str | None = None) -> bool:
        """Put `node`, with what goes with it, right after `anchor`; else as `move_before`."""
        following = anchor.next if isinstance(anchor, fx.Node) else anchor
        return node is not anchor and self._move(node, following, f"after {_named(anchor)}", by)

    def _move(self, node: fx.Node, anchor: fx.Node, place: str, by: str | None) -> bool:
        for given in (node, anchor):
            if not isinstance(given, fx.Node) or given.graph is not self.graph or given.op == "root":
                raise ScheduleError(f"{place}: {given!r} is no node of phase '{self.name}' that something can stand by")
        group = self._travelling(node)
        if group[-1].next is anchor or anchor in group:
            return False
        self._check_open()
        if (pin := self.blocker(node, anchor)) is not None:
            raise ScheduleError(f"{describe(node)} may not move {place}: {describe(pin)} pins it")
        back = [(member, member.next) for member in reversed(group)]
        for member in group:
            anchor.prepend(member)
        self._in_order = False
        try:
            if (problem := self._exceeds()) is not None:
                raise ScheduleError(f"{describe(node)} may not move {place}: {problem}")
            if self.schedule is not None and self.schedule.on_move is not None:
                self.schedule.on_move(node, anchor)
        except BaseException:
            for member, following in back:
                following.prepend(member)
            raise
        for member in group:
            if (found := member.meta.get(INFO)) is not None and found.kind != "param_view":
                found.moved_by += (by or (self.schedule.editor if self.schedule is not None else "user"),)
        self._unplan()
        return True

    def _unplan(self) -> None:
        if self.schedule is not None and "memory-planned" in self.schedule.established:
            self.schedule.unplan()

    def _check_open(self) -> None:
        if self.schedule is not None and self.schedule.runs:
            raise ScheduleError(
                "this schedule runs already, and an edit of it would not be seen: edit `schedule.copy()` and give it back "
                "with `model.schedule = edited`, or write a pass"
            )

    def _exceeds(self) -> str | None:
        """Which rate limit, if one holds already, the order of this phase exceeds."""
        from fxshard.ir.rules.memory import LIMITS  # the rules themselves decide, so that a legal move is a valid one

        if self.schedule is None or "rate-limited" not in self.schedule.established:
            return None
        return next((text for rule in LIMITS for _, text in rule(self.schedule, self)), None)

    def merge_gathers(self, gathers: Sequence[fx.Node], by: str | None = None) -> fx.Node:
        """Make these AllGathers one, a bucket; returns it. It stands where the first of them stood, its members in
        registration order; each member keeps its WAIT.

        Raises ScheduleError, naming what forbids it, and nothing has changed then: a node that is no AllGather of this
        phase, a throttle after the first of them, a shard or cast that comes too late, collectives in an order that ranks
        agreed on. A memory plan does not survive it.
        """
        for node in gathers:
            if node.graph is not self.graph or info(node).kind != "all_gather":
                raise ScheduleError(f"{describe(node)} is no AllGather of phase '{self.name}': it cannot be merged")
        gathers = sorted(dict.fromkeys(gathers))
        if not gathers:
            raise ScheduleError("no AllGather to merge")
        self._check_open()
        first, *others = gathers
        for gather in others:
            throttle = next((n for n in _between(first, gather) if info(n).kind == "throttle"), None)
            if (pin := throttle or self.blocker(gather, first)) is not None:
                what = f"{describe(gather)} may not be merged with {describe(first)}"
                raise ScheduleError(f"{what}: {describe(pin)} {'stands between them' if throttle else 'pins it'}")
        if not others:
            return first
        if self.schedule is not None:
            for gather in others:
                if self.schedule.on_move is not None:
                    self.schedule.on_move(gather, first)
        self._unplan()
        by = by or (self.schedule.editor if self.schedule is not None else "user")
        shards = {flat: shard for g in gathers for flat, shard in zip(info(g).flats, _shards(g), strict=True)}
        members = [flat for flat in self.flats.values() if flat.name in shards]
        names = tuple(flat.name for flat in members)
        throttles = [n for n in self._travelling(first) if info(n).kind == "throttle"]
        for own in [n for g in gathers for n in self._travelling(g) if info(n).kind in ops.UNSHARDS_LOCALLY]:
            first.prepend(own)
        with self.graph.inserting_before(first):
            bucket = self.call(
                ops.all_gather,
                (tuple(shards[name] for name in names), names),
                flat=members,
                by=info(first).by,
                num_bytes=sum(flat.full_bytes for flat in members),
            )
        for throttle in throttles:
            throttle.update_arg(1, names)
            found, made = info(throttle), info(bucket)
            throttle.meta[INFO] = dataclasses.replace(found, flat=made.flat, unit=made.unit, members=names)
        for gather in gathers:
            info(bucket).moved_by += info(gather).moved_by + ((by,) if gather is not first else ())
            gather.replace_all_uses_with(bucket)
            self.graph.erase_node(gather)
        return bucket

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        flat: FlatParameter | Sequence[FlatParameter] | None,
        by: str,
        queue: str | None = None,
        num_bytes: int = 0,
        fqn: str | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Make a communication node at the graph's insertion point, its info stamped; several flats make it a bucket's."""
        kind = ops.KINDS[function]
        flats = [flat] if isinstance(flat, FlatParameter) else list(flat or ())
        names = tuple(f.name for f in flats)
        found = NodeInfo(
            kind,
            " + ".join(names) if names else None,
            flats[0].unit if flats else None,
            queue or ops.QUEUES.get(kind, "compute"),
            fqn,
            by,
            num_bytes=num_bytes,
            members=names if len(names) > 1 else (),
        )
        label = name or f"{kind}_{found.label or 'all'}"
        node = self.graph.create_node("call_function", function, args, {}, name=identifier(label))
        node.meta[INFO] = found
        if self._index is not None:
            self._enter(node)
            self._in_order = False
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


_FIXED = ("placeholder", "get_attr", "output")


def _named(node: Any) -> str:
    return describe(node) if isinstance(node, fx.Node) else repr(node)


def _between(start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Nodes from `start` up to but without `end`."""
    found = []
    while start is not end and start.op != "root":
        found.append(start)
        start = start.next
    return found


def _shards(gather: fx.Node) -> tuple[fx.Node, ...]:
    """What an AllGather sends: a node a member."""
    sent: Any = gather.args[0]
    return sent if isinstance(sent, tuple) else (sent,)
