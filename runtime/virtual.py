"""A world inside one process: it holds the F shards itself, so a sharded step runs in a notebook or on one GPU.

With one contributor the divisor is 1 and the result is exactly the plain model's. With W contributors the process runs
W ranks' batches in turn; the reduces of the last one really sum what all W handed in, per shard group and across
replicas, in the order real processes do it, so divisor, groups and order are tested without a network.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.ir import FlatParameter
from fxshard.options import check_factor
from fxshard.runtime.kernels import chunk_sum
from fxshard.runtime.world import DONE, Issue, Pending, World


class VirtualWorld(World):
    """`VirtualWorld(F)`: F shards in one process, one batch a step. `VirtualWorld(F, contributors=W)`: W ranks' batches
    in turn.

    Use `with world.rank(r):` around the forward and backward of rank r; ranks go 0 to W-1, each once a step. Each rank
    keeps buffers of its own (BatchNorm statistics) as real processes do.
    """

    kind = "virtual"

    def __init__(self, F: int, contributors: int = 1, device: torch.device | str = "cpu"):
        self.W = F if contributors == 1 else contributors
        self.F = check_factor(F, self.W)
        self.data_ranks, self.held, self.shard_rank = contributors, F, 0
        self.device = torch.device(device)
        self.contributor = 0
        self._parts: dict[str, list[Tensor]] = {}
        self._scattered: dict[str, list[Tensor]] = {}
        """Each replica's reduced shard, from the reduce queue to the replicate queue: kept, since memory that one stream
        frees while another reads it would be given away."""
        self._flags: dict[tuple[str, ...], list[Sequence[bool]]] = {}
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._buffers: list[dict[str, Tensor]] = []
        self._acting: int | None = None
        """In `rank(r)`: whose buffers the module's own are."""

    def check_free(self, device: torch.device) -> None:
        """Raise ValueError if a model on `device` cannot be put here: another device, or a model is here already."""
        if (device.type, device.index or 0) != (self.device.type, self.device.index or 0):
            raise ValueError(f"the model is on {device} and this VirtualWorld on {self.device}; make it with device=")
        if self._module() is not None:
            raise ValueError("this VirtualWorld has a model already; make one for each")

    def attach(self, module: nn.Module) -> None:
        """Give each contributor its own copy of the module's buffers."""
        self._module = weakref.ref(module)
        if self.data_ranks > 1:
            named = dict(module.named_buffers())
            self._buffers = [{n: b.clone() for n, b in named.items()} for _ in range(self.data_ranks)]

    def to_state(self, whole: Tensor) -> Tensor:
        return whole.clone()

    def first_ranks(self, name: str, buffer: Tensor) -> Tensor:
        kept = self._buffers[0].get(name, buffer) if self._buffers and self._acting != 0 else buffer
        return kept.detach().clone()

    def buffers_changed(self, module: nn.Module) -> None:
        self.attach(module)

    @contextlib.contextmanager
    def rank(self, r: int) -> Iterator[None]:
        """Act as rank r. Raises ValueError outside 0..W-1."""
        if not 0 <= r < self.data_ranks:
            raise ValueError(f"rank {r} of a world of {self.data_ranks} contributors")
        self.contributor = r
        module = self._module()
        if self._buffers and module is not None:
            named = dict(module.named_buffers())
            with torch.no_grad():
                for name, buffer in named.items():
                    buffer.copy_(self._buffers[r][name])
            before, self._acting = self._acting, r
            try:
                yield
            finally:
                self._acting = before
                with torch.no_grad():
                    for name, buffer in named.items():
                        self._buffers[r][name].copy_(buffer)
        else:
            yield

    def completes(self) -> bool:
        return self.contributor == self.data_ranks - 1

    def abandon(self) -> None:
        self._parts.clear()
        self._flags.clear()

    def _contribute(self, flat: str, part: Tensor) -> list[Tensor] | None:
        """Collect one rank's part; all of them once the last has come."""
        parts = self._parts.setdefault(flat, [])
        if len(parts) != self.contributor:
            raise RuntimeError(
                f"rank {self.contributor} reduces '{flat}' after {len(parts)} other ranks did in this step; "
                "every contributor runs backward once a step, in rank order"
            )
        parts.append(part.clone())
        return self._parts.pop(flat) if self.completes() else None

    def bind_all_gather(self, flat: FlatParameter, shard: Tensor, full: Tensor) -> Issue:
        pairs = list(zip(full.split(flat.shard_numel), shard.split(flat.shard_numel))) if shard.numel() else []

        def issue(previous: Any) -> Pending:
            for target, source in pairs:
                target.copy_(source)
            return DONE

        return issue

    def bind_bucket(
        self, flats: Sequence[FlatParameter], shards: Sequence[Tensor], fulls: Sequence[Tensor], staging: Tensor | None
    ) -> Issue:
        issues = [self.bind_all_gather(*member) for member in zip(flats, shards, fulls, strict=True)]

        def issue(previous: Any) -> Pending:
            for each in issues:
                each(None)
            return DONE

        return issue

    def bind_reduce_scatter(self, flat: FlatParameter, buffer: Tensor, out: Tensor, staging: Tensor | None) -> Issue:
        def issue(previous: Any) -> Pending:
            if self.data_ranks == 1:
                chunk_sum([buffer], out)
                return DONE
            parts = self._contribute(flat.name, buffer)
            if parts is not None:
                if self.replicas == 1:
                    chunk_sum(parts, out)
                else:
                    if flat.name not in self._scattered:
                        self._scattered[flat.name] = [torch.empty_like(out) for _ in range(self.replicas)]
                    scattered = self._scattered[flat.name]
                    for group, result in enumerate(scattered):
                        chunk_sum(parts[group * self.F : (group + 1) * self.F], result)
            return DONE

        return issue

    def reduced_shards(self, flat: FlatParameter, value: Tensor) -> Sequence[Tensor]:
        return self._scattered[flat.name] if self.data_ranks > 1 and self.replicas > 1 else [value]

    def bind_all_reduce(
        self,
        flat: FlatParameter,
        value: Tensor,
        staging: Tensor | None,
        kept: Callable[[], Sequence[Tensor]] | None = None,
    ) -> Issue:
        def issue(previous: Any) -> Pending:
            if self.data_ranks == 1:
                return DONE
            if self.F == 1:
                parts = self._contribute(flat.name, value)
            else:
                parts = self._scattered[flat.name] if self.completes() else None
            if parts is not None and kept is not None:
                for part, more in zip(parts, kept(), strict=True):
                    part.add_(more)
            if parts is not None:
                chunk_sum(parts, value)
            return DONE

        return issue

    def presence(self, flats: tuple[str, ...], flags: Sequence[bool]) -> Callable[[], list[bool]]:
        told = self._flags.setdefault(flats, [])
        if self.contributor == 0:
            told.clear()
        told.append(flags)
        return lambda: [any(column) for column in zip(*told)]

    def reduce_small(self, values: Tensor, op: str) -> Tensor:
        return values

    def gather_flat(self, flat: FlatParameter, part: Tensor) -> Tensor:
        return part.to(self.device, copy=True)

    def gather_to_first(self, flat: FlatParameter, part: Tensor) -> Tensor | None:
        return part.to(self.device, copy=True)

    def scatter_from_first(self, flat: FlatParameter, full: Tensor | None) -> Tensor:
        assert full is not None
        return full

    def broadcast_from_first(self, tensor: Tensor) -> None:
        return None
