"""The schedule: the one object that passes edit, the verifier proves, the runtime runs and viz draws."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir import ops
from fxshard.ir.aliasing import has_effect
from fxshard.ir.layout import FlatParameter
from fxshard.ir.nodes import INFO, NodeInfo, identifier, info
from fxshard.ir.phase import Phase

if TYPE_CHECKING:
    from fxshard.ir.costs import Costs


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
    """One pass as it ran: its text form, seconds taken, nodes added, removed and moved, and the schedule's lines after it."""

    text: str
    seconds: float
    added: int
    removed: int
    moved: int
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What a phase had to do when it was captured: the verifier compares. Nodes by name.

    A pass that is meant to change the model's operators says so: `schedule.origin[phase.name] = Origin.of(phase)`.
    """

    effects: tuple[str, ...]
    """Random operators and writes, in their order."""
    results: tuple[str | None, ...]
    """What the phase returns, by position; None where that is no node."""
    operators: dict[str, int]
    """A number for what each operator of the model is and reads."""

    @staticmethod
    def of(phase: Phase) -> Origin:
        effects = [n.name for n in phase.graph.nodes if has_effect(n)]
        results = tuple(r.name if isinstance(r, fx.Node) else None for r in phase.results)
        return Origin(tuple(effects), results, {node.name: mark for node, mark in operator_marks(phase).items()})


def operator_marks(phase: Phase) -> dict[fx.Node, int]:
    """For each operator of the model a number made of its function and its arguments, a parameter by its own name."""

    def known(n: fx.Node) -> str:
        return f"%{info(n).fqn}" if info(n).kind in ("parameter", "param_view") else f"%{n.name}"

    marks = {}
    for node in phase.graph.nodes:
        if node.op == "call_function" and info(node).kind == "compute":
            given = torch.fx.node.map_arg((node.args, node.kwargs), known)
            marks[node] = zlib.crc32(f"{node.target}{given}".encode())
    return marks


@dataclass
class MemoryPlan:
    """What plan-memory decided, in bytes."""

    arena_bytes: int = 0
    """Size of the arena all phases of this schedule share."""
    resident_bytes: int = 0
    """Buffers kept from forward to backward; they lie outside the arena."""
    peak_gathered_bytes: int = 0
    """Most bytes of gathered parameters alive at once, residents included."""
    host_bytes: int = 0
    """Size of the arena in host memory, of gradients on their way to `.grad`, where shards are offloaded."""
    peak_gradient_bytes: int = 0
    """Most bytes of unsharded gradients and reduce staging alive at once; what lands in `.grad` is none of them."""
    saved_weight_bytes: int = 0
    """What forward keeps for backward because it is made from a parameter and data together; outside the arena."""
    kept_bytes: int = 0
    """Gradients of one rank that stay behind until a later backward reduces them; outside the arena."""


@dataclass(frozen=True)
class Accumulation:
    """What one backward of several does with gradients, where their communication is put off."""

    keep: str = ""
    """`unsharded`: nothing is reduced, each rank keeps its whole gradients. `sharded`: they are reduced in the shard group,
    and that sum is kept. '': they are reduced and reach `.grad`."""
    kept: frozenset[str] = frozenset()
    """FlatParameters whose unsharded gradients, kept before, this backward adds to its own and reduces."""
    kept_shards: frozenset[str] = frozenset()
    """FlatParameters whose sums of the shard group, kept before, go into the AllReduce."""

    def __str__(self) -> str:
        counted = ((self.kept, "unsharded"), (self.kept_shards, "sharded"))
        taken = [f"takes what {len(flats)} units kept {how}" for flats, how in counted if flats]
        return ", ".join(([f"keeps gradients {self.keep}"] if self.keep else []) + taken)


@dataclass(eq=False)
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
    offloaded: bool = False
    """Whether shards and gradients are in host memory."""
    resident: set[str] = field(default_factory=set)
    """FlatParameters that stay gathered from forward to backward."""
    established: set[str] = field(default_factory=set)
    """What the passes that ran provide."""
    num_batches: int = 1
    """Ranks that bring a batch."""
    gradient_divisor: float | None = None
    """What each gradient is divided by, once; None = `num_batches`."""
    accumulation: Accumulation = field(default_factory=Accumulation)
    """Which gradients stay behind for a later backward, and which of earlier ones this one takes in."""
    origin: dict[str, Origin] = field(default_factory=dict)
    """What each phase had to do when it was captured, by phase."""
    agreed: tuple[str, ...] | None = None
    """The communication skeleton that other ranks rely on; moves cannot change the order of collectives then."""
    runs: bool = False
    """Whether a program was made of it; it then is not to be edited."""
    editor: str = "user"
    """Who edits it now: the name of the pass that runs."""
    on_move: Callable[[fx.Node, fx.Node], None] | None = None
    """Called with each legal move, the node and its anchor, before it is made."""
    costs: Costs | None = None
    """How long operations take, for pictures and passes; None = unit slots."""

    renderer: ClassVar[Callable[[Schedule, str, bool], None] | None] = None
    displayer: ClassVar[Callable[[Schedule], str] | None] = None

    def __post_init__(self) -> None:
        for phase in self.phases:
            phase.schedule = self
            self.origin.setdefault(phase.name, Origin.of(phase))

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def units(self) -> list[str]:
        """Unit names in registration order; each part of the root is one."""
        return list(dict.fromkeys(flat.unit for flat in self.flats.values()))

    @property
    def replicas(self) -> int:
        """R = W / F: ranks that hold the same shard."""
        return self.W // self.F

    @property
    def divisor(self) -> float:
        """What each gradient is divided by, once."""
        return self.num_batches if self.gradient_divisor is None else self.gradient_divisor

    def reduced_dtype(self, flat: FlatParameter) -> torch.dtype:
        """What a reduced gradient is in before ACC: a ReduceScatter rounds to the dtype to sum further across replicas in, or
        to that of `.grad`; without one it is as it was flattened."""
        return flat.reduce_dtype if self.replicas > 1 or flat.F == 1 else flat.dtype

    def lands(self, flat: FlatParameter) -> bool:
        """Whether the reduced gradient is made in the memory that `.grad` gets, by the ReduceScatter or, at F = 1, the FLAT:
        where it need not be cast, comes from no host memory, and is not kept for a later backward."""
        return self.reduced_dtype(flat) == flat.dtype and not self.offloaded and self.accumulation.keep == ""

    def received_chunks(self, flat: FlatParameter) -> int:
        """How many chunks a ReduceScatter by direct exchange receives beside its result, where the first one goes if that is
        in the dtype of the wire."""
        if not self.direct_exchange or flat.F == 1:
            return 0
        return flat.F - 2 if self.reduced_dtype(flat) == flat.reduce_dtype else flat.F - 1

    def counts(self, flat: str) -> bool:
        """Whether the rate limit counts this FlatParameter: residents are not, nor is the root in a forward-only schedule."""
        kept = "residents-kept" in self.established and self.backward is None and self.flats[flat].is_root
        return not kept and flat not in self.resident

    def unplan(self) -> None:
        """Forget the memory plan: the order has changed, or will."""
        self.established.discard("memory-planned")
        memory = self.memory
        self.memory = MemoryPlan(saved_weight_bytes=memory.saved_weight_bytes, kept_bytes=memory.kept_bytes)
        for phase in self.phases:
            for node in phase.graph.nodes:
                node.meta.pop("slot", None)

    def copy(self, reorder: bool = False) -> Schedule:
        """A schedule of its own to edit. `reorder=True` allows moves that change the order of collectives: all ranks then
        have to make the same ones."""
        made, maps = [], []
        for phase in self.phases:
            copied, mapping = phase.copy()
            for node in copied.nodes("presence"):
                node.meta["gradients"] = [g if g is None else mapping[g] for g in node.meta["gradients"]]
            made.append(copied)
            maps.append(mapping)
        return dataclasses.replace(
            self,
            forward=made[0],
            backward=made[1] if len(made) > 1 else None,
            history=list(self.history),
            remarks=list(self.remarks),
            memory=dataclasses.replace(self.memory),
            gradients={fqn: maps[-1][node] for fqn, node in self.gradients.items()},
            resident=set(self.resident),
            established=set(self.established),
            agreed=None if reorder else self.agreed,
            runs=False,
            on_move=None,
        )

    def to_json(self, indent: int | None = None) -> str:
        """JSON that `Schedule.from_json` reads back as this schedule, to verify, draw, compare and edit; the same on every
        machine. It cannot run: constants are not in it, nor are `costs` and the seconds that passes took."""
        from fxshard.ir.json_form import schedule_to_json

        return schedule_to_json(self, indent)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """The schedule that `to_json` wrote. It imports the modules whose functions its operators are: read none that you
        would not run. Raises ValueError for anything else."""
        from fxshard.ir.json_form import schedule_from_json

        return schedule_from_json(text)

    def keep_resident(self, flat: str, by: str = "user") -> None:
        """Keep `flat` gathered from forward to backward: its FREE in forward goes, and in backward a `resident` input takes
        the place of its AG and WAIT; the FREE there ends the residency.

        Raises ScheduleError with the reason where there is nothing to keep, or where the order is settled already.
        """
        freed = self.forward.one("free", flat)
        full = self.backward.full(flat) if self.backward is not None else None
        if flat in self.resident:
            raise ScheduleError(f"'{flat}' is resident already")
        if self.established & {"rate-limited", "memory-planned"}:
            raise ScheduleError(
                f"the rate limit and the memory plan count on FREE {flat} in forward: keep it before them"
            )
        if freed is None:
            raise ScheduleError(f"'{flat}' is not gathered in forward")
        if self.backward is None or full is None:
            raise ScheduleError(f"backward does not read '{flat}': freed after forward")
        if any(info(gather).members for gather in self.backward.nodes("all_gather", flat)):
            raise ScheduleError(f"backward gathers '{flat}' together with others: keep it before they are merged")
        self.forward.graph.erase_node(freed)
        graph, layout = self.backward.graph, self.flats[flat]
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            name = identifier(f"resident_{flat}")
            resident = graph.create_node("placeholder", name, name=name)
        resident.meta[INFO] = NodeInfo("resident", flat, layout.unit, by=by, num_bytes=layout.full_bytes)
        full.replace_all_uses_with(resident)
        for kind in ("wait", "all_gather", *ops.UNSHARDS_LOCALLY, "shard"):
            for node in reversed(self.backward.nodes(kind, flat)):
                if not node.users and info(node).queue in ("compute", "unshard"):
                    graph.erase_node(node)
        self.resident.add(flat)

    def text(self, level: str = "communication") -> str:
        """The schedule as text. `level`: `units`, `communication` (every communication node), or `all`."""
        from fxshard.ir.text import schedule_text

        return schedule_text(self, level)

    def skeleton(self, phase: str | None = None) -> list[str]:
        """One line per collective in issue order, of one phase or all: what all ranks must agree on."""
        return [
            f"{p.name} {ops.LABELS[info(n).kind]} {info(n).flat} {info(n).num_bytes}"
            for p in self.phases
            if phase in (None, p.name)
            for n in p.graph.nodes
            if info(n).kind in ops.GROUPS
        ]

    def render(self, path: str, every_unit: bool = False) -> None:
        """Draw the schedule; the format follows the suffix of `path`, see `fxshard.viz.render`."""
        assert Schedule.renderer is not None, "fxshard registers one when it is imported"
        Schedule.renderer(self, path, every_unit)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        assert Schedule.displayer is not None, "fxshard registers one when it is imported"
        return Schedule.displayer(self)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__
