"""The kernels against values worked out here: by index, in a plain loop, and with roundings done on bits.

Each check runs on torch and on Triton: compiled on a GPU, interpreted without one. The interpreter cuts fp32 off where
it should round it to bf16 (Triton 3.9), so under it a bf16 result is held to the cut; on a GPU to the nearest value.

Run as a script, this file compiles every kernel for sm_90, which takes no GPU, and prints what came out as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxshard.runtime.kernels import FlattenPlan, cast_shard, chunk_sum, flatten_cast_scale, reference
from fxshard.runtime.kernels.plan import BLOCK_NUMEL, segments_of

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
SIZES = (0, 1, 5, 7, 15, 16, 17, 1023, 1025)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
NAN = float("nan")

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def use_triton(request: pytest.FixtureRequest) -> bool:
    return request.param == "triton"


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(numel,) of either sign and magnitude 0.5 to 1.5: normal in every dtype, also after scaling by 1/3."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.rand(numel, dtype=torch.float64, generator=generator) + 0.5
    sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    return (magnitude * sign).to(dtype).to(DEVICE)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address (of 16 bytes, so complex128 stays aligned)."""
    view = torch.cat([tensor.new_zeros(1), tensor])[1:]
    assert tensor.numel() == 0 or view.data_ptr() % 16 == tensor.itemsize % 16
    return view


def rounded(exact: torch.Tensor, dtype: torch.dtype, use_triton: bool) -> torch.Tensor:
    """Normal fp32 or fp64 values to `dtype` in one rounding: to nearest even, or cut off where the interpreter does so.

    It is done on the bits of fp64, with no cast that could round.
    """
    bits = exact.double().view(torch.int64)
    dropped = 52 - MANTISSA_BITS[dtype]
    if dropped and not (dtype == torch.bfloat16 and use_triton and DEVICE.type == "cpu"):
        bits = bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    return (bits >> dropped << dropped).view(torch.float64).to(dtype)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def scaled(values: torch.Tensor, scale: float, dtype: torch.dtype, use_triton: bool) -> torch.Tensor:
    compute = compute_dtype(values.dtype, dtype)
    return rounded(values.to(compute) * torch.tensor(scale, dtype=compute, device=DEVICE), dtype, use_triton)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[got.itemsize]
    different = (got.contiguous().view(words) != expected.contiguous().view(words)).nonzero()
    if len(different):
        i = int(different[0, 0])
        raise AssertionError(f"{len(different)} of {got.numel()} differ, first {i}: {got[i]} != {expected[i]}")


def layout(numels: tuple[int, ...], head: int = 0, tail: int = 0, align: int = 16) -> tuple[tuple[int, ...], int]:
    """Offsets of the pieces, each a multiple of `align` (plus `head`), and the total."""
    offsets, end = [], head
    for numel in numels:
        offsets.append(end)
        end += math.ceil(numel / align) * align
    return tuple(offsets), end + tail


def in_storage_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """(numel,): each element at the place it has in a dense tensor of that stride, found by index."""
    place = torch.arange(tensor.numel()).as_strided(tensor.shape, stride).reshape(-1).to(DEVICE)
    flat = tensor.new_empty(tensor.numel())
    flat[place] = tensor.reshape(-1)
    return flat


# flatten_cast_scale


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_flatten_all_dtypes_and_odd_sizes(grad_dtype: torch.dtype, out_dtype: torch.dtype, use_triton: bool) -> None:
    numels = (*SIZES, 33, BLOCK_NUMEL + 1, 3)
    offsets, total = layout(numels, head=16, tail=BLOCK_NUMEL + 48)
    values = [random(numel, grad_dtype, i) for i, numel in enumerate(numels)]
    grads: list[torch.Tensor | None] = [misaligned(v) if i in (2, 6) else v for i, v in enumerate(values)]
    grads[9] = None
    expected = torch.zeros(total, dtype=out_dtype, device=DEVICE)
    for grad, offset, numel in zip(grads, offsets, numels):
        if grad is not None:
            expected[offset : offset + numel] = scaled(grad, 1 / 3, out_dtype, use_triton)
    out = torch.full((total,), NAN, dtype=out_dtype, device=DEVICE)
    flatten_cast_scale(grads, offsets, numels, out, 1 / 3, use_triton=use_triton)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("head", [0, 8, 3])
