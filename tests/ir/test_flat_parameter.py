"""FlatParameter: whatever the shapes, dtypes and F, pieces tile each parameter and everything is aligned."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.ir import FlatParameter, ParameterSpec
from fxshard.ir.layout import boxes, contiguous_stride, is_dense
from tests.capture.compare import identical

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8]), min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
FLOATS = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
FACTORS = st.integers(1, 8)


@st.composite
def strides(draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A dense stride: the dims in any order."""
    order = draw(st.permutations(range(len(shape))))
    result, step = [0] * len(shape), 1
    for dim in reversed(order):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


@st.composite
def flats(draw) -> FlatParameter:
    dtype = draw(DTYPES)
    param, reduce = (draw(FLOATS), draw(FLOATS)) if dtype.is_floating_point else (dtype, dtype)
    specs = []
    for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=5))):
        specs.append(ParameterSpec(f"p{i}", shape, draw(strides(shape)), dtype, dtype.is_floating_point))
    return FlatParameter.build("u", "u", False, tuple(specs), draw(FACTORS), param, reduce)


@given(flats())
def test_pieces_of_all_ranks_tile_each_parameter(flat):
    covered = [[0] * p.numel for p in flat.parameters]
    places: list[set[int]] = [set() for _ in range(flat.F)]
    for rank in range(flat.F):
        pieces = list(flat.pieces(rank))
        assert [p.index for p in pieces] == list(range(len(flat.parameters)))
        for piece in pieces:
            for i in range(piece.length):
                covered[piece.index][piece.start + i] += 1
                # the place in the full buffer, told by the shard and by the offset
                assert rank * flat.shard_numel + piece.shard_start + i == flat.offsets[piece.index] + piece.start + i
            places[rank].update(range(piece.shard_start, piece.shard_start + piece.length))
        assert len(places[rank]) == sum(p.length for p in pieces) and all(x < flat.shard_numel for x in places[rank])
    assert all(count == 1 for counts in covered for count in counts)


@given(flats())
def test_offsets_and_shards_are_aligned_in_every_dtype(flat):
    for dtype in (flat.dtype, flat.param_dtype, flat.reduce_dtype):
        assert all(offset * dtype.itemsize % 16 == 0 for offset in flat.offsets)
        assert flat.shard_numel * dtype.itemsize % 16 == 0
    assert flat.shard_numel * flat.F == flat.padded_numel
    ends = [offset + p.numel for offset, p in zip(flat.offsets, flat.parameters)]
    assert all(end <= start for end, start in zip(ends, flat.offsets[1:])) and ends[-1] <= flat.padded_numel
    # Padding stays below one alignment a parameter and one a rank.
    alignment = 16 // min(d.itemsize for d in (flat.dtype, flat.param_dtype, flat.reduce_dtype))
    assert flat.padded_numel - flat.numel < alignment * (len(flat.parameters) + flat.F)


@given(flats())
def test_sizes(flat):
    assert flat.numel == sum(math.prod(p.shape) for p in flat.parameters)
    assert flat.full_bytes == flat.padded_numel * flat.param_dtype.itemsize
    assert flat.grad_bytes == flat.padded_numel * flat.reduce_dtype.itemsize
    assert flat.fqns == tuple(p.fqn for p in flat.parameters)


def cut(flat, F):
    return FlatParameter.build(
        flat.name, flat.unit, flat.is_root, flat.parameters, F, flat.param_dtype, flat.reduce_dtype
    )


@given(flats(), FACTORS)
def test_another_factor_changes_only_the_padding(flat, F):
    other = cut(flat, F)
    assert (other.F, other.offsets, other.parameters, other.name) == (F, flat.offsets, flat.parameters, flat.name)
    assert cut(other, flat.F) == flat


@given(SHAPES, st.data())
def test_dense_strides(shape, data):
    stride = data.draw(strides(shape))
    assert is_dense(shape, stride)
    assert contiguous_stride(shape) == tuple(torch.empty(shape).stride())
    if math.prod(shape) > 1:
        assert not is_dense(shape, tuple(2 * s for s in stride))
        assert not is_dense(shape, (0,) * len(shape))


