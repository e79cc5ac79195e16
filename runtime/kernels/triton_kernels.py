"""The kernels in Triton, one launch each. The arithmetic and its roundings are those of `reference`, bit for bit.

Importing this module imports Triton. Whether the kernels are compiled or interpreted is settled then, by
TRITON_INTERPRET.

[Note: wide accesses] A 16-byte access needs the compiler to see that the address is a multiple of 16 and that a mask is
the same for all the bytes. Neither holds in general: a gradient may be a view at any element, and a piece ends
anywhere. So each program looks at its block and takes one of two paths: a whole, aligned block without a mask, else
element by element with one. A hint (tl.multiple_of) stays with the operation that made the value, so a hint on a value
both paths use would be a lie on the second. The first path therefore makes its own pointer from the address, and writes
an aligned offset x as x // WIDE * WIDE: the same number, visibly a multiple. Pointers that are plain arguments need
none of this: Triton compiles another kernel for those that are not aligned.

Where a block begins is int64, for buffers of more than 2**31 elements are met; lanes count from there, in int32 to
spare registers. Only builtins of tl are called, no function of Triton's own library: those are compiled or interpreted
as settled when Triton was imported, which may have been before this module.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from .plan import BLOCK_NUMEL, FlattenPlan, upload_addresses

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run under Triton's interpreter, on memory of the CPU."""

_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""How every kernel is compiled; without fusion, as each multiply and add rounds by itself in the reference."""

_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """x to DTYPE, to nearest, ties to even. fp64 goes to 16 bits by way of fp32 rounded to odd, as in the reference."""
    if x.dtype == tl.float64 and DTYPE.primitive_bitwidth == 16:
        nearest = x.to(tl.float32)
        back = nearest.to(tl.float64)
        bits = nearest.to(tl.int32, bitcast=True)
        bits = tl.where(tl.abs(back) > tl.abs(x), bits - 1, bits)
        bits = tl.where(back != x, bits | 1, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def flatten_cast_scale_kernel(
    addresses,
    segment_table,
    block_table,
    out,
    scale: tl.float64,  # without the annotation a Python float arrives as fp32
    SOURCE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes one block of one segment: the piece times scale, then zeros to the segment's end. If ADD, it adds
    the piece times scale to what is there.

    addresses (segments,) int64, 0 for no piece; segment_table (segments, 4) int64; block_table (num_blocks,) int32; out
    (total,), written whole.
    """
    OUT: tl.constexpr = out.dtype.element_ty
    WIDE: tl.constexpr = 128 // OUT.primitive_bitwidth
    factor = tl.full([], scale, COMPUTE)
    segment = tl.load(block_table + tl.program_id(0)).to(tl.int64)
    address = tl.load(addresses + segment)
    start = tl.load(segment_table + segment * 4)
    numel = tl.load(segment_table + segment * 4 + 1)
    span = tl.load(segment_table + segment * 4 + 2)
    first_block = tl.load(segment_table + segment * 4 + 3)
    begin = (tl.program_id(0) - first_block) * BLOCK
    left = tl.where(address == 0, 0, numel) - begin
    lanes = tl.arange(0, BLOCK)
    if (left >= BLOCK) & (address % 16 == 0) & (start % WIDE == 0):  # See [Note: wide accesses]
        source = tl.multiple_of(address.to(tl.pointer_type(SOURCE)), 16) + begin
        x = tl.load(source + lanes).to(COMPUTE) * factor
        target = out + start // WIDE * WIDE + begin + lanes
        if ADD:
            x += tl.load(target).to(COMPUTE)
        tl.store(target, _round(x, OUT))
    else:
        source = address.to(tl.pointer_type(SOURCE)) + begin
        x = tl.load(source + lanes, mask=lanes < left, other=0.0).to(COMPUTE) * factor
        x = tl.where(lanes < left, x, 0.0)  # padding is zero even if scale is not finite
        target = out + start + begin + lanes
        if ADD:
            x += tl.load(target, mask=lanes < span - begin, other=0.0).to(COMPUTE)
        tl.store(target, _round(x, OUT), mask=lanes < span - begin)


@triton.jit
def cast_shard_kernel(src, out, numel, BLOCK: tl.constexpr):
    """One program casts one block. src (numel,), out (numel,)."""
    OUT: tl.constexpr = out.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    left = numel - begin
    lanes = tl.arange(0, BLOCK)
    if left >= BLOCK:  # See [Note: wide accesses]
        tl.store(out + begin + lanes, _round(tl.load(src + begin + lanes), OUT))
    else:
        x = tl.load(src + begin + lanes, mask=lanes < left)
        tl.store(out + begin + lanes, _round(x, OUT), mask=lanes < left)


