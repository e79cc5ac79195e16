"""Passes as text, both ways: `backward-prefetch{depth=2}`, or `module:Class{option=value}` for one that is not fxshard's."""

from __future__ import annotations

import ast
import dataclasses
import importlib

from fxshard.errors import PassError
from fxshard.options import did_you_mean
from fxshard.passes.backward_prefetch import BackwardPrefetch
from fxshard.passes.base import Pass
from fxshard.passes.defer_reduces import DeferReduces
from fxshard.passes.forward_overlap import ForwardOverlap
from fxshard.passes.insert_frees import InsertFrees
from fxshard.passes.insert_gathers import InsertGathers
from fxshard.passes.insert_reduces import InsertReduces
from fxshard.passes.keep_resident import KeepResident
from fxshard.passes.keep_root_resident import KeepRootResident
from fxshard.passes.plan_memory import PlanMemory
from fxshard.passes.rate_limit import RateLimit
from fxshard.passes.take_kept import TakeKept

BY_NAME: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        InsertGathers,
        InsertReduces,
        InsertFrees,
        KeepRootResident,
        BackwardPrefetch,
        ForwardOverlap,
        RateLimit,
        PlanMemory,
        KeepResident,
        DeferReduces,
        TakeKept,
    )
}
"""fxshard's own passes: the default pipeline in its order, then the one of `reshard_after_forward={...}` and those of
gradient accumulation."""


def parse(text: str) -> Pass:
    """The pass that `str(pass)` wrote: `name{option=value, ...}`, options as Python literals; braces may be left out.

    A pass of another package is `module:Class{...}`. Raises ValueError for what cannot be read, with what is allowed.
    """
    head, brace, rest = text.strip().partition("{")
    if brace and not rest.endswith("}"):
        raise ValueError(f"pass {text!r}: the brace is not closed")
    kind = _find(head.strip(), text)
    try:
        call = ast.parse(f"f({rest[:-1]})" if brace else "f()", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError("options are written name=value")
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"pass {text!r}: options are name=value, with Python literals: {error}") from None
    allowed = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(options) - allowed):
        there = ", ".join(sorted(allowed)) or "none"
        raise ValueError(f"pass '{head}' has no option {', '.join(map(repr, unknown))}; allowed are {there}")
    try:
        return kind(**options)
    except (TypeError, ValueError, PassError) as error:
        raise ValueError(f"pass {text!r}: {error}") from error


def _find(name: str, text: str) -> type[Pass]:
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in BY_NAME:
            hint = did_you_mean(name, BY_NAME)
            raise ValueError(
                f"there is no pass '{name}'.{hint} fxshard's own are {', '.join(BY_NAME)}; another is written module:Class"
            )
        return BY_NAME[name]
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"pass {text!r}: module '{module}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise ValueError(f"pass {text!r}: '{attribute}' of {module} is no fxshard.passes.Pass")
    return found


def full_text(p: Pass) -> str:
    """`module:Class{...}`, by which any pass can be found again."""
    kind = type(p)
    return f"{kind.__module__}:{kind.__qualname__}{p.options_text()}"
