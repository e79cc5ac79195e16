"""FlatParameter layout: where each parameter lies in a unit's flat buffer, and which piece each rank holds.

Shape letters: F ranks of the shard group, S = padded numel / F elements a rank.

    sizes (5, 3), fp32, F=4  ->  offsets (0, 8), padded 16, S=4; rank 1 holds elements 4..7: the last one of the first
    parameter and three of padding.

Source: FSDP paper, section 4.2 (FlatParameter); the 16-byte rule keeps collectives on their fast path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as the user's module has it. `stride` is of the logical shape; the flat piece follows storage
    order."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    """Other names of the same parameter (ties)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank holds: `length` elements from `start` of the parameter, at `shard_start`
    of the shard."""

    index: int
    start: int
    shard_start: int
    length: int


@dataclass(frozen=True)
class FlatParameter:
    """A unit's parameters of one (dtype, requires_grad), flat, concatenated, padded and cut into F equal shards.

    Sizes are in elements unless the name ends in `_bytes`. `param_dtype` is what is gathered and computed with,
    `reduce_dtype` what gradients are reduced in; both equal `dtype` without mixed precision.
    """

    name: str
    unit: str
    is_root: bool
    dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    requires_grad: bool
    parameters: tuple[ParameterSpec, ...]
    F: int
    offsets: tuple[int, ...]
    padded_numel: int
    accumulate_dtype: torch.dtype
    """What gradients of several backwards are added up in, before they are rounded to the dtype of `.grad`."""

    @staticmethod
    def build(
        name: str,
        unit: str,
        is_root: bool,
        parameters: tuple[ParameterSpec, ...],
        F: int,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
    ) -> FlatParameter:
        """Lay `parameters` (one dtype, registration order) out: each piece and each rank's shard starts 16-byte
        aligned."""
        dtype, requires_grad = parameters[0].dtype, parameters[0].requires_grad
        assert all(p.dtype == dtype for p in parameters)
        param_dtype, reduce_dtype = param_dtype or dtype, reduce_dtype or dtype
        promotes = dtype.is_floating_point and dtype.itemsize > 1  # fp8 does not
        wide = torch.promote_types(dtype, torch.float32) if promotes else dtype
        alignment = max(1, *(ALIGNMENT_BYTES // d.itemsize for d in (dtype, param_dtype, reduce_dtype)))
        offsets, end = [], 0
        for p in parameters:
            offsets.append(end)
            end += math.ceil(p.numel / alignment) * alignment
        padded = math.ceil(end / (F * alignment)) * F * alignment
        return FlatParameter(
            name, unit, is_root, dtype, param_dtype, reduce_dtype, requires_grad, parameters, F, tuple(offsets), padded,
            accumulate_dtype or wide,
        )  # fmt: skip

    @property
    def shard_numel(self) -> int:
        """S: elements each rank holds, padding included."""
        return self.padded_numel // self.F

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(p.numel for p in self.parameters)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.padded_numel * self.param_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the unsharded gradient buffer in the reduce dtype."""
        return self.padded_numel * self.reduce_dtype.itemsize

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(p.fqn for p in self.parameters)

    def wholes(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in a full flat buffer (padded,), each of its own shape and stride."""
        return [full.as_strided(p.shape, p.stride, offset) for p, offset in zip(self.parameters, self.offsets)]

    def cut(self, index: int) -> tuple[int, ...]:
        """How a parameter is cut over the shard group: the same for two of one size whose elements lie on the same ranks.

        F, the first rank, how many elements it holds, and S if a third rank holds some; () for a parameter of none.
        """
        numel, (first, start) = self.parameters[index].numel, divmod(self.offsets[index], self.shard_numel or 1)
        if numel == 0:
            return ()
        held = min(numel, self.shard_numel - start)
        return (self.F, first, held) if numel - held <= self.shard_numel else (self.F, first, held, self.shard_numel)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` of the shard group holds of each parameter, in order; a piece may be empty."""
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for index, (p, offset) in enumerate(zip(self.parameters, self.offsets)):
            low, high = max(begin, offset), min(end, offset + p.numel)
            if low < high:
                yield Piece(index, low - offset, low - begin, high - low)
            else:
                yield Piece(index, 0, 0, 0)


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: `sizes` elements from `offsets`; in flat storage order it is `numel` elements from `start`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def storage_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The dims of a dense tensor from the slowest in memory to the fastest."""
    return sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -stride[dim]))


def boxes(shape: tuple[int, ...], stride: tuple[int, ...], start: int, length: int) -> list[Box]:
    """The rectangles that `length` elements from `start` of a dense tensor, in storage order, consist of, in that order.

        shape (4, 3), start 2, length 8  ->  (0, 2) of (1, 1), (1, 0) of (2, 3), (3, 0) of (1, 1)

    At most two for each dim but the first, and one more. A tensor without elements is one rectangle, wherever it is held.
    """
    order = storage_order(shape, stride)
    inverse = [order.index(dim) for dim in range(len(shape))]
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), shape, 0)]
    found: list[Box] = []

    def cut(fixed: tuple[int, ...], begin: int, end: int, base: int) -> None:
        """Elements begin..end of what is left of the tensor where the first dims are fixed; that starts at `base`."""
        if begin >= end:
            return
        rest = [shape[dim] for dim in order[len(fixed) :]]
        row = math.prod(rest[1:])
        first, last = -(-begin // row), end // row
        if not rest or (first < last and begin % row == 0 and end % row == 0):
            offsets = (*fixed, *([first] if rest else []), *([0] * len(rest[1:])))
            sizes = (*([1] * len(fixed)), *([last - first] if rest else []), *rest[1:])
            box = [tuple(values[i] for i in inverse) for values in (offsets, sizes)]
            found.append(Box(box[0], box[1], base + begin))
        elif first > last:  # within one row
            cut((*fixed, last), begin - last * row, end - last * row, base + last * row)
        else:
            cut((*fixed, first - 1), begin - (first - 1) * row, row, base + (first - 1) * row)
            cut(fixed, first * row, last * row, base)
            cut((*fixed, last), 0, end - last * row, base + last * row)

    cut((), start, start + length, 0)
    return found


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and stride covers its memory exactly once (any order of dims)."""
    if math.prod(shape) <= 1:
        return True
    expected = 1
    for size, step in sorted(((n, s) for n, s in zip(shape, stride) if n != 1), key=lambda pair: pair[1]):
        if step != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