@triton.jit
def chunk_sum_rows_kernel(chunks, row_stride, num_chunks, out, numel, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """One program sums one block of all rows, first to last. chunks: rows (numel,), row_stride apart; out (numel,)."""
    OUT: tl.constexpr = out.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    left = numel - begin
    lanes = tl.arange(0, BLOCK)
    row = chunks + begin
    if left >= BLOCK:  # See [Note: wide accesses]
        total = tl.load(row + lanes).to(ACCUMULATE)
        for _ in tl.range(1, num_chunks, loop_unroll_factor=4):
            row += row_stride
            total += tl.load(row + lanes).to(ACCUMULATE)
        tl.store(out + begin + lanes, _round(total, OUT))
    else:
        total = tl.load(row + lanes, mask=lanes < left, other=0.0).to(ACCUMULATE)
        for _ in tl.range(1, num_chunks):
            row += row_stride
            total += tl.load(row + lanes, mask=lanes < left, other=0.0).to(ACCUMULATE)
        tl.store(out + begin + lanes, _round(total, OUT), mask=lanes < left)


@triton.jit
def chunk_sum_table_kernel(
    addresses,
    num_chunks,
    out,
    numel,
    CHUNK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for chunks anywhere: addresses (num_chunks,) int64, all multiples of 16 if ALIGNED; out (numel,)."""
    OUT: tl.constexpr = out.dtype.element_ty
    UNIT: tl.constexpr = 16 if ALIGNED else 1
    POINTER: tl.constexpr = tl.pointer_type(CHUNK)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    left = numel - begin
    lanes = tl.arange(0, BLOCK)
    first = tl.multiple_of(tl.load(addresses).to(POINTER), UNIT) + begin
    if left >= BLOCK:  # See [Note: wide accesses]
        total = tl.load(first + lanes).to(ACCUMULATE)
        for i in tl.range(1, num_chunks, loop_unroll_factor=4):
            chunk = tl.multiple_of(tl.load(addresses + i).to(POINTER), UNIT) + begin
            total += tl.load(chunk + lanes).to(ACCUMULATE)
        tl.store(out + begin + lanes, _round(total, OUT))
    else:
        total = tl.load(first + lanes, mask=lanes < left, other=0.0).to(ACCUMULATE)
        for i in tl.range(1, num_chunks):
            chunk = tl.multiple_of(tl.load(addresses + i).to(POINTER), UNIT) + begin
            total += tl.load(chunk + lanes, mask=lanes < left, other=0.0).to(ACCUMULATE)
        tl.store(out + begin + lanes, _round(total, OUT), mask=lanes < left)


def flatten_cast_scale(
    sources: Sequence[torch.Tensor | None],
    plan: FlattenPlan,
    dtype: torch.dtype,
    out: torch.Tensor,
    scale: float,
    accumulate: bool = False,
) -> None:
    """As `reference.flatten_cast_scale`; dtype: that of all sources."""
    compute = torch.float64 if torch.float64 in (dtype, out.dtype) else torch.float32
    with _device_of(out):
        flatten_cast_scale_kernel[(plan.num_blocks,)](
            plan.address_table(sources),
            plan.segment_table,
            plan.block_table,
            out,
            float(scale),
            SOURCE=_DTYPES[dtype],
            COMPUTE=_DTYPES[compute],
            ADD=accumulate,
            BLOCK=BLOCK_NUMEL,
            **_OPTIONS,
        )


def cast_shard(src: torch.Tensor, out: torch.Tensor) -> None:
    """As `reference.cast_shard`."""
    with _device_of(out):
        cast_shard_kernel[(triton.cdiv(out.numel(), BLOCK_NUMEL),)](
            src, out, out.numel(), BLOCK=BLOCK_NUMEL, **_OPTIONS
        )


def chunk_sum(chunks: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor) -> None:
    """As `reference.chunk_sum`. Separate chunks need an upload of their addresses, one tensor (F, S) does not."""
    grid = (triton.cdiv(out.numel(), BLOCK_NUMEL),)
    dtype = chunks[0].dtype
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    with _device_of(out):
        if isinstance(chunks, torch.Tensor):
            chunk_sum_rows_kernel[grid](
                chunks,
                chunks.stride(0),
                chunks.shape[0],
                out,
                out.numel(),
                ACCUMULATE=accumulate,
                BLOCK=BLOCK_NUMEL,
                **_OPTIONS,
            )
            return
        addresses = [chunk.data_ptr() for chunk in chunks]
        chunk_sum_table_kernel[grid](
            upload_addresses(addresses, out.device),
            len(chunks),
            out,
            out.numel(),
            CHUNK=_DTYPES[dtype],
            ACCUMULATE=accumulate,
            ALIGNED=all(address % 16 == 0 for address in addresses),
            BLOCK=BLOCK_NUMEL,
            **_OPTIONS,
        )


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which has to be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
