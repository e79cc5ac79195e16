"""The passes: each one file, one name. `default_passes` is the pipeline, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxshard.ir.nodes import describe, info
from fxshard.ir.schedule import Remarks, Schedule
from fxshard.options import Options
from fxshard.passes.backward_prefetch import BackwardPrefetch
from fxshard.passes.base import Pass
from fxshard.passes.defer_reduces import KEEPS, DeferReduces
from fxshard.passes.forward_overlap import ForwardOverlap
from fxshard.passes.insert_frees import InsertFrees
from fxshard.passes.insert_gathers import InsertGathers
from fxshard.passes.insert_reduces import InsertReduces
from fxshard.passes.keep_resident import KeepResident
from fxshard.passes.keep_root_resident import KeepRootResident
from fxshard.passes.manager import Culprit, bisect, replay, run
from fxshard.passes.plan_memory import PlanMemory
from fxshard.passes.rate_limit import RateLimit
from fxshard.passes.take_kept import TakeKept
from fxshard.passes.text import BY_NAME, parse

__all__ = [
    "BY_NAME",
    "KEEPS",
    "NEEDED",
    "BackwardPrefetch",
    "Culprit",
    "DeferReduces",
    "ForwardOverlap",
    "InsertFrees",
    "InsertGathers",
    "InsertReduces",
    "KeepResident",
    "KeepRootResident",
    "Pass",
    "PlanMemory",
    "RateLimit",
    "Remarks",
    "Schedule",
    "TakeKept",
    "bisect",
    "check_complete",
    "default_passes",
    "describe",
    "info",
    "parse",
    "pipeline",
    "replay",
    "run",
]


NEEDED = ("gathers-inserted", "reduces-inserted", "frees-inserted", "memory-planned")
"""What some pass must provide for a schedule to run."""


def default_passes(options: Options) -> list[Pass]:
    """The default pipeline for these options."""
    reshard = options.reshard_after_forward
    resident = options.keep_root_resident or reshard is False
    chosen = tuple(reshard.items()) if isinstance(reshard, Mapping) else ()
    passes: list[Pass | None] = [
        InsertGathers(),  # the model reads whole parameters
        InsertReduces(),  # every rank ends with the mean gradient
        InsertFrees(),  # nothing stays gathered longer than it is read
        KeepRootResident(reshard is False) if resident else None,  # the root is used last and first
        KeepResident(chosen) if chosen else None,  # and so may be others
        BackwardPrefetch(options.backward_prefetch) if options.backward_prefetch else None,  # AG(u-1) before RS(u)
        ForwardOverlap(options.forward_prefetch) if options.forward_prefetch else None,  # AG(u+1) before the work of u
        RateLimit(options.rate_limit, options.rate_limit_bytes),  # what runs ahead is bounded
        PlanMemory(),  # last: it needs the final order
    ]
    return [p for p in passes if p is not None]


def pipeline(options: Options) -> list[Pass]:
    """The default passes with the user's: a list goes in before plan-memory; a callable maps the default list to the
    whole."""
    passes = default_passes(options)
    extra: Any = options.passes
    if extra is None:
        return _up_to(passes, options)
    if callable(extra):
        made = extra(passes)
        if not isinstance(made, (list, tuple)):
            raise TypeError(f"passes={extra!r} returned {made!r}: a list of passes was expected")
        passes = list(made)
    elif isinstance(extra, Sequence):
        passes[-1:-1] = list(extra)
    for p in passes:
        if not isinstance(p, Pass):
            raise TypeError(f"passes holds {p!r}: an instance of fxshard.passes.Pass was expected")
        if not p.name:
            raise ValueError(f'pass {type(p).__name__} has no name: give it `name = "{type(p).__name__.lower()}"`')
    return _up_to(passes, options)


def _up_to(passes: list[Pass], options: Options) -> list[Pass]:
    """The passes up to `stop_after`. Raises ValueError where that or `print_after` names none of them."""
    names = [p.name for p in passes]
    asked = [] if isinstance(options.print_after, bool) else list(options.print_after)
    if unknown := [name for name in (*asked, *filter(None, [options.stop_after])) if name not in names]:
        raise ValueError(f"no pass is named {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    return passes if options.stop_after is None else passes[: len(names) - names[::-1].index(options.stop_after)]


def check_complete(passes: Sequence[Pass], options: Options) -> None:
    """Raise ValueError if these passes leave out what a schedule needs to run (to be drawn it needs nothing)."""
    deferring = [p.name for p in passes if isinstance(p, (DeferReduces, TakeKept))]
    if deferring:
        raise ValueError(
            f"{deferring[0]} is for schedules to look at; to keep gradients run backward in `with model.no_sync():`"
        )
    missing = [word for word in NEEDED if not any(word in p.provides for p in passes)]
    if missing:
        raise ValueError(
            f"passes leaves out what a schedule needs to run: {', '.join(missing)}; "
            f"the default passes are {', '.join(p.name for p in default_passes(options))}"
        )
