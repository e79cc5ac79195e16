"""The kernels' operations in torch: what runs on CPUs, and what the Triton kernels are held to bit for bit.

Every result is rounded once. Arithmetic is in the *compute dtype*: fp64 where an operand is fp64, fp32 otherwise.
Arguments are checked by the public functions of the package; sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .plan import Segment

BLOCK_NUMEL = 1 << 17
"""Elements handled at a time where it takes several passes; what lies between two, 512 KiB in fp32, stays in cache."""


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of any dim order as 1-D, a view of its memory."""
    if tensor.dim() == 1:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten_cast_scale(
    sources: Sequence[torch.Tensor | None],
    segments: Sequence[Segment],
    out: torch.Tensor,
    scale: float,
    accumulate: bool = False,
) -> None:
    """out (total,) = each dense source's memory times `scale` at its segment, zeros elsewhere; or is added to `out`."""
    sizes: list[int] = []
    pieces: list[torch.Tensor | None] = []
    for segment in segments:
        source = None if segment.index is None else sources[segment.index]
        if source is None:
            sizes.append(segment.span)
            pieces.append(None)
            continue
        sizes.append(segment.numel)
        pieces.append(source)
        if segment.span > segment.numel:
            sizes.append(segment.span - segment.numel)
            pieces.append(None)
    for target, piece in zip(out.split(sizes), pieces):
        if piece is None:
            if not accumulate:
                target.zero_()
        elif accumulate:
            _add_scaled(storage_order(piece), scale, target)
        else:
            _scale_into(storage_order(piece), scale, target)


def cast_shard(src: torch.Tensor, out: torch.Tensor) -> None:
    """out (S,) = src (S,) to the nearest value of out's dtype, ties to even."""
    _round_into(src, out)


def chunk_sum(chunks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out (S,) = ((c0 + c1) + c2) + ... of F chunks (S,), summed in the compute dtype.

    One chunk may be `out` itself. torch.sum is not used: its order depends on shape and device.
    """
    accumulate = torch.float64 if chunks[0].dtype == torch.float64 else torch.float32
    if len(chunks) > 1 and chunks[1].data_ptr() == out.data_ptr():
        chunks = [chunks[1], chunks[0], *chunks[2:]]  # c0 + c1 is c1 + c0, and the sum is made where it stays
    later = {chunk.data_ptr() for chunk in chunks[1:]}
    in_place = out.dtype == accumulate and out.data_ptr() not in later
    for begin in range(0, out.numel(), BLOCK_NUMEL):
        block = slice(begin, begin + BLOCK_NUMEL)
        target = out[block]
        if in_place:
            total = target.copy_(chunks[0][block])
        else:
            total = chunks[0][block].to(accumulate, copy=True)
        for chunk in chunks[1:]:
            total.add_(chunk[block])
        if not in_place:
            _round_into(total, target)


def _scale_into(source: torch.Tensor, scale: float, target: torch.Tensor) -> None:
    """target (n,) = source (n,) * scale in the compute dtype, rounded once.

    torch multiplies a 16-bit tensor and a Python number in fp32 and rounds the product, so equal dtypes need no
    temporary; with out= of a wider dtype it would round to the source's dtype first, so there the copy comes first.
    """
    if scale == 1.0:
        _round_into(source, target)
    elif source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:
        compute = torch.float64 if torch.float64 in (source.dtype, target.dtype) else torch.float32
        for piece, result in _blocks(source, target):
            if result.dtype == compute:
                result.copy_(piece).mul_(scale)
            else:
                _round_into(piece.to(compute).mul(scale), result)


def _add_scaled(source: torch.Tensor, scale: float, target: torch.Tensor) -> None:
    """target (n,) += source (n,) * scale, product and sum in the compute dtype, the result rounded once."""
    compute = torch.float64 if torch.float64 in (source.dtype, target.dtype) else torch.float32
    for piece, result in _blocks(source, target):
        scaled = piece.to(compute) if scale == 1.0 else piece.to(compute).mul(scale)
        if result.dtype == compute:
            result.add_(scaled)
        else:
            _round_into(result.to(compute).add_(scaled), result)


def _round_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """target (n,) = source (n,) to the nearest value of target's dtype, ties to even."""
    if source.dtype == torch.float64 and target.dtype in (torch.float16, torch.bfloat16):
        for piece, result in _blocks(source, target):
            result.copy_(_to_odd_fp32(piece))
    else:
        target.copy_(source)


def _blocks(source: torch.Tensor, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Both (n,) tensors, BLOCK_NUMEL elements at a time."""
    if source.numel() <= BLOCK_NUMEL:
        return ((source, target),)
    return zip(source.split(BLOCK_NUMEL), target.split(BLOCK_NUMEL))


def _to_odd_fp32(source: torch.Tensor) -> torch.Tensor:
    """source (n,) fp64 -> (n,) fp32, rounded to odd: toward zero, and the last bit set where that lost anything.

    torch casts fp64 to 16 bits by way of fp32, and two roundings to nearest may differ from one: 1 + 2**-8 + 2**-40
    goes to 1 + 2**-8 and, a tie now, to bf16 1.0, though 1 + 2**-7 is nearer. Rounding to odd first keeps every tie a
    tie and nothing else. Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008.
    """
    nearest = source.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    bits.sub_((back.abs() > source.abs()).to(torch.int32))
    bits.bitwise_or_((back != source).to(torch.int32))
    return nearest