class Holder(nn.Module):
    def __init__(self, values: list[torch.Tensor]):
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(v, requires_grad=v.is_floating_point()) for v in values)


def _filled(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    value = torch.empty_strided(shape, stride, dtype=dtype)
    return value.copy_(torch.arange(value.numel()).view(shape) % 251)


@settings(deadline=None, max_examples=60)
@given(st.data(), FACTORS)
def test_full_to_pieces_to_full(data, F):
    """Through compile: mixed dtypes in one unit, any dense layout; values, shape and stride come back bit for bit."""
    values = []
    for shape in data.draw(st.lists(SHAPES, min_size=1, max_size=5)):
        values.append(_filled(shape, data.draw(strides(shape)), data.draw(DTYPES)))
    originals = [v.clone(memory_format=torch.preserve_format) for v in values]
    model = fxshard.compile(Holder(values), F=F, units="none")
    for original, p in zip(originals, model.values):
        assert isinstance(p, fxshard.ShardedParameter)
        whole = p.full_tensor()
        assert identical(whole, original) and whole.stride() == original.stride() == p.stride()
        assert identical(p.piece_of(original), p.local)
    # Pieces as the ranks of a real group hold them, put together again.
    for flat in model.__dict__["_fxshard"].flats.values():
        for index, spec in enumerate(flat.parameters):
            source = originals[int(spec.fqn.split(".")[1])]
            stored = source.as_strided((source.numel(),), (1,)) if source.numel() else source.reshape(-1)
            pieces = [list(flat.pieces(rank))[index] for rank in range(F)]
            joined = torch.cat([stored[p.start : p.start + p.length] for p in pieces])
            assert identical(joined.as_strided(spec.shape, spec.stride), source)


def test_channels_last_pieces_follow_storage_order():
    value = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    stored = value.permute(0, 2, 3, 1).reshape(-1)
    model = fxshard.compile(Holder([value]), F=2, units="none")
    p = model.values[0]
    assert p.stride() == value.stride() and p.is_contiguous(memory_format=torch.channels_last)
    assert identical(p.local, stored)


def test_a_parameter_that_is_not_dense_becomes_contiguous():
    value = torch.arange(12.0).view(3, 4)[:, ::2]
    model = fxshard.compile(Holder([value]), F=2, units="none")
    assert model.values[0].stride() == (2, 1) and identical(model.values[0].full_tensor(), value)


def test_the_example_of_the_documentation():
    spec = ParameterSpec("w", (5, 3), (3, 1), torch.float32, True)
    flat = FlatParameter.build("u", "u", False, (spec,), 4)
    assert (flat.padded_numel, flat.shard_numel) == (16, 4)
    pieces = [next(flat.pieces(rank)) for rank in range(4)]
    assert [(p.start, p.length) for p in pieces] == [(0, 4), (4, 4), (8, 4), (12, 3)]


@settings(deadline=None)
@given(st.data())
def test_a_range_is_cut_into_few_rectangles(data):
    """In storage order, each exactly its elements, whatever the order of dims."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    stride = data.draw(strides(shape))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    positions = torch.arange(numel).as_strided(shape, stride)
    found = boxes(shape, stride, start, end - start)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    at = start
    for box in found:
        inside = positions[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))]
        assert tuple(inside.shape) == box.sizes and box.start == at
        assert sorted(inside.flatten().tolist()) == list(range(at, at + box.numel))
        at += box.numel
    assert at == end


def test_rectangles_of_nothing():
    assert [(b.offsets, b.sizes) for b in boxes((0, 8), (8, 1), 0, 0)] == [((0, 0), (0, 8))]
    assert [(b.offsets, b.sizes) for b in boxes((), (), 0, 1)] == [((), ())]
    assert boxes((4, 3), (3, 1), 5, 0) == []
