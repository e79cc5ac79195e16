"""Moving and summing flat buffers: one launch for many tensors on GPUs, a few torch calls on CPUs.

    flatten_cast_scale   gradients -> one flat buffer in the reduce dtype, scaled, padding zeroed
    cast_shard           a shard -> the same in another dtype
    chunk_sum            the chunks received from F ranks -> their sum, in rank order

Who computes: tensors on CUDA go to Triton, all others to torch, with the same bits. `use_triton=False` asks for torch
anywhere. `use_triton=True` asks for Triton: on CUDA, or on a CPU under Triton's interpreter (TRITON_INTERPRET=1 before
the first use, for tests). Triton is imported when first used; without it everything here works in torch.

Dtypes are float16, bfloat16, float32 and float64. Arithmetic is in fp32, or in fp64 where an operand is fp64, and what
is stored was rounded once. Autograd sees none of it. Sizes and offsets are in elements. Outputs overlap no input,
unless said.

    >>> out = torch.empty(8)
    >>> flatten_cast_scale([torch.ones(3), torch.ones(2)], offsets=(0, 4), numels=(3, 2), out=out, scale=0.5)
    >>> out.tolist()
    [0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.0, 0.0]
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch

from fxshard.ir.layout import is_dense

from . import reference
from .plan import FlattenPlan, segments_of

__all__ = ["FlattenPlan", "cast_shard", "chunk_sum", "computed_by", "flatten_cast_scale"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_is_dense = functools.lru_cache(maxsize=4096)(is_dense)


@torch.no_grad()
def flatten_cast_scale(
    grads: Sequence[torch.Tensor | None],
    offsets: Sequence[int],
    numels: Sequence[int],
    out: torch.Tensor,
    scale: float,
    *,
    strides: Sequence[Sequence[int]] | None = None,
    plan: FlattenPlan | None = None,
    accumulate: bool = False,
    use_triton: bool | None = None,
) -> None:
    """out[offset : offset + numel] = gradient * scale in storage order, for every gradient; the rest of `out` = 0.

    accumulate: add to `out` instead, each sum rounded once; what no gradient is for stays as it is.

    grads: one per piece, on one device and of one dtype, which may differ from out's; None counts as zeros. out:
    (total,) contiguous. strides: the stride each parameter has, dense and of the gradient's shape, in whose order the
    elements are laid down; a gradient with another stride is copied first, and a contiguous 1-D one is taken to be in
    that order already. Without `strides` a dense gradient is laid down as it lies in memory and any other in row-major
    order. plan: the tables of (offsets, numels) on out's device; without one, Triton's are built and uploaded at each
    call.

    Gradients are read when the current stream gets there: they have to stay as they are until then. The copies made
    here are ordered on that stream too.

    Raises TypeError for dtypes that are not real floats and for sparse gradients, ValueError for gradients that do not
    fit together or into `out`.
    """
    _check_flat("out", out)
    _check_layout(offsets, numels, out, plan, grads=grads, strides=strides)
    sources = _dense_sources(grads, numels, strides, out.device)
    dtypes = {source.dtype for source in sources if source is not None}
    kernels = _kernels(out.device, use_triton)
    if not dtypes or out.numel() == 0:
        if not accumulate:
            out.zero_()
    elif kernels is None:
        segments = segments_of(tuple(offsets), tuple(numels), out.numel()) if plan is None else plan.segments
        reference.flatten_cast_scale(sources, segments, out, scale, accumulate)
    else:
        plan = plan or FlattenPlan(offsets, numels, out.numel(), out.device)
        kernels.flatten_cast_scale(sources, plan, dtypes.pop(), out, scale, accumulate)


@torch.no_grad()
def cast_shard(src: torch.Tensor, out: torch.Tensor, *, use_triton: bool | None = None) -> None:
    """out = src, each element to the nearest value of out's dtype, ties to even. src, out: (S,) contiguous.

    Raises TypeError for dtypes that are not real floats, ValueError for shapes or devices that differ.
    """
    _check_flat("src", src)
    _check_flat("out", out)
    _check_like("src", src, out)
    kernels = _kernels(out.device, use_triton)
    if out.numel():
        (kernels or reference).cast_shard(src, out)


@torch.no_grad()
def chunk_sum(
    chunks: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor, *, use_triton: bool | None = None
) -> None:
    """out = ((c0 + c1) + c2) + ... over F chunks in order, summed in fp32 (fp64 if the chunks are), rounded once.

    chunks: F tensors (S,), contiguous and of one dtype, or one (F, S) whose rows are contiguous; on CUDA the latter
    spares an upload of addresses. out: (S,) contiguous. One chunk may be `out` itself; any other overlap is an error of
    the caller. The order is part of the result: the same chunks give the same bits on every device and for every S.

    Raises TypeError for dtypes that are not real floats, ValueError for no chunks and for chunks that do not fit
    together.
    """
    _check_flat("out", out)
    rows = list(chunks.unbind(0)) if isinstance(chunks, torch.Tensor) and chunks.dim() == 2 else list(chunks)
    if not rows:
        raise ValueError("chunk_sum: no chunks; expected one or more")
    for i, row in enumerate(rows):
        _check_flat(f"chunk {i}", row)
        _check_like(f"chunk {i}", row, out)
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    if len(dtypes) > 1:
        raise ValueError(f"chunk_sum: chunks of several dtypes, {', '.join(map(str, dtypes))}; expected one")
    kernels = _kernels(out.device, use_triton)
    if out.numel() == 0:
        return
    if kernels is None:
        reference.chunk_sum(rows, out)
    else:
        kernels.chunk_sum(chunks if isinstance(chunks, torch.Tensor) else rows, out)


def _dense_sources(
    grads: Sequence[torch.Tensor | None],
    numels: Sequence[int],
    strides: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> list[torch.Tensor | None]:
    """For each gradient a tensor whose memory, from data_ptr on, is the gradient in storage order."""
    bad_types, bad_values = [], []
    for i, (grad, numel) in enumerate(zip(grads, numels)):
        if grad is None:
            continue
        if grad.layout != torch.strided:
            bad_types.append(f"gradient {i} has layout {grad.layout}; expected torch.strided")
        elif grad.dtype not in _FLOATS:
            bad_types.append(f"gradient {i} has dtype {grad.dtype}; expected one of {_names(_FLOATS)}")
        elif grad.numel() != numel:
            bad_values.append(f"gradient {i} has {grad.numel()} elements; expected {numel}")
        elif grad.device != device:
            bad_values.append(f"gradient {i} is on {grad.device}; expected {device}, where out is")
        elif strides is not None and not _fits(grad, strides[i]):
            bad_values.append(f"gradient {i} has shape {tuple(grad.shape)}, for which {tuple(strides[i])} is not dense")
    dtypes = list(dict.fromkeys(grad.dtype for grad in grads if grad is not None))
    if len(dtypes) > 1 and not bad_types:
        bad_values.append(f"gradients have several dtypes, {_names(dtypes)}; expected one a call")
    if bad_types:
        raise TypeError("flatten_cast_scale: " + "; ".join(bad_types))
    if bad_values:
        raise ValueError("flatten_cast_scale: " + "; ".join(bad_values))
    return [
        None if grad is None else _dense_source(grad, None if strides is None else strides[i])
        for i, grad in enumerate(grads)
    ]


def _dense_source(grad: torch.Tensor, stride: Sequence[int] | None) -> torch.Tensor:
    grad = grad.resolve_neg()  # a view of a conjugate's imaginary part: its memory holds the negative
    if stride is None:
        return grad if _is_dense(tuple(grad.shape), grad.stride()) else grad.contiguous()
    if _lies_as(grad, stride) or _is_flat(grad, stride):
        return grad
    return torch.empty_strided(grad.shape, tuple(stride), dtype=grad.dtype, device=grad.device).copy_(grad)


def _is_flat(grad: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the gradient of a parameter that is not 1-D came as a contiguous 1-D tensor."""
    return grad.dim() == 1 and len(stride) != 1 and grad.is_contiguous()


