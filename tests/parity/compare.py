"""How far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.parity.oracle import Record


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of one kind of value, and where it is. inf: one is missing, or not a number."""

    kind: str
    largest: float
    where: str
    bits: int = 0
    """Elements of this kind, of all steps, that are not the same bits."""

    def __str__(self) -> str:
        return f"{self.kind} {self.largest:.1e} at {self.where}"


def differences(expected: Sequence[Record], got: Sequence[Record]) -> dict[str, Difference]:
    """By kind. Losses, buffers and random states are compared for the ranks that `got` has."""
    assert len(expected) == len(got)
    found: dict[str, Difference] = {}
    for step, (a, b) in enumerate(zip(expected, got)):
        for kind, name, x, y in _pairs(a, b):
            size, bits = _apart(x, y)
            old = found.get(kind, Difference(kind, -1.0, ""))
            where = f"step {step}, {name}" if size > old.largest else old.where
            found[kind] = Difference(kind, max(size, old.largest), where, old.bits + bits)
    return found


def _pairs(a: Record, b: Record) -> Iterator[tuple[str, str, Tensor | None, Tensor | None]]:
    for rank in b.losses:
        yield "loss", f"rank {rank}", a.losses[rank], b.losses[rank]
        yield "random", f"rank {rank}", a.random[rank], b.random[rank]
        for name in a.buffers[rank].keys() | b.buffers[rank].keys():
            yield "buffer", f"{name} of rank {rank}", a.buffers[rank].get(name), b.buffers[rank].get(name)
    for kind in ("gradients", "parameters", "moments"):
        left, right = getattr(a, kind), getattr(b, kind)
        for name in left.keys() | right.keys():
            if (name in left) != (name in right):
                yield kind, f"{name} (on one side only)", torch.tensor(math.nan), None
            else:
                yield kind, name, left[name], right[name]


def _apart(x: Tensor | None, y: Tensor | None) -> tuple[float, int]:
    if x is None or y is None:
        return (0.0, 0) if x is y else (math.inf, 1)
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf, 1
    if x.numel() == 0:
        return 0.0, 0
    bits = int((x.reshape(-1).view(torch.uint8) != y.reshape(-1).view(torch.uint8)).sum())
    if not bits:
        return 0.0, 0
    size = (x.double() - y.double()).abs().max().item()
    return (size if math.isfinite(size) else math.inf), bits


def worst(found: dict[str, Difference]) -> float:
    return max(d.largest for d in found.values())


def text(found: dict[str, Difference]) -> str:
    return "; ".join(str(d) for d in found.values() if d.bits) or "the same bits"
