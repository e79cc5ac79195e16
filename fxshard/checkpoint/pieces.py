"""Pieces of sharded parameters as torch.distributed.checkpoint takes tensors of one's own: as the rectangles they consist of.

Nothing is gathered and nothing copied: a rank writes what it holds, and reads straight into it. What is written is a tensor of
the whole shape in chunks, which any reader puts together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fxshard.ir.layout import Box, boxes, storage_order

if TYPE_CHECKING:
    from fxshard.parameter import ShardedParameter


def write_items(fqn: str, piece: ShardedParameter) -> list[WriteItem]:
    """What this rank writes of a parameter, gradient or moment. A planner leaves out what other replicas write too."""
    properties = TensorProperties.create_from_tensor(piece.local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=piece.shape),
        )
        for box in _boxes(piece)
    ]


def chunks(piece: ShardedParameter) -> list[ChunkStorageMetadata]:
    """What this rank wants read."""
    return [_chunk(box) for box in _boxes(piece)]


def shard_at(piece: ShardedParameter, index: MetadataIndex) -> Tensor:
    """The memory of one rectangle, of its shape."""
    (box,) = (box for box in _boxes(piece) if box.offsets == tuple(index.offset or ()))
    order = storage_order(tuple(piece.shape), tuple(piece.stride()))
    binding = piece.binding
    assert binding is not None
    start = box.start - (binding.start if box.numel else 0)
    flat = piece.local.detach()[start : start + box.numel]
    return flat.view([box.sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _boxes(piece: ShardedParameter) -> list[Box]:
    binding: Any = piece.binding
    return boxes(tuple(piece.shape), tuple(piece.stride()), binding.start, binding.length)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