def _fits(grad: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether a parameter of the gradient's shape can have this stride and be dense."""
    return _is_flat(grad, stride) or (len(stride) == grad.dim() and _is_dense(tuple(grad.shape), tuple(stride)))


def _lies_as(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the tensor has this stride, where that matters, and is dense."""
    shape, have, want = tuple(tensor.shape), tensor.stride(), tuple(stride)
    if have != want:
        if len(have) != len(want):
            return False
        if tensor.numel() > 1 and any(n != 1 and a != b for n, a, b in zip(shape, have, want)):
            return False
    return _is_dense(shape, want)


def _check_layout(
    offsets: Sequence[int],
    numels: Sequence[int],
    flat: torch.Tensor,
    plan: FlattenPlan | None,
    **per_piece: Sequence[object] | None,
) -> None:
    """Raise ValueError unless pieces, buffer and plan belong together and each of `per_piece` has an entry per
    piece."""
    lengths = {name: len(entries) for name, entries in per_piece.items() if entries is not None}
    if any(length != len(numels) for length in lengths.values()):
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{got} for {len(numels)} pieces; expected one of each per piece")
    if plan is None:
        segments_of(tuple(offsets), tuple(numels), flat.numel())
    else:
        plan.check(offsets, numels, flat)


def _check_flat(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {_names(_FLOATS)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, stride {tensor.stride()}; expected 1-D and contiguous"
        )


def _check_like(name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    if tensor.numel() != out.numel() or tensor.device != out.device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements on {tensor.device}; expected {out.numel()} on {out.device}, as out"
        )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def computed_by(device: torch.device) -> str:
    """Who computes for tensors on `device` unless told otherwise: 'triton' or 'torch'."""
    return "torch" if _kernels(device, None) is None else "triton"


def _kernels(device: torch.device, use_triton: bool | None) -> ModuleType | None:
    """The module of Triton kernels if they are to compute on `device`, None for torch.

    Raises ValueError where Triton was asked for and cannot.
    """
    if use_triton is False or (use_triton is None and device.type != "cuda"):
        return None
    kernels = _load_triton_kernels()
    if kernels is None:
        if use_triton:
            raise ValueError("use_triton=True, but triton is not installed; install triton, or leave use_triton out")
        _warn_without_triton()
        return None
    if device.type == ("cpu" if kernels.INTERPRETED else "cuda"):
        return kernels
    if use_triton:
        mode = (
            "interpreted (TRITON_INTERPRET=1), for CPU tensors" if kernels.INTERPRETED else "compiled, for CUDA tensors"
        )
        raise ValueError(
            f"use_triton=True for tensors on {device}, but kernels are {mode} only; "
            "set TRITON_INTERPRET accordingly before their first use, or leave use_triton out"
        )
    return None


@functools.cache
def _load_triton_kernels() -> ModuleType | None:
    try:
        from . import triton_kernels
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None
    return triton_kernels


@functools.cache
def _warn_without_triton() -> None:
    warnings.warn(
        "triton is not installed: CUDA buffers are flattened and summed by torch, several launches for each tensor",
        stacklevel=4,
    )
