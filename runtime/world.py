"""Who talks to whom: ranks, the shard group, the replicate group, and the collectives between them.

Three kinds of world run the same schedule: `GlooWorld` and `NcclWorld` over torch.distributed, and `VirtualWorld`, in
which one process holds the F shards itself. A described world (no devices) has no runtime; it is only W and F.

Shapes: `held` is how many shards a process holds, 1 of F, or all F in a virtual world; S elements a shard. Collectives
are bound once to their buffers and then issued each step without arguments.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.errors import AgreementError
from fxshard.ir import FlatParameter
from fxshard.ir.layout import Piece


class Pending:
    """A collective under way. `wait` returns when its result may be read by the compute queue."""

    def wait(self) -> None:
        return None


DONE = Pending()

Issue = Callable[[Any], Pending]
"""Start a bound collective; the argument is the pending result it is chained to, or None."""


class World(ABC):
    """W ranks; each shard group of F holds one copy of the parameters; `data_ranks` bring a batch (the divisor).

    Parts that are given to be gathered may be in host memory; what is gathered is on `device`."""

    W: int
    F: int
    shard_rank: int
    replica_rank: int = 0
    data_ranks: int
    held: int
    contributor: int = 0
    """Whose batch is running, where one process runs those of several ranks."""
    device: torch.device
    kind: str
    control: Any = None
    """A gloo process group of all ranks, for what is not of a schedule; None in one process."""
    is_first: bool = True
    """Whether this process is rank 0, whose values all start from."""

    @abstractmethod
    def to_state(self, whole: Tensor) -> Tensor:
        """A copy for a state dict of a tensor that this rank has whole: over a process group a DTensor of its rows of dim 0
        in the shard group (of all of it, on every rank, if it has no dims); plain without one."""

    def first_ranks(self, name: str, buffer: Tensor) -> Tensor:
        """A copy of rank 0's values of a buffer. A collective."""
        return buffer.detach().clone()

    def buffers_changed(self, module: nn.Module) -> None:
        """Told when a state dict was loaded."""
        return None

    @property
    def replicas(self) -> int:
        return self.W // self.F

    def pieces(self, flat: FlatParameter) -> list[Piece]:
        """What this process holds of each parameter."""
        if self.held == flat.F:
            return [Piece(i, 0, offset, p.numel) for i, (p, offset) in enumerate(zip(flat.parameters, flat.offsets))]
        return list(flat.pieces(self.shard_rank))

    def held_numel(self, flat: FlatParameter) -> int:
        return self.held * flat.shard_numel

    def my_part(self, flat: FlatParameter, full: Tensor) -> Tensor:
        """This process's part (held * S,) of a full flat buffer."""
        if self.held == flat.F:
            return full
        start = self.shard_rank * flat.shard_numel
        return full[start : start + flat.shard_numel]

    def reduced_shards(self, flat: FlatParameter, value: Tensor) -> Sequence[Tensor]:
        """What the ReduceScatter into `value` has summed, a tensor for each replica that this process stands for."""
        return [value]

    def completes(self) -> bool:
        """Whether the backward under way ends with reduced gradients."""
        return True

    def abandon(self) -> None:
        """Told when a phase was interrupted: a step that goes through several ranks' batches starts again with the first."""
        return None

    @abstractmethod
    def bind_all_gather(self, flat: FlatParameter, shard: Tensor, full: Tensor) -> Issue:
        """shard (held * S,) of every rank of the shard group -> full (padded,)."""

    @abstractmethod
    def bind_bucket(
        self, flats: Sequence[FlatParameter], shards: Sequence[Tensor], fulls: Sequence[Tensor], staging: Tensor | None
    ) -> Issue:
        """What `bind_all_gather` does, for several FlatParameters in one collective; each keeps its dtype.

        staging: bytes (the sum of the fulls',), over direct exchange."""

    @abstractmethod
    def bind_reduce_scatter(self, flat: FlatParameter, buffer: Tensor, out: Tensor, staging: Tensor | None) -> Issue:
        """buffer (padded,) -> out (held * S,): the sum over the shard group; what is in `buffer` may be lost.

        In rank order and fp32 or wider, except over NCCL, which adds in the dtype and order of its own choice."""

    @abstractmethod
    def bind_all_reduce(
        self,
        flat: FlatParameter,
        value: Tensor,
        staging: Tensor | None,
        kept: Callable[[], Sequence[Tensor]] | None = None,
    ) -> Issue:
        """value -> the sum over the replicate group, in place. `kept` gives what is to be added to value first: one tensor
        of its size, or one for each replica that this process stands for."""

    @abstractmethod
    def presence(self, flats: tuple[str, ...], flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start finding out which flags, of the parameters of these flats, are set on any rank; call the result for the
        answer."""

    @abstractmethod
    def reduce_small(self, values: Tensor, op: str) -> Tensor:
        """Reduce a small tensor over the shard group, op "sum" or "max"; the result is where `values` are."""

    @abstractmethod
    def gather_flat(self, flat: FlatParameter, part: Tensor) -> Tensor:
        """part (held * S,) -> (padded,): a blocking AllGather outside any schedule."""

    @abstractmethod
    def gather_to_first(self, flat: FlatParameter, part: Tensor) -> Tensor | None:
        """part (held * S,) of rank 0's shard group -> (padded,) on rank 0, None elsewhere. Every rank may call it, other shard
        groups bring nothing."""

    def gather_objects(self, value: Any) -> list[Any]:
        """The small picklable value of every rank, by rank. A collective of all of them."""
        return [value]

    @abstractmethod
    def scatter_from_first(self, flat: FlatParameter, full: Tensor | None) -> Tensor:
        """Rank 0's full (padded,), which the others need not have -> this process's part (held * S,)."""

    @abstractmethod
    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Rank 0's tensor to all ranks, in place."""


@contextlib.contextmanager
def together(world: World, what: str) -> Iterator[None]:
    """All ranks leave the block, or all raise: those on which it went well raise RuntimeError with what others raised."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    told = world.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise RuntimeError(f"{what} failed on {len(failed)} of {len(told)} ranks\n" + "\n".join(failed))


def agree(world: World, what: str, **arguments: Any) -> None:
    """Raise AgreementError on all ranks unless each gave the same small picklable arguments. A collective of all of them."""
    told = world.gather_objects(arguments)
    if any(given != told[0] for given in told):
        lines = [", ".join(f"{name}={value!r}" for name, value in given.items()) for given in told]
        listed = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(lines))
        raise AgreementError(f"{what}: ranks were called with different arguments, and nothing was done\n{listed}")
