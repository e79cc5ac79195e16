"""The options of `fxshard.compile`, validated: a wrong or misspelt one is an error that lists what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of what is computed and communicated; None keeps what is there.

    Sharded parameters, gradients and optimizer state keep the parameter's own dtype. Parameters and inputs of other dtypes than
    fp16, bf16, fp32 and fp64 (integers, fp8, complex) are never cast.
    """

    param: torch.dtype | None = None
    """What parameters are gathered and computed with in. Floating inputs are cast to it where the model and where each
    unit is entered."""
    reduce: torch.dtype | None = None
    """What gradients are reduced in; None = the dtype that is gathered. NCCL sums in it too; gloo in fp32 or wider."""
    buffers: torch.dtype | None = None
    """What floating buffers are kept in."""
    accumulate: torch.dtype | None = None
    """What gradients of several backwards are added up in; None = fp32, or the parameter's dtype where that is wider,
    whatever goes over the wire."""
    output: torch.dtype | None = None
    """What floating outputs of the model are cast to; None = they are left as forward made them."""
    cast_forward_inputs: bool = True
    """Whether inputs of the model and of units are cast; those of modules in full precision always are."""
    full_precision: Any = ()
    """A module class, an FQN pattern, or several: what of the above does not apply to these modules and what is below them.

    Their parameters are gathered and computed with in their own dtype, reduced and added up in it or wider, their buffers
    kept. Floating inputs are cast to that dtype where such a module is entered, floating outputs to what the inputs were.
    """

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "buffers", "accumulate", "output"):
            value = getattr(self, name)
            if value is not None and value not in FLOATS:
                allowed = ", ".join(map(str, FLOATS))
                raise ValueError(f"MixedPrecision({name}={value!r}): a floating dtype was expected, one of {allowed}")
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecision(cast_forward_inputs={self.cast_forward_inputs!r}): True or False was expected"
            )
        wanted = self.full_precision
        several = (
            tuple(sorted(wanted, key=str) if isinstance(wanted, (set, frozenset)) else wanted)
            if (isinstance(wanted, (list, tuple, set, frozenset)))
            else (wanted,)
        )
        if not all(isinstance(item, (str, type)) for item in several):
            raise TypeError(
                f"MixedPrecision(full_precision={wanted!r}): a module class, a pattern of module names ('*.norm'), or several "
                "of them were expected"
            )
        object.__setattr__(self, "full_precision", several)

    def of(self, dtype: torch.dtype, full_precision: bool) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        """What parameters of `dtype` are gathered, reduced and added up in (None: fp32 or wider)."""
        if dtype not in FLOATS:
            return dtype, dtype, None
        if full_precision:
            wider = [None if d is None else torch.promote_types(dtype, d) for d in (self.reduce, self.accumulate)]
            return dtype, wider[0] or dtype, wider[1]
        gathered = self.param or dtype
        return gathered, self.reduce or gathered, self.accumulate


