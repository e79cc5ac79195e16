"""The verifier: what a schedule must satisfy, each rule a function of its own in `fxshard.ir.rules`.

It shares no code with the passes, only the questions that `ir` answers about a graph (who shares memory with whom, which
FlatParameters the rate limit counts). Each rule takes time in proportion to the nodes of a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fxshard.errors import ScheduleError
from fxshard.ir.nodes import describe, info, user_line
from fxshard.ir.phase import Phase
from fxshard.ir.rules import Problem, captured, gradients, memory, structure
from fxshard.ir.rules.captured import first_difference
from fxshard.ir.schedule import Schedule

SHOWN = 20
"""At most this many problems are told."""


def verify(schedule: Schedule) -> None:
    """Check every rule that applies; raise ScheduleError listing what is broken, the first twenty problems in full."""
    problems: list[tuple[Phase, Rule, fx.Node, str]] = []
    for phase in schedule.phases:
        with phase.indexed():
            found = [(rule, node, text) for rule in applying(schedule) for node, text in rule(schedule, phase)]
        problems += [(phase, *each) for each in dict.fromkeys(found)]
    if problems:
        more = len(problems) - SHOWN
        told = "\n".join(_message(*each) for each in problems[:SHOWN])
        raise ScheduleError(told + (f"\nand {more} problems more" if more > 0 else ""))


def applying(schedule: Schedule) -> list[Rule]:
    """The rules that what the passes have established so far makes meaningful."""
    return [rule for rule in RULES if NEEDS.get(rule) is None or NEEDS[rule] in schedule.established]


def _message(phase: Phase, rule: Callable[..., object], node: fx.Node, text: str) -> str:
    """The rule, what broke it, where that is in the user's code, who put it there, and the schedule around it."""
    from fxshard.ir.text import around

    found = info(node)
    line = user_line(node) or next(filter(None, map(user_line, node.users)), "")  # a view has none of its own
    where = f" ({line})" if line and line not in describe(node) else ""
    position = next(i for i, n in enumerate(phase.graph.nodes) if n is node)
    moved = f", moved by {', '.join(dict.fromkeys(found.moved_by))}" if found.moved_by else ""
    about = (rule.__doc__ or "").strip().split(".")[0].split("\n\n")[0]
    lines = [
        f"{rule.__name__}: {text}",
        f"  where   {phase.name}, op {position} {describe(node)}{where}",
        *([f"  unit    {found.flat or found.unit}"] if found.flat or found.unit else []),
        f"  by      {found.by}{moved}",
        f"  rule    {' '.join(about.split())}",
        *(f"  {'near' if i == 0 else '    '}    {near}" for i, near in enumerate(around(phase, node))),
    ]
    return "\n".join(lines)


def same_on_all_ranks(schedules: Sequence[Schedule]) -> None:
    """Every rank issues the same collectives in the same order: `schedules`, one a rank.

    Raises ScheduleError naming the first rank that differs from rank 0, the node, and what rank 0 issues there.
    """
    for rank, schedule in enumerate(schedules):
        if len(schedule.phases) != len(schedules[0].phases):
            raise ScheduleError(
                f"same_on_all_ranks: rank {rank} has {len(schedule.phases)} phases, rank 0 another number"
            )
        for phase in schedule.phases:
            wanted = [line for line in schedules[0].skeleton() if line.startswith(f"{phase.name} ")]
            for node, text in first_difference(schedule, phase, wanted, "is issued on rank 0"):
                raise ScheduleError(_message(phase, same_on_all_ranks, node, f"rank {rank}: {text}"))


Rule = Callable[[Schedule, Phase], list[Problem]]

RULES: tuple[Rule, ...] = (
    structure.inputs_precede_uses,
    structure.one_wait_for_each_issue,
    structure.reads_its_own_flat_parameter,
    structure.on_its_queue_and_group,
    structure.views_are_of_their_own_parameter,
    structure.used_only_while_gathered,
    structure.nothing_leaves_gathered,
    structure.freed_or_resident,
    gradients.reduced_exactly_once,
    gradients.divided_exactly_once,
    gradients.padding_stays_outside,
    captured.operators_as_captured,
    captured.effects_as_captured,
    captured.results_as_captured,
    captured.order_is_agreed_on,
    *memory.LIMITS,
    memory.every_buffer_has_a_slot,
    memory.slots_do_not_overlap,
)

NEEDS: dict[Rule, str] = {
    structure.freed_or_resident: "frees-inserted",
    gradients.reduced_exactly_once: "reduces-inserted",
    **dict.fromkeys(memory.LIMITS, "rate-limited"),
    memory.every_buffer_has_a_slot: "memory-planned",
    memory.slots_do_not_overlap: "memory-planned",
}
"""What has to be established for a rule to apply; the others always do."""
