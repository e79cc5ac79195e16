"""How far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.parity.oracle import Record


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of one kind of value, and where it is. inf: one is missing, or not a number."""

    kind: str
    largest: float
    where: str
    """The step, the name or the rank, the element, what was expected and what came."""
    bits: int = 0
    """Elements of this kind, of all steps, that are not the same bits."""

    def __str__(self) -> str:
        return f"{self.kind} {self.largest:.1e} at {self.where}"


def differences(expected: Sequence[Record], got: Sequence[Record]) -> dict[str, Difference]:
    """By kind. Losses, buffers and random states are compared for the ranks that `got` has.

    Bits are compared, so runs that are both not a number would be alike: the losses expected are numbers."""
    assert len(expected) == len(got)
    assert all(bool(loss.isfinite().all()) for record in expected for loss in record.losses.values())
    found: dict[str, Difference] = {}
    for step, (a, b) in enumerate(zip(expected, got)):
        for kind, name, x, y in _pairs(a, b):
            size, bits, told = _apart(x, y)
            old = found.get(kind, Difference(kind, -1.0, ""))
            where = f"step {step}, {name}{told}" if size > old.largest else old.where
            found[kind] = Difference(kind, max(size, old.largest), where, old.bits + bits)
        if list(a.state) != list(b.state):
            where = f"step {step}, state dict: expected {', '.join(a.state)}, got {', '.join(b.state)}"
            found["keys"] = Difference("keys", math.inf, where, 1)
    return found


def _pairs(a: Record, b: Record) -> Iterator[tuple[str, str, Any, Any]]:
    yield "norm", "total", a.norm, b.norm
    for rank in b.losses:
        yield "loss", f"rank {rank}", a.losses[rank], b.losses[rank]
        yield "random", f"rank {rank}", a.random[rank], b.random[rank]
        yield from _named("buffer", a.buffers[rank], b.buffers[rank], f" of rank {rank}")
    for kind in ("gradients", "parameters", "moments", "state"):
        yield from _named(kind, getattr(a, kind), getattr(b, kind))


def _named(
    kind: str, left: Mapping[str, Any], right: Mapping[str, Any], of: str = ""
) -> Iterator[tuple[str, str, Any, Any]]:
    for name in left | right:
        yield kind, name + of, left.get(name, "nothing"), right.get(name, "nothing")


def _apart(x: Any, y: Any) -> tuple[float, int, str]:
    """How far, in how many elements, and in words; x and y are tensors, or None, or the word for what is not there."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return (0.0, 0, "") if x is y else (math.inf, 1, f": expected {_brief(x)}, got {_brief(y)}")
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf, 1, f": expected {_brief(x)}, got {_brief(y)}"
    if x.numel() == 0:
        return 0.0, 0, ""
    size = x.element_size()
    unlike = [t.contiguous().view(-1).view(torch.uint8).view(-1, size) for t in (x, y)]
    bits = int((unlike[0] != unlike[1]).any(1).sum())
    if not bits:
        return 0.0, 0, ""
    apart = (x.double() - y.double()).abs().nan_to_num(math.inf, math.inf)
    place = tuple(int(i) for i in torch.unravel_index(apart.argmax(), x.shape))
    return apart[place].item(), bits, f"{list(place)}: expected {x[place].item()!r}, got {y[place].item()!r}"


def _brief(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else str(value)


def worst(found: dict[str, Difference]) -> float:
    return max(d.largest for d in found.values())


def text(found: dict[str, Difference]) -> str:
    return "; ".join(str(d) for d in found.values() if d.bits) or "the same bits"
