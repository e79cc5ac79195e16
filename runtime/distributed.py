"""Worlds over torch.distributed: gloo by direct exchange on CPUs, NCCL on CUDA."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxshard.capture import torch_private
from fxshard.ir import FlatParameter
from fxshard.options import check_factor
from fxshard.runtime.direct import DirectGroup, Helpers, raw
from fxshard.runtime.world import DONE, Issue, Pending, World

# torch 2.13 renamed both and warns about the old names; 2.11 has only those.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class DistributedWorld(World):
    """Ranks of the default process group; groups from a 2-D mesh (replicate, shard), or made here.

    Without a mesh rank r is shard rank r % F of replica r // F: F consecutive ranks share a copy, those of one host where
    F divides its ranks.
    """

    def __init__(self, F: int, device: torch.device, mesh: DeviceMesh | None = None):
        self.rank, self.W = dist.get_rank(), dist.get_world_size()
        self.data_ranks, self.held, self.device = self.W, 1, device
        self.is_first = self.rank == 0
        if mesh is not None:
            F = self._check_mesh(mesh)
        self.F = check_factor(F, self.W)
        if mesh is not None:
            grid = mesh.mesh.tolist()
        else:
            grid = [[replica * self.F + s for s in range(self.F)] for replica in range(self.W // self.F)]
        self.grid = grid
        timeout = torch_private.default_timeout(device)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        row, column = next((i, r.index(self.rank)) for i, r in enumerate(grid) if self.rank in r)
        self.replica_rank, self.shard_rank = row, column
        self.shard_ranks = grid[row]
        self.replica_ranks = [r[column] for r in grid]
        if mesh is not None:
            self.shard_group, self.replica_group = mesh.get_group(1), mesh.get_group(0)
        else:
            self.shard_group = _own_group(grid, self.rank, timeout)
            self.replica_group = _own_group([list(c) for c in zip(*grid)], self.rank, timeout)

    def _check_mesh(self, mesh: DeviceMesh) -> int:
        if mesh.ndim != 2 or mesh.size() != self.W:
            raise ValueError(
                f"mesh has shape {tuple(mesh.mesh.shape)}; "
                f"a 2-D mesh (replicate, shard) over all {self.W} ranks was expected"
            )
        rows = mesh.mesh.tolist()
        if any(list(line) != sorted(line) for line in [*rows, *zip(*rows)]):
            raise ValueError(f"mesh {rows}: ranks must ascend along both axes, as process groups order them so")
        return mesh.size(1)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        groups = [self.replica_group, self.shard_group] if self.replicas > 1 else self.shard_group
        names = ("replicate", "shard") if self.replicas > 1 else ("shard",)
        ranks = self.grid if self.replicas > 1 else self.grid[0]
        return DeviceMesh.from_group(groups, self.device.type, mesh=torch.tensor(ranks), mesh_dim_names=names)

    def to_state(self, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        local: Tensor = whole
        if whole.dim():
            step = -(-whole.shape[0] // self.F)
            begin = min(step * self.shard_rank, whole.shape[0])
            local = whole[begin : begin + step]
        cut = Shard(0) if whole.dim() else Replicate()
        placements = [Replicate(), cut] if self.replicas > 1 else [cut]
        local = local.clone(memory_format=torch.contiguous_format)
        stride = torch.empty(whole.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=whole.shape, stride=stride)

    def first_ranks(self, name: str, buffer: Tensor) -> Tensor:
        copied = buffer.detach().clone()
        self.broadcast_from_first(copied)
        return copied

    def reduce_small(self, values: Tensor, op: str) -> Tensor:
        if self.F == 1:
            return values
        result = values.detach().to(self.device, copy=True)
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        dist.all_reduce(result, operation, group=self.shard_group)
        return result.to(values.device)

    def gather_flat(self, flat: FlatParameter, part: Tensor) -> Tensor:
        part = part.to(self.device)
        full = torch.empty(part.numel() * self.F, dtype=part.dtype, device=self.device)
        if self.F == 1:
            full.copy_(part)
        elif part.numel():
            _all_gather(full.view(torch.uint8), part.contiguous().view(torch.uint8), group=self.shard_group)
        return full

    def gather_to_first(self, flat: FlatParameter, part: Tensor) -> Tensor | None:
        part = part.to(self.device)
        # One message after another: a thread of gloo's holds what `dist.gather` receives into for a while longer.
        if not self.is_first:
            if 0 in self.shard_ranks and part.numel():
                dist.send(part.view(torch.uint8), 0, group=self.shard_group)
            return None
        full = torch.empty(flat.padded_numel, dtype=part.dtype, device=self.device)
        if part.numel():
            for rank, chunk in zip(self.shard_ranks, full.split(part.numel())):
                if rank == 0:
                    chunk.copy_(part)
                else:
                    dist.recv(chunk.view(torch.uint8), rank, group=self.shard_group)
        return full

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.W
        dist.all_gather_object(found, value, group=self.control)
        return found

    def scatter_from_first(self, flat: FlatParameter, full: Tensor | None) -> Tensor:
        part = torch.empty(flat.shard_numel, dtype=flat.dtype, device=self.device)
        chunks = None
        if self.is_first and flat.shard_numel:
            assert full is not None
            pieces = [c.view(torch.uint8) for c in full.split(flat.shard_numel)]
            column = {r: c for row in self.grid for c, r in enumerate(row)}
            chunks = [pieces[column[r]] for r in range(self.W)]
        if flat.shard_numel:
            self._scatter(part.view(torch.uint8), chunks)
        return part

    def _scatter(self, part: Tensor, chunks: list[Tensor] | None) -> None:
        dist.scatter(part, chunks, src=0)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        if tensor.numel():
            whole = tensor.contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            if whole is not tensor:
                tensor.copy_(whole)

    def presence(self, flats: tuple[str, ...], flags: Sequence[bool]) -> Callable[[], list[bool]]:
        vector = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def answer() -> list[bool]:
            work.wait()
            return [bool(v) for v in vector.tolist()]

        return answer


def _own_group(groups: list[list[int]], rank: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make every group (all ranks must take part in each) and return the one `rank` is in."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            mine = group
    assert mine is not None
    return mine


class GlooWorld(DistributedWorld):
    """CPU ranks over gloo."""

    kind = "gloo"

    def __init__(self, F: int, mesh: DeviceMesh | None = None):
        super().__init__(F, torch.device("cpu"), mesh)
        self.shard_exchange = DirectGroup(self.shard_ranks, self.shard_group, self.shard_rank)
        self.replica_exchange = DirectGroup(self.replica_ranks, self.replica_group, self.replica_rank)
        self.helpers = Helpers()

    def _scatter(self, part: Tensor, chunks: list[Tensor] | None) -> None:
        # As in `gather_to_first`: a thread of gloo's would hold what is scattered until the next unit is made.
        if chunks is None:
            dist.recv(part, 0, group=self.control)
            return
        sent = [dist.isend(chunk, rank, group=self.control) for rank, chunk in enumerate(chunks) if rank]
        part.copy_(chunks[0])
        for work in sent:
            assert work is not None, "this rank is of the group"
            work.wait()

    def bind_all_gather(self, flat: FlatParameter, shard: Tensor, full: Tensor) -> Issue:
        issue = self.shard_exchange.bind_all_gather(shard, full)
        return lambda previous: issue()

    def bind_bucket(
        self, flats: Sequence[FlatParameter], shards: Sequence[Tensor], fulls: Sequence[Tensor], staging: Tensor | None
    ) -> Issue:
        assert staging is not None
        issue = self.shard_exchange.bind_bucket(shards, fulls, staging)
        return lambda previous: issue()

    def bind_reduce_scatter(self, flat: FlatParameter, buffer: Tensor, out: Tensor, staging: Tensor | None) -> Issue:
        assert staging is not None
        issue = self.shard_exchange.bind_reduce_scatter(buffer, out, staging)
        return lambda previous: issue()

    def bind_all_reduce(
        self,
        flat: FlatParameter,
        value: Tensor,
        staging: Tensor | None,
        kept: Callable[[], Sequence[Tensor]] | None = None,
    ) -> Issue:
        assert staging is not None
        add = None if kept is None else lambda: value.add_(kept()[0])
        return self.replica_exchange.bind_all_reduce(value, staging, self.helpers, add)


class NcclWorld(DistributedWorld):
    """CUDA ranks over NCCL. The wire dtype is the sum's dtype too: NCCL adds in what it sends."""

    kind = "nccl"

    def bind_all_gather(self, flat: FlatParameter, shard: Tensor, full: Tensor) -> Issue:
        def issue(previous: Any) -> Pending:
            _all_gather(full, shard, group=self.shard_group)
            return DONE

        return issue

    def bind_bucket(
        self, flats: Sequence[FlatParameter], shards: Sequence[Tensor], fulls: Sequence[Tensor], staging: Tensor | None
    ) -> Issue:
        pairs = [(raw(full), raw(shard)) for full, shard in zip(fulls, shards, strict=True) if shard.numel()]

        def issue(previous: Any) -> Pending:
            with torch_private.coalesced(self.shard_group):
                for full, shard in pairs:
                    _all_gather(full, shard, group=self.shard_group)
            return DONE

        return issue

    def bind_reduce_scatter(self, flat: FlatParameter, buffer: Tensor, out: Tensor, staging: Tensor | None) -> Issue:
        # Where the sum is not in the dtype of `out` it goes to this rank's chunk of the buffer first, as NCCL allows.
        same = out.dtype == buffer.dtype
        target = out if same else self.my_part(flat, buffer)

        def issue(previous: Any) -> Pending:
            _reduce_scatter(target, buffer, group=self.shard_group)
            if not same:
                out.copy_(target)
            return DONE

        return issue

    def bind_all_reduce(
        self,
        flat: FlatParameter,
        value: Tensor,
        staging: Tensor | None,
        kept: Callable[[], Sequence[Tensor]] | None = None,
    ) -> Issue:
        def issue(previous: Any) -> Pending:
            if kept is not None:
                value.add_(kept()[0])
            dist.all_reduce(value, group=self.replica_group)
            return DONE

        return issue