@pytest.mark.parametrize("numel", [*SIZES, BLOCK_NUMEL - 1, BLOCK_NUMEL, BLOCK_NUMEL + 1, 2 * BLOCK_NUMEL + 7])
def test_flatten_one_piece_at_any_alignment(numel: int, head: int, shift: bool, use_triton: bool) -> None:
    memory = torch.full((numel + 9,), NAN, dtype=torch.bfloat16, device=DEVICE)
    grad = memory[shift : shift + numel].copy_(random(numel, torch.bfloat16))
    expected = torch.zeros(head + numel + 5, device=DEVICE)
    expected[head : head + numel] = scaled(grad, 0.37, torch.float32, use_triton)
    out = torch.full_like(expected, NAN)
    flatten_cast_scale([grad], (head,), (numel,), out, 0.37, use_triton=use_triton)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_flatten_adds_to_what_is_there(grad_dtype, out_dtype, shift: bool, scale: float, use_triton: bool) -> None:
    """Each sum is rounded once; where there is no gradient, and between pieces, nothing changes."""
    numels = (*SIZES, BLOCK_NUMEL + 1, 3, 40)
    offsets, total = layout(numels, head=16, tail=BLOCK_NUMEL + 48)
    grads = [random(n, grad_dtype, seed=n).abs() for n in numels]
    grads = [misaligned(g) for g in grads] if shift else grads
    given = [None if i in (2, len(numels) - 1) else g for i, g in enumerate(grads)]
    before = random(total, out_dtype, seed=99).abs()
    out, expected = before.clone(), before.clone()
    compute = compute_dtype(grad_dtype, out_dtype)
    factor = torch.tensor(scale, dtype=compute, device=DEVICE)
    for grad, offset, n in zip(given, offsets, numels):
        if grad is not None:
            here = before[offset : offset + n].to(compute)
            expected[offset : offset + n] = rounded(here + grad.to(compute) * factor, out_dtype, use_triton)
    flatten_cast_scale(given, offsets, numels, out, scale, accumulate=True, use_triton=use_triton)
    assert_same_bits(out, expected)


def test_flatten_adds_no_gradients(use_triton: bool) -> None:
    out = torch.ones(32, device=DEVICE)
    flatten_cast_scale([None, None], (0, 16), (5, 7), out, 0.5, accumulate=True, use_triton=use_triton)
    assert out.tolist() == [1.0] * 32


@pytest.mark.parametrize("out_offset", [0, 1])
def test_flatten_writes_nothing_outside_of_out(out_offset: int, use_triton: bool) -> None:
    memory = torch.full((BLOCK_NUMEL + 100,), NAN, device=DEVICE)
    out = memory[out_offset : out_offset + BLOCK_NUMEL + 23]
    grads = [random(numel, torch.float32) for numel in (9, BLOCK_NUMEL)]
    flatten_cast_scale(grads, (0, 12), (9, BLOCK_NUMEL), out, 1 / 3, use_triton=use_triton)
    expected = torch.zeros_like(out)
    expected[:9], expected[12 : 12 + BLOCK_NUMEL] = (scaled(g, 1 / 3, torch.float32, use_triton) for g in grads)
    assert_same_bits(out, expected)
    assert memory[:out_offset].isnan().all() and memory[out_offset + out.numel() :].isnan().all()


def test_flatten_follows_the_storage_order_of_the_parameters(use_triton: bool) -> None:
    row_major, transposed, channels_last = (20, 1), (1, 6), (60, 1, 12, 3)
    wide = random(240, torch.float32, 1).view(6, 40)
    cases = [  # (gradient, stride of its parameter)
        (random(120, torch.float32, 0).view(6, 20), row_major),
        (random(120, torch.float32, 2).view(6, 20), transposed),
        (random(120, torch.float32, 3).view(20, 6).t(), row_major),
        (random(120, torch.float32, 4).view(20, 6).t(), transposed),
        (wide[:, ::2], row_major),
        (wide[:, :20], transposed),
        (random(120, torch.float32, 5).view(2, 3, 5, 4).to(memory_format=torch.channels_last), channels_last),
        (random(120, torch.float32, 6).view(2, 3, 5, 4), channels_last),
        (random(120, torch.float32, 7).view(2, 3, 5, 4).to(memory_format=torch.channels_last), (60, 20, 4, 1)),
        (random(1, torch.float32, 8).expand(6, 20), transposed),
        (random(120, torch.float32, 9).view(1, 6, 20), (7, 20, 1)),
        (random(1, torch.float32, 10).squeeze(), ()),
    ]
    numels = tuple(grad.numel() for grad, _ in cases)
    offsets, total = layout(numels)
    expected = torch.zeros(total, device=DEVICE)
    for (grad, stride), offset in zip(cases, offsets):
        flat = in_storage_order(grad, stride)
        expected[offset : offset + grad.numel()] = scaled(flat, 1 / 3, torch.float32, use_triton)
    out = torch.full_like(expected, NAN)
    grads, strides = [grad for grad, _ in cases], [stride for _, stride in cases]
    flatten_cast_scale(grads, offsets, numels, out, 1 / 3, strides=strides, use_triton=use_triton)
    assert_same_bits(out, expected)


