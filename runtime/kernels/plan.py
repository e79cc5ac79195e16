"""Where the pieces of a flat buffer lie, and the device tables from which one launch finds all of them.

    offsets (0, 8), numels (5, 3), total 16  ->  segments: piece 0 at 0..5 of span 8, piece 1 at 8..11 of span 8

A *segment* is a piece and the padding behind it; padding ahead of the first piece is a segment without a piece.
Segments cover the buffer, so whoever writes every segment has written every element. Sizes are in elements.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK_NUMEL = 4096
"""Elements one program of a kernel handles: with 8 warps, 16 a thread, so 16-byte accesses of every dtype."""


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `start + span`: `numel` of piece `index` (None: padding only), then padding."""

    index: int | None
    start: int
    numel: int
    span: int


@functools.lru_cache(maxsize=1024)
def segments_of(offsets: tuple[int, ...], numels: tuple[int, ...], total: int) -> tuple[Segment, ...]:
    """The segments of a buffer of `total` elements, by rising start. Empty pieces have none.

    Raises ValueError if the pieces and the buffer do not fit together.
    """
    if len(offsets) != len(numels):
        raise ValueError(f"{len(offsets)} offsets and {len(numels)} numels; expected one of each per piece")
    outside = [
        f"piece {i} at {offset} of {numel}"
        for i, (offset, numel) in enumerate(zip(offsets, numels))
        if offset < 0 or numel < 0 or offset + numel > total
    ]
    if outside:
        raise ValueError(f"pieces outside of a buffer of {total} elements: {', '.join(outside)}")
    order = sorted((i for i, numel in enumerate(numels) if numel), key=lambda i: offsets[i])
    overlapping = [
        f"piece {i} at {offsets[i]} of {numels[i]} runs into piece {j} at {offsets[j]}"
        for i, j in itertools.pairwise(order)
        if offsets[i] + numels[i] > offsets[j]
    ]
    if overlapping:
        raise ValueError(f"pieces overlap: {', '.join(overlapping)}")

    starts = [offsets[i] for i in order]
    segments = [Segment(i, offsets[i], numels[i], end - offsets[i]) for i, end in zip(order, [*starts[1:], total])]
    first = starts[0] if starts else total
    if first:
        segments.insert(0, Segment(None, 0, 0, first))
    return tuple(segments)


class FlattenPlan:
    """The static tables of one flat buffer's layout on one device, built once and used every step.

    offsets, numels: start and length of each piece, in elements; pieces do not overlap, their order is free.
    total: elements of the buffer. device: where the buffer and the pieces live.

    On CUDA the tables are uploaded here. A step then uploads only the pieces' addresses, and not even those when they
    are the ones of the step before. Nothing here makes the CPU wait for the device after construction.

    Streams: addresses are kept per stream, and a table that is replaced goes back to the allocator's pool of the stream
    that read it, so the next table on that stream is written after the last read. Uses on different streams share
    nothing that changes. Under CUDA graph capture the addresses have to be those of the call before, on the capturing
    stream: an upload cannot be captured.
    """

    def __init__(self, offsets: Sequence[int], numels: Sequence[int], total: int, device: torch.device | str) -> None:
        self.offsets = tuple(offsets)
        self.numels = tuple(numels)
        self.total = total
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.segments = segments_of(self.offsets, self.numels, total)
        self._addresses: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}
        if device.type == "cuda":
            _ = self.segment_table, self.block_table

    @functools.cached_property
    def num_blocks(self) -> int:
        """Programs of one launch."""
        return sum(_num_blocks(segment) for segment in self.segments)

    @functools.cached_property
    def segment_table(self) -> torch.Tensor:
        """(segments, 4) int64 on the device: start, numel, span, and the number of blocks of all segments before."""
        rows, blocks = [], 0
        for segment in self.segments:
            rows.append((segment.start, segment.numel, segment.span, blocks))
            blocks += _num_blocks(segment)
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(self.device)

    @functools.cached_property
    def block_table(self) -> torch.Tensor:
        """(num_blocks,) int32 on the device: the segment each block belongs to."""
        blocks = torch.tensor([_num_blocks(segment) for segment in self.segments], dtype=torch.int64)
        indices = torch.arange(len(self.segments), dtype=torch.int32)
        return torch.repeat_interleave(indices, blocks).to(self.device)

    def address_table(self, pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """(segments,) int64 on the device: the address of each segment's piece, 0 where there is none."""
        addresses = []
        for segment in self.segments:
            piece = None if segment.index is None else pieces[segment.index]
            addresses.append(0 if piece is None else piece.data_ptr())
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        known = self._addresses.get(stream)
        if known is not None and known[0] == tuple(addresses):
            return known[1]
        table = upload_addresses(addresses, self.device)
        self._addresses[stream] = (tuple(addresses), table)
        return table

    def check(self, offsets: Sequence[int], numels: Sequence[int], flat: torch.Tensor) -> None:
        """Raise ValueError unless the plan is of this layout and on this buffer's device."""
        wrong = []
        if tuple(offsets) != self.offsets:
            wrong.append(f"offsets {tuple(offsets)}, the plan's are {self.offsets}")
        if tuple(numels) != self.numels:
            wrong.append(f"numels {tuple(numels)}, the plan's are {self.numels}")
        if flat.numel() != self.total:
            wrong.append(f"a buffer of {flat.numel()} elements, the plan's has {self.total}")
        if flat.device != self.device:
            wrong.append(f"a buffer on {flat.device}, the plan is on {self.device}")
        if wrong:
            raise ValueError(f"the plan does not belong to this call: {'; '.join(wrong)}")


def upload_addresses(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """`addresses` as (n,) int64 on `device`, ordered on the current stream, without a wait of the CPU.

    The pinned host copy may be dropped at once: its allocator keeps it until the copy has run.
    """
    host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _num_blocks(segment: Segment) -> int:
    return -(-segment.span // BLOCK_NUMEL)