@dataclass(frozen=True)
class Options:
    """Everything that sizes or switches a mechanism. Counts are of FlatParameters, of units where it says so."""

    units: Any = "auto"
    """'auto', 'none', an FQN pattern, a module class, a list of patterns and classes, a callable, or BytesOfFirstUse(n)."""
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    backward_prefetch: int = 1
    """How many AllGathers ahead are issued in backward; 0 = off."""
    forward_prefetch: int = 1
    """How many AllGathers ahead are issued in forward; 0 = off."""
    rate_limit: int | None = 2
    """At most this many units gathered, and gradient buffers waiting for their reduce; None = no limit."""
    rate_limit_bytes: int | None = None
    """A bound in bytes of gathered buffers; None = no limit."""
    keep_root_resident: bool = True
    """Whether the root stays gathered from forward to backward."""
    reshard_after_forward: bool | Mapping[str, bool] = True
    """Whether units are freed after forward and gathered again in backward; if not, the root stays too. Or for each, by
    patterns of unit names, `{"layers.31": False}`: the last that fits counts, units that none fits are freed."""
    keep_memory: bool = False
    """Keep the memory of gradients from step to step at F > 1 too: a step allocates none then, and forward has less room."""
    activation_memory_budget: float | None = None
    """How much is kept for backward, from 0, the inputs alone, to 1, what torch's partitioner keeps for speed; the rest is
    computed again. None = what autograd keeps."""
    entry_points: Sequence[str] = ()
    """Methods (`'encode'`) and submodules (`'head'`, `'decoder.norm'`) that are called by themselves, besides forward."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in (pinned) host memory: a shard is copied to the device before its gather,
    a gradient back after its reduce, and the optimizer works on the CPU."""
    gradient_divisor: float | None = None
    """What gradients are divided by, once; None = the number of ranks that bring a batch (the mean), 1 = their sum."""
    passes: Sequence[Any] | None = None
    """Extra passes, run after the default ones and before plan-memory; or a callable from the default list to the
    list."""
    verify_each: bool = True
    """Verify the schedule after each pass; if not, once, after the last one."""
    print_after: bool | Sequence[str] = False
    """Print the schedule after each pass, or after those named, if it changed."""
    stop_after: str | None = None
    """Run the passes up to this one only, to look at what it made (`fxshard.trace`; such a schedule cannot run)."""
    compute: str = "eager"
    """How the nodes between communication run: 'eager'."""
    debug: bool = False
    """Freed buffers are filled with NaN (residents are not), random delays are put before collectives."""
    fullgraph: bool = True
    """Refuse a forward that cannot be captured whole."""
    dynamic: bool | None = None
    """As in torch.compile: None re-captures with dynamic shapes when shapes change."""
    sync_parameters: bool = True
    """Start from rank 0's parameters and buffers on every rank, as DDP does."""
    timeout_s: float = 300.0
    """How long ranks wait for one another when they compare models and schedules, in seconds."""

    def __post_init__(self) -> None:
        for name in ("backward_prefetch", "forward_prefetch"):
            check_depth(name, getattr(self, name))
        for name in ("rate_limit", "rate_limit_bytes"):
            check_limit(name, getattr(self, name))
        for name in (
            "keep_root_resident",
            "cpu_offload",
            "debug",
            "fullgraph",
            "keep_memory",
            "sync_parameters",
            "verify_each",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: True or False was expected")
        reshard = self.reshard_after_forward
        by_unit = isinstance(reshard, Mapping) and all(
            isinstance(k, str) and isinstance(v, bool) for k, v in reshard.items()
        )
        if not isinstance(reshard, bool) and not by_unit:
            raise TypeError(
                f"reshard_after_forward={reshard!r}: True, False or {{pattern of unit names: True or False}} was expected"
            )
        entries = self.entry_points
        if not isinstance(entries, (list, tuple)) or not all(isinstance(name, str) for name in entries):
            raise TypeError(f"entry_points={entries!r}: a list of names of methods and submodules was expected")
        budget = self.activation_memory_budget
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1
        ):
            raise ValueError(f"activation_memory_budget={budget!r}: a fraction from 0 to 1, or None, was expected")
        divisor = self.gradient_divisor
        if divisor is not None:
            if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
                raise TypeError(f"gradient_divisor={divisor!r}: a number or None (the number of ranks) was expected")
            if not (math.isfinite(divisor) and divisor > 0):
                raise ValueError(f"gradient_divisor={divisor!r}: a positive number was expected; 1 sums the gradients")
        check_choice("compute", self.compute, COMPUTE)
        if not isinstance(self.mixed_precision, MixedPrecision):
            fields = ", ".join(f"{f.name}=" for f in dataclasses.fields(MixedPrecision))
            raise TypeError(
                f"mixed_precision={self.mixed_precision!r}: an fxshard.MixedPrecision({fields}) was expected"
            )
        timeout = self.timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_S:
            raise ValueError(f"timeout_s={timeout!r}: a positive number of seconds was expected, at most {LONGEST_S:g}")
        is_class = isinstance(self.passes, type)
        if is_class or not (self.passes is None or callable(self.passes) or isinstance(self.passes, (list, tuple))):
            raise TypeError(f"passes={self.passes!r}: a list of passes, or a callable from the default list to a list")
        if not (
            isinstance(self.print_after, (bool, list, tuple))
            and (self.stop_after is None or isinstance(self.stop_after, str))
        ):
            raise TypeError(
                f"print_after={self.print_after!r}, stop_after={self.stop_after!r}: a bool or a list of names of passes, and "
                "the name of a pass, were expected"
            )
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise ValueError(f"dynamic={self.dynamic!r}: allowed are None, True, False")

    @staticmethod
    def from_keywords(keywords: dict[str, Any], function: str = "fxshard.compile") -> Options:
        """Build from keyword arguments; unknown names raise TypeError listing the allowed ones."""
        allowed = [f.name for f in dataclasses.fields(Options)]
        unknown = [name for name in keywords if name not in allowed]
        if unknown:
            extra = ("F", "mesh", "world", "example_inputs", "init") if function == "fxshard.compile" else ("F", "W")
            everything = [*allowed, *extra]
            hints = "".join(did_you_mean(name, everything) for name in unknown)
            raise TypeError(
                f"{function} got unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}."
                f"{hints} Allowed: {', '.join(everything)}"
            )
        if keywords.get("mixed_precision", 0) is None:
            keywords = {**keywords, "mixed_precision": MixedPrecision()}
        return Options(**keywords)

    def fingerprint(self) -> str:
        """What all ranks must agree on, as text."""
        parts = []
        for f in dataclasses.fields(self):
            if f.name in ("debug", "timeout_s", "units", "passes", "verify_each", "print_after", "stop_after"):
                continue
            parts.append(f"{f.name}={getattr(self, f.name)!r}")
        return "\n".join(parts)


COMPUTE = ("eager",)
LONGEST_S = 1e9
"""About 30 years; clocks that count nanoseconds in 64 bits do not go much further."""


def check_depth(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is how far ahead to prefetch."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: a number of AllGathers ahead was expected, 0 (off), 1, 2, ...")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}{hint}")


def check_limit(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a bound, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r}: a positive number or None (no limit) was expected")


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'rate_limit'?`, or '' where nothing is close."""
    found = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f" Did you mean '{found[0]}'?" if found else ""


def listed(names: Iterable[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_factor(F: Any, W: int) -> int:
    """Validate the sharding factor: an int that divides W. Raises TypeError or ValueError naming the allowed values."""
    if isinstance(W, bool) or not isinstance(W, int):
        raise TypeError(f"W={W!r}: the world size is a positive int")
    if W < 1:
        raise ValueError(f"W={W}: the world size is a positive int")
    allowed = [n for n in range(1, W + 1) if W % n == 0]
    if isinstance(F, bool) or not isinstance(F, int):
        raise TypeError(f"F={F!r}: the sharding factor is an int that divides the world size W={W}: {allowed}")
    if F not in allowed:
        why = "is larger than" if F > W else "does not divide" if F > 0 else "is not a factor of"
        raise ValueError(f"F={F} {why} the world size W={W}; allowed are {', '.join(map(str, allowed))}")
    return F


InitFunction = Callable[[torch.nn.Module], None]