def test_flatten_copies_no_gradient_that_lies_as_its_parameter(
    use_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = [(20, 1), (1, 6), (60, 1, 12, 3), (7, 20, 1)]
    shapes = [(6, 20), (6, 20), (2, 3, 5, 4), (1, 6, 20)]
    grads = [random(120, torch.float32).as_strided(shape, stride) for shape, stride in zip(shapes, strides)]
    strides[3] = (120, 20, 1)
    out = torch.empty(480, device=DEVICE)
    monkeypatch.setattr(torch, "empty_strided", None)
    flatten_cast_scale(grads, (0, 120, 240, 360), (120,) * 4, out, 1.0, strides=strides, use_triton=use_triton)
    assert_same_bits(out, random(120, torch.float32).repeat(4))


def test_flatten_takes_a_flat_gradient_as_it_is(use_triton: bool) -> None:
    grad = random(12, torch.float32)
    out = torch.full((16,), NAN, device=DEVICE)
    flatten_cast_scale([grad], (0,), (12,), out, 1.0, strides=[(1, 3)], use_triton=use_triton)
    assert_same_bits(out, torch.cat([grad, torch.zeros(4, device=DEVICE)]))


def test_flatten_without_strides_keeps_memory_order_of_dense_gradients_only(use_triton: bool) -> None:
    values = random(24, torch.float32)
    transposed, gaps = values[:12].view(3, 4).t(), values.view(3, 8)[:, ::2].t()
    out = torch.full((24,), NAN, device=DEVICE)
    flatten_cast_scale([transposed, gaps], (0, 12), (12, 12), out, 1.0, use_triton=use_triton)
    assert_same_bits(out, torch.cat([values[:12], gaps.reshape(-1)]))


def test_flatten_a_negated_view_as_its_values(use_triton: bool) -> None:
    grad = torch.tensor([1 + 2j], device=DEVICE).conj().imag
    assert grad.is_neg()
    out = torch.full((1,), NAN, device=DEVICE)
    flatten_cast_scale([grad], (0,), (1,), out, 1.0, use_triton=use_triton)
    assert out.item() == -2.0


def test_flatten_pieces_in_any_order(use_triton: bool) -> None:
    grads = [random(3, torch.float32, 0), random(0, torch.float32), random(4, torch.float32, 1)]
    out = torch.full((16,), NAN, device=DEVICE)
    flatten_cast_scale(grads, (8, 8, 1), (3, 0, 4), out, 1.0, use_triton=use_triton)
    zeros = torch.zeros(5, device=DEVICE)
    assert_same_bits(out, torch.cat([zeros[:1], grads[2], zeros[:3], grads[0], zeros]))


@pytest.mark.parametrize(("grads", "offsets", "numels", "total"), [
    ([], (), (), 0),
    ([], (), (), 20),
    ([None, None], (0, 16), (3, 4), 24),
    ([torch.zeros(0)], (0,), (0,), 0),
    ([torch.zeros(0), None], (0, 0), (0, 5), 9),
])  # fmt: skip
def test_flatten_nothing_gives_zeros(grads, offsets, numels, total: int, use_triton: bool) -> None:
    out = torch.full((total,), NAN, device=DEVICE)
    grads = [None if grad is None else grad.to(DEVICE) for grad in grads]
    flatten_cast_scale(grads, offsets, numels, out, 0.5, use_triton=use_triton)
    assert_same_bits(out, torch.zeros(total, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_flatten_pads_with_zeros_whatever_the_scale(use_triton: bool) -> None:
    grads = [torch.tensor([-1.0], device=DEVICE), None]
    for scale in (math.inf, NAN):
        out = torch.full((8,), 7.0, device=DEVICE)
        flatten_cast_scale(grads, (0, 4), (1, 3), out, scale, use_triton=use_triton)
        assert out[0].isnan() if math.isnan(scale) else out[0] == -math.inf
        assert_same_bits(out[1:], torch.zeros(7, device=DEVICE))


def test_flatten_scales_fp64_by_an_fp64_number(use_triton: bool) -> None:
    grad = torch.ones(3, dtype=torch.float64, device=DEVICE)
    out = torch.empty_like(grad)
    flatten_cast_scale([grad], (0,), (3,), out, 1 / 3, use_triton=use_triton)
    assert out.tolist() == [1 / 3] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_scaled_before_they_are_rounded(dtype: torch.dtype, use_triton: bool) -> None:
    """Neither the scale nor a product for an fp32 result may pass through 16 bits."""
    grad = random(1000, dtype)
    out = torch.empty(1000, device=DEVICE)
    flatten_cast_scale([grad], (0,), (1000,), out, 1 / 3, use_triton=use_triton)
    assert_same_bits(out, grad.float() * torch.tensor(1 / 3, device=DEVICE))
    assert not torch.equal(out, (grad / 3).float())


def test_autograd_sees_nothing(use_triton: bool) -> None:
    grad = random(4, torch.float32).requires_grad_()
    out = torch.empty(4, device=DEVICE)
    flatten_cast_scale([grad], (0,), (4,), out, 0.5, use_triton=use_triton)
    assert not out.requires_grad
    cast_shard(grad, out, use_triton=use_triton)
    chunk_sum([grad, grad], out, use_triton=use_triton)
    assert not out.requires_grad


# FlattenPlan


def test_segments_cover_the_buffer() -> None:
    segments = [(s.index, s.start, s.numel, s.span) for s in segments_of((12, 3, 3), (4, 5, 0), 20)]
    assert segments == [(None, 0, 0, 3), (1, 3, 5, 9), (0, 12, 4, 8)]
    assert segments_of((), (), 0) == ()


def test_plan_tables_name_the_segment_of_every_block() -> None:
    B = BLOCK_NUMEL
    plan = FlattenPlan((0, B, 3 * B), (3, B + 1, 7), 3 * B + 8, DEVICE)
    assert plan.block_table.tolist() == [0, 1, 1, 2]
    assert plan.segment_table.tolist() == [[0, 3, B, 0], [B, B + 1, 2 * B, 1], [3 * B, 7, 8, 3]]
    assert plan.num_blocks == 4


def test_plan_uploads_addresses_only_when_they_change(use_triton: bool) -> None:
    numels = (5, 3, 9)
    offsets, total = layout(numels)
    plan = FlattenPlan(offsets, numels, total, DEVICE)
    grads: list[torch.Tensor | None] = [random(numel, torch.float32, i) for i, numel in enumerate(numels)]
    first = plan.address_table(grads)
    assert first.tolist() == [grad.data_ptr() for grad in grads if grad is not None]
    for step in range(4):
        if step == 2:
            grads[1] = None
        for grad in grads:
            if grad is not None:
                grad.add_(1)
        expected = torch.zeros(total, device=DEVICE)
        for grad, offset, numel in zip(grads, offsets, numels):
            if grad is not None:
                expected[offset : offset + numel] = grad
        out = torch.full((total,), NAN, device=DEVICE)
        flatten_cast_scale(grads, offsets, numels, out, 1.0, plan=plan, use_triton=use_triton)
        assert_same_bits(out, expected)
        assert (plan.address_table(grads) is first) == (step < 2)


@pytest.mark.parametrize(("offsets", "numels", "total", "match"), [
    ((0, 8), (5, 4), 16, "numels"),
    ((0, 4), (5, 3), 16, "offsets"),
    ((0, 8), (5, 3), 24, "a buffer of 24 elements, the plan's has 16"),
])  # fmt: skip
def test_plan_of_another_layout_is_refused(offsets, numels, total: int, match: str) -> None:
    plan = FlattenPlan((0, 8), (5, 3), 16, DEVICE)
    grads = [random(numel, torch.float32) for numel in numels]
    with pytest.raises(ValueError, match=match):
        flatten_cast_scale(grads, offsets, numels, torch.empty(total, device=DEVICE), 1.0, plan=plan)


def test_plan_of_another_device_is_refused() -> None:
    plan = FlattenPlan((0,), (5,), 16, "meta")
    with pytest.raises(ValueError, match="the plan is on meta"):
        flatten_cast_scale([None], (0,), (5,), torch.empty(16, device=DEVICE), 1.0, plan=plan)


# Errors


@pytest.mark.parametrize(("grads", "error", "match"), [
    ([torch.zeros(5, dtype=torch.int64), torch.zeros(3)], TypeError, "gradient 0 has dtype torch.int64"),
    ([torch.zeros(5), torch.zeros(3, dtype=torch.complex64)], TypeError, "gradient 1 has dtype torch.complex64"),
    ([torch.zeros(5, dtype=torch.bool), torch.zeros(3, dtype=torch.int8)], TypeError, "gradient 0 .*; gradient 1 "),
    ([torch.zeros(5).to_sparse(), None], TypeError, "gradient 0 has layout torch.sparse_coo"),
    ([torch.zeros(5), torch.zeros(3).half()], ValueError, "several dtypes, float32, float16"),
    ([torch.zeros(4), torch.zeros(4)], ValueError, "gradient 0 has 4 elements; expected 5; gradient 1 has 4 elem"),
    ([torch.zeros(5, device="meta"), None], ValueError, "gradient 0 is on meta"),
    ([torch.zeros(5)], ValueError, "1 grads for 2 pieces"),
])  # fmt: skip
def test_flatten_refuses_gradients(grads, error: type[Exception], match: str, use_triton: bool) -> None:
    grads = [g if g is None or g.is_meta else g.to(DEVICE) for g in grads]
    out = torch.full((16,), 7.0, device=DEVICE)
    with pytest.raises(error, match=match):
        flatten_cast_scale(grads, (0, 8), (5, 3), out, 1.0, use_triton=use_triton)
    assert (out == 7.0).all()


@pytest.mark.parametrize("stride", [(2, 1), (1, 3), (1,), (0, 1)])
def test_flatten_refuses_a_stride_that_is_not_dense(stride: tuple[int, ...], use_triton: bool) -> None:
    grad = torch.empty_strided((2, 4), (4, 1), device=DEVICE).zero_()
    with pytest.raises(ValueError, match="gradient 0 has shape"):
        flatten_cast_scale(
            [grad], (0,), (8,), torch.empty(8, device=DEVICE), 1.0, strides=[stride], use_triton=use_triton
        )


@pytest.mark.parametrize(("out", "error"), [
    (torch.empty(16, dtype=torch.int32), TypeError),
    (torch.empty(16, dtype=torch.complex64), TypeError),
    (torch.empty(32)[::2], ValueError),
    (torch.empty(4, 4), ValueError),
])  # fmt: skip
def test_flatten_refuses_out(out: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="out has"):
        flatten_cast_scale([torch.zeros(5)], (0,), (5,), out, 1.0)


@pytest.mark.parametrize(("offsets", "numels", "match"), [
    ((0, 4), (5, 3), "piece 0 at 0 of 5 runs into piece 1 at 4"),
    ((8, 6), (5, 3), "piece 1 at 6 of 3 runs into piece 0 at 8"),
    ((0, 14), (5, 3), "outside of a buffer of 16 elements: piece 1 at 14 of 3"),
    ((-1, 8), (5, 3), "outside"),
    ((0,), (5, 3), "1 offsets and 2 numels"),
])  # fmt: skip
def test_pieces_have_to_fit(offsets, numels, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        flatten_cast_scale([torch.zeros(5), torch.zeros(3)], offsets, numels, torch.empty(16), 1.0)
    with pytest.raises(ValueError, match=match):
        FlattenPlan(offsets, numels, 16, "cpu")


# cast_shard


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("src_dtype", DTYPES)
def test_cast_all_dtypes_and_odd_sizes(src_dtype: torch.dtype, out_dtype: torch.dtype, use_triton: bool) -> None:
    for numel in (*SIZES, 2 * BLOCK_NUMEL + 3):
        src = random(numel, src_dtype, numel)
        out = torch.full((numel,), NAN, dtype=out_dtype, device=DEVICE)
        cast_shard(misaligned(src) if numel % 2 else src, out, use_triton=use_triton)
        assert_same_bits(out, rounded(src, out_dtype, use_triton) if src_dtype != out_dtype else src)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("src_dtype", [torch.float32, torch.float64])
def test_cast_rounds_ties_to_even(src_dtype: torch.dtype, dtype: torch.dtype, use_triton: bool) -> None:
    ulp = 2.0 ** -MANTISSA_BITS[dtype]
    src = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.75 * ulp, 1 + 0.25 * ulp], dtype=src_dtype, device=DEVICE)
    nearest = torch.tensor([1, 1 + 2 * ulp, 1 + ulp, 1], dtype=dtype, device=DEVICE)
    for sign in (1, -1):
        out = torch.empty(4, dtype=dtype, device=DEVICE)
        cast_shard(src * sign, out, use_triton=use_triton)
        assert_same_bits(out, rounded(src * sign, dtype, use_triton))
        if not (use_triton and DEVICE.type == "cpu" and dtype == torch.bfloat16):
            assert_same_bits(out, nearest * sign)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp64_is_rounded_once(dtype: torch.dtype, use_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the nearest fp32 the first value is a tie, and goes down to 1."""
    monkeypatch.setattr(reference, "BLOCK_NUMEL", 3)
    ulp, less = 2.0 ** -MANTISSA_BITS[dtype], 2.0**-40
    exact = [1 + 0.5 * ulp + less, 1 + 1.5 * ulp - less, 1 + 0.5 * ulp, 1 + ulp - less, 1 - less, 1.0, 0.75 + less]
    src = torch.tensor(exact, dtype=torch.float64, device=DEVICE)
    for sign in (1, -1):
        out = torch.empty(len(exact), dtype=dtype, device=DEVICE)
        expected = rounded(src * sign, dtype, use_triton)
        cast_shard(src * sign, out, use_triton=use_triton)
        assert_same_bits(out, expected)
        flatten_cast_scale([src], (0,), (len(exact),), out, sign, use_triton=use_triton)
        assert_same_bits(out, expected)
        chunk_sum([src * sign], out, use_triton=use_triton)
        assert_same_bits(out, expected)
    by_way_of_fp32 = src[:1].float().to(dtype)
    assert by_way_of_fp32 == 1.0 and rounded(src[:1], dtype, False) == 1 + ulp


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_cast_keeps_what_is_not_finite_and_signed_zeros(use_triton: bool) -> None:
    for src_dtype in (torch.float32, torch.float64):
        for dtype in (torch.float16, torch.bfloat16):
            src = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.0e5, NAN], dtype=src_dtype, device=DEVICE)
            out = torch.empty(6, dtype=dtype, device=DEVICE)
            cast_shard(src, out, use_triton=use_triton)
            large = math.inf if dtype == torch.float16 else rounded(src[4:5], dtype, use_triton).item()
            assert out[:5].tolist() == [math.inf, -math.inf, 0.0, 0.0, large]
            assert torch.signbit(out[:4]).tolist() == [False, True, False, True]
            assert out[5].isnan()


def test_cast_refuses(use_triton: bool) -> None:
    with pytest.raises(ValueError, match="src has 3 elements"):
        cast_shard(torch.zeros(3, device=DEVICE), torch.zeros(4, device=DEVICE), use_triton=use_triton)
    with pytest.raises(ValueError, match="src has shape"):
        cast_shard(torch.zeros(8, device=DEVICE)[::2], torch.zeros(4, device=DEVICE), use_triton=use_triton)
    with pytest.raises(TypeError, match=r"src has dtype torch\.int32"):
        cast_shard(torch.zeros(4, device=DEVICE).int(), torch.zeros(4, device=DEVICE), use_triton=use_triton)


# chunk_sum


def spread(F: int, S: int, dtype: torch.dtype) -> torch.Tensor:
    """(F, S) of magnitudes from 2**-6 to 2**6, whose fp32 sums depend on their order."""
    exponent = torch.randint(-6, 7, (F, S), generator=torch.Generator().manual_seed(F * S)).to(DEVICE)
    return (random(F * S, torch.float64).view(F, S) * 2.0**exponent).to(dtype)


def summed(chunks: torch.Tensor, dtype: torch.dtype, use_triton: bool) -> torch.Tensor:
    total = chunks[0].to(compute_dtype(chunks.dtype))
    for chunk in chunks[1:]:
        total = total + chunk.to(total.dtype)
    return rounded(total, dtype, use_triton)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_all_dtypes_and_odd_sizes(dtype: torch.dtype, out_dtype: torch.dtype, use_triton: bool) -> None:
    for S in (*SIZES, BLOCK_NUMEL, 2 * BLOCK_NUMEL + 3):
        chunks = spread(3, S, dtype)
        expected = summed(chunks, out_dtype, use_triton)
        separate = [misaligned(chunks[0]), chunks[1].clone(), chunks[2].clone()]
        for form in (chunks, list(chunks), separate, torch.cat([chunks, chunks], 1)[:, :S]):
            out = torch.full((S,), NAN, dtype=out_dtype, device=DEVICE)
            chunk_sum(form, out, use_triton=use_triton)
            assert_same_bits(out, expected)


@pytest.mark.parametrize("F", [1, 2, 4, 5, 6, 9])
def test_sum_adds_in_order(F: int, use_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_NUMEL", 100)
    chunks = spread(F, 1025, torch.float32)
    expected = summed(chunks, torch.float32, use_triton)
    for form in (chunks, list(chunks)):
        out = torch.full((1025,), NAN, device=DEVICE)
        chunk_sum(form, out, use_triton=use_triton)
        assert_same_bits(out, expected)
    if F > 2:
        assert not torch.equal(out, summed(chunks.flip(0), torch.float32, use_triton))
        assert not torch.equal(out, chunks.double().sum(0).float())


def test_sum_accumulates_16_bit_chunks_in_fp32(use_triton: bool) -> None:
    chunks = torch.tensor([[1.0], [2.0**-10], [2.0**-10]], device=DEVICE).bfloat16()
    out = torch.empty(1, device=DEVICE)
    chunk_sum(chunks, out, use_triton=use_triton)
    assert out.item() == 1 + 2.0**-9


def test_sum_of_negative_zeros_is_one(use_triton: bool) -> None:
    for F in (1, 3):
        chunks = torch.full((F, BLOCK_NUMEL + 5), -0.0, device=DEVICE)
        for form in (chunks, list(chunks)):
            out = torch.full_like(chunks[0], NAN)
            chunk_sum(form, out, use_triton=use_triton)
            assert_same_bits(out, chunks[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_sum_into_one_of_the_chunks(own: int, dtype: torch.dtype, use_triton: bool) -> None:
    chunks = spread(3, BLOCK_NUMEL + 5, dtype)
    expected = summed(chunks, dtype, use_triton)
    separate = [chunk.clone() for chunk in chunks]
    chunk_sum(separate, separate[own], use_triton=use_triton)
    assert_same_bits(separate[own], expected)
    chunk_sum(chunks, chunks[own], use_triton=use_triton)
    assert_same_bits(chunks[own], expected)


@pytest.mark.parametrize(("chunks", "error", "match"), [
    ([], ValueError, "no chunks"),
    (torch.zeros(0, 4), ValueError, "no chunks"),
    ([torch.zeros(4), torch.zeros(5)], ValueError, "chunk 1 has 5 elements"),
    ([torch.zeros(4), torch.zeros(4).half()], ValueError, "several dtypes, torch.float32, torch.float16"),
    ([torch.zeros(4), torch.zeros(4).long()], TypeError, "chunk 1 has dtype torch.int64"),
    (torch.zeros(4, 3).t(), ValueError, "chunk 0 has shape"),
])  # fmt: skip
def test_sum_refuses(chunks, error: type[Exception], match: str, use_triton: bool) -> None:
    chunks = chunks.to(DEVICE) if isinstance(chunks, torch.Tensor) else [chunk.to(DEVICE) for chunk in chunks]
    with pytest.raises(error, match=match):
        chunk_sum(chunks, torch.zeros(4, device=DEVICE), use_triton=use_triton)


# Who computes


def run_python(*args: str, **env: str) -> str:
    """A fresh interpreter with this one's path, without TRITON_INTERPRET unless given."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env = {**inherited, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), **env}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TRITON = """
import sys
import warnings
sys.modules["triton"] = None
import torch
from fxshard.runtime.kernels import cast_shard, chunk_sum, flatten_cast_scale
warnings.simplefilter("error")
for choice in (None, False):
    out, half = torch.empty(8), torch.empty(8).half()
    flatten_cast_scale([torch.ones(2, 3)], (0,), (6,), out, 0.5, use_triton=choice)
    cast_shard(out, half, use_triton=choice)
    chunk_sum([half, half], out, use_triton=choice)
    assert out.tolist() == [1.0] * 6 + [0.0, 0.0]
try:
    cast_shard(out, half, use_triton=True)
except ValueError as error:
    print(error)
"""


def test_triton_is_optional_on_cpu() -> None:
    assert "triton is not installed" in run_python("-c", WITHOUT_TRITON)


@needs_triton
@pytest.mark.parametrize("interpreted", [False, True])
def test_compiled_and_interpreted_kernels_keep_to_their_devices(
    interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxshard.runtime.kernels.triton_kernels.INTERPRETED", interpreted)
    device = "meta" if interpreted else "cpu"
    with pytest.raises(ValueError, match=rf"use_triton=True for tensors on {device}, .*TRITON_INTERPRET"):
        cast_shard(torch.zeros(4, device=device), torch.zeros(4, device=device), use_triton=True)


def test_nothing_is_launched_for_nothing(use_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = (flatten_cast_scale, cast_shard, chunk_sum)
    for operation in operations:
        module = "triton_kernels" if use_triton else "reference"
        monkeypatch.setattr(f"fxshard.runtime.kernels.{module}.{operation.__name__}", None)
    empty = torch.zeros(0, device=DEVICE)
    flatten_cast_scale([empty], (0,), (0,), empty, 1.0, use_triton=use_triton)
    cast_shard(empty, empty.half(), use_triton=use_triton)
    chunk_sum([empty, empty], empty, use_triton=use_triton)


@needs_triton
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU faults by itself")
def test_alignment_promised_to_the_compiler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter ignores promises; here it checks them."""
    from triton.runtime.interpreter import TensorHandle

    kept: list[int] = []

    def check(self: TensorHandle, name: str, values: list[int]) -> None:
        assert name == "tt.divisibility" and (self.data % values[0] == 0).all()
        kept.extend(v for v in values if v > 1)

    monkeypatch.setattr(TensorHandle, "set_attr", check)
    values = random(BLOCK_NUMEL, torch.float16)
    for tensor in (misaligned(values), values):
        assert not kept
        for offset in (0, 3):
            out = torch.empty(BLOCK_NUMEL + offset, device=DEVICE).half()
            flatten_cast_scale([tensor], (offset,), (BLOCK_NUMEL,), out, 1.0, use_triton=True)
        chunk_sum([values, tensor], out[:BLOCK_NUMEL], use_triton=True)
    assert len(kept) == 3  # flatten of a whole aligned block, and each of two chunks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "cast_shard", None)
    out = torch.empty(4, device=DEVICE).half()
    cast_shard(torch.ones(4, device=DEVICE), out)
    assert out.tolist() == [1.0] * 4


@pytest.mark.full
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 17
    if torch.cuda.mem_get_info()[0] < 9 * numel:
        pytest.skip("needs about 19 GB of GPU memory")
    src = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    src[-40:] = 3.0
    out = torch.full((numel,), NAN, dtype=torch.float16, device=DEVICE)
    for operation in ("cast", "flatten", "sum"):
        out.fill_(NAN)
        if operation == "cast":
            cast_shard(src, out)
        elif operation == "flatten":
            flatten_cast_scale([src], (0,), (numel,), out, 1.0)
        else:
            chunk_sum([src], out)
        assert out.sum(dtype=torch.float64).item() == 120.0, operation
        assert out[-40:].eq(3.0).all(), operation


# What the compiler makes of the kernels


def compile_for_sm90() -> dict[str, dict[str, object]]:
    """Compile every kernel for aligned and for misaligned arguments, and report what can be seen without a GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fxshard.runtime.kernels import triton_kernels

    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp64": tl.float64}
    table = {"addresses": "*i64", "segment_table": "*i64", "block_table": "*i32"}
    cases = {}
    for source, out in (("bf16", "fp32"), ("fp32", "bf16"), ("fp64", "fp64")):
        compute = tl.float64 if "fp64" in (source, out) else tl.float32
        sum_types = {"num_chunks": "i32", "out": f"*{out}", "numel": "i64"}
        for aligned in (True, False):
            for kernel, signature, constants in (
                (
                    triton_kernels.flatten_cast_scale_kernel,
                    {**table, "out": f"*{out}", "scale": "fp64"},
                    {"SOURCE": types[source], "COMPUTE": compute},
                ),
                (triton_kernels.cast_shard_kernel, {"src": f"*{source}", "out": f"*{out}", "numel": "i64"}, {}),
                (
                    triton_kernels.chunk_sum_rows_kernel,
                    {"chunks": f"*{source}", "row_stride": "i64", **sum_types},
                    {"ACCUMULATE": compute},
                ),
                (
                    triton_kernels.chunk_sum_table_kernel,
                    {"addresses": "*i64", **sum_types},
                    {"CHUNK": types[source], "ACCUMULATE": compute, "ALIGNED": aligned},
                ),
            ):
                cases[kernel.__name__, source, out, aligned] = (kernel, signature, constants)

    report: dict[str, dict[str, object]] = {}
    for (name, source, out, aligned), (kernel, signature, constants) in cases.items():
        constants = {**constants, "BLOCK": BLOCK_NUMEL}
        signature = {arg: signature.get(arg, "constexpr") for arg in kernel.arg_names}
        divisible = [i for i, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*" or arg == "row_stride"]
        attributes = {(i,): [["tt.divisibility", 16]] for i in divisible} if aligned else {}
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options=triton_kernels._OPTIONS,
        )
        ptx = compiled.asm["ptx"]
        report[f"{name} {source} {out} {'aligned' if aligned else 'misaligned'}"] = {
            "wide_loads": len(re.findall(r"ld\.global\.(?:v4\.b32|v2\.b64)", ptx)),
            "wide_stores": len(re.findall(r"st\.global\.(?:v4\.b32|v2\.b64)", ptx)),
            "flushes_denormals": ".ftz" in ptx,
            "fuses_multiply_add": "fma." in ptx,
            "bf16_roundings": sorted(set(re.findall(r"cvt\.r.\.(?:relu\.)?(?:satfinite\.)?bf16", ptx))),
            "product_types": sorted(set(re.findall(r"arith\.muli [^:]*: (\S+)", compiled.asm["ttgir"]))),
            "resources": resource_usage(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path),
        }
    scale = triton_kernels.flatten_cast_scale_kernel.params[4]
    report["scale"] = {"name": scale.name, "type": scale.annotation_type}
    return report


def resource_usage(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """REG, STACK, LOCAL and so on of the one kernel in `cubin`."""
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([cuobjdump, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    pytest.importorskip("triton")
    cache = tmp_path_factory.mktemp("triton")
    return json.loads(run_python(__file__, TRITON_CACHE_DIR=str(cache)))


ITEMSIZE = {"bf16": 2, "fp32": 4, "fp64": 8}
KERNELS = ("flatten_cast_scale_kernel", "cast_shard_kernel", "chunk_sum_rows_kernel", "chunk_sum_table_kernel")
COMPILED = [f"{kernel} {types}" for kernel in KERNELS for types in ("bf16 fp32", "fp32 bf16", "fp64 fp64")]


@pytest.mark.parametrize("kernel", COMPILED)
def test_aligned_blocks_are_read_and_written_16_bytes_at_a_time(kernel: str, compiled: dict[str, dict]) -> None:
    """A thread has 16 elements of a block: as many wide accesses as an element has bytes, once for each chunk."""
    _, source, out = kernel.split()
    report = compiled[f"{kernel} aligned"]
    assert report["wide_loads"] >= ITEMSIZE[source]
    assert report["wide_stores"] == ITEMSIZE[out]


@pytest.mark.parametrize("kernel", COMPILED)
def test_misaligned_arguments_get_no_wide_access(kernel: str, compiled: dict[str, dict]) -> None:
    """Addresses from a table are looked at at run time, so flatten still reads both ways."""
    report = compiled[f"{kernel} misaligned"]
    assert report["wide_loads"] == 0 or kernel.startswith("flatten")
    assert report["wide_stores"] == 0


@pytest.mark.parametrize("alignment", ["aligned", "misaligned"])
@pytest.mark.parametrize("kernel", COMPILED)
def test_nothing_spills(kernel: str, alignment: str, compiled: dict[str, dict]) -> None:
    """80 registers let three programs of 256 threads share an SM. Sums of fp64 are left out: nothing waits for them."""
    resources = compiled[f"{kernel} {alignment}"]["resources"]
    if not kernel.startswith("chunk_sum") or "fp64" not in kernel:
        assert resources["STACK"] == resources["LOCAL"] == 0
        assert resources["REG"] <= 80


@pytest.mark.parametrize("alignment", ["aligned", "misaligned"])
@pytest.mark.parametrize("kernel", COMPILED)
def test_arithmetic_is_the_reference_s(kernel: str, alignment: str, compiled: dict[str, dict]) -> None:
    """Rounding to nearest even, denormals kept, nothing fused; and where a block begins is worked out in int64."""
    report = compiled[f"{kernel} {alignment}"]
    assert report["bf16_roundings"] == (["cvt.rn.bf16"] if kernel.endswith(" bf16") else [])
    assert not report["flushes_denormals"]
    assert not report["fuses_multiply_add"]
    assert report["product_types"] == ["i64"]


def test_the_scale_is_passed_in_fp64(compiled: dict[str, dict]) -> None:
    assert compiled["scale"] == {"name": "scale", "type": "fp64"}


if __name__ == "__main__":
    print(json.dumps(compile_for_sm90()))
