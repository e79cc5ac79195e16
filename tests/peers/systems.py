"""fxshard, FSDP2, FSDP1 and DDP under one interface: each wraps a model in the way its own documents say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fxshard

CPU = torch.device("cpu")


class System:
    """One way to train in parallel. `wrap` shards a model; the rest is what they spell differently."""

    name = ""
    unused = False
    """Whether some outputs are not used, which DDP has to be told."""

    def wrap(self, model: nn.Module, F: int | None = None) -> nn.Module:
        raise NotImplementedError

    def deferred(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Built without memory, sharded, and then made real."""
        with torch.device("meta"):
            model = build()
        return self.wrap(model)

    def offloaded(self, model: nn.Module) -> nn.Module:
        """Sharded, with its shards in host memory."""
        raise NotImplementedError("it does not shard")

    def summed(self, model: nn.Module) -> nn.Module:
        """Sharded, with gradients that are the sum over ranks."""
        raise NotImplementedError

    def with_method(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        """Sharded, and a method of it beside forward."""
        model = self.wrap(model)
        return model, getattr(model, name)

    def whole(self, model: Any) -> AbstractContextManager[None]:
        """Inside, parameters are whole."""
        raise NotImplementedError

    def for_matrices(self, kind: Any) -> Any:
        """A class of optimizers that need whole matrices, for sharded parameters."""
        return kind

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return model.no_sync()

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Whole reduced gradients by plain name. A collective."""
        return {self.plain(n): None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        """Whole parameters by plain name. A collective."""
        return {self.plain(n): full(p) for n, p in model.named_parameters()}

    @staticmethod
    def plain(name: str) -> str:
        return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


class Fxshard(System):
    name = "fxshard"

    def wrap(self, model: nn.Module, F: int | None = None) -> nn.Module:
        return fxshard.compile(model, F, units=[nn.Linear])

    def deferred(self, build: Callable[[], nn.Module]) -> nn.Module:
        return self.wrap(fxshard.deferred_init(build))

    def offloaded(self, model: nn.Module) -> nn.Module:
        return fxshard.compile(model, units=[nn.Linear], cpu_offload=True)

    def summed(self, model: nn.Module) -> nn.Module:
        return fxshard.compile(model, units=[nn.Linear], gradient_divisor=1)

    def with_method(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        model = fxshard.compile(model, units=[nn.Linear], entry_points=[name])
        return model, getattr(model, name)

    def whole(self, model: Any) -> AbstractContextManager[None]:
        return model.unsharded()

    def for_matrices(self, kind: Any) -> Any:
        return fxshard.gathered(kind)


class FSDP2(System):
    name = "FSDP2"

    def wrap(self, model: nn.Module, F: int | None = None, **options: Any) -> nn.Module:
        W = dist.get_world_size()
        mesh = init_device_mesh("cpu", (W,))
        if F not in (None, W):
            mesh = init_device_mesh("cpu", (W // F, F), mesh_dim_names=("replicate", "shard"))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    @staticmethod
    def units(model: nn.Module) -> list[FSDPModule]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    def deferred(self, build: Callable[[], nn.Module]) -> nn.Module:
        model = super().deferred(build).to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        return model

    def offloaded(self, model: nn.Module) -> nn.Module:
        return self.wrap(model, offload_policy=CPUOffloadPolicy(pin_memory=False))

    def summed(self, model: nn.Module) -> nn.Module:
        model = self.wrap(model)
        for unit in self.units(model):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies
        return model

    def with_method(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        model = self.wrap(model)
        register_fsdp_forward_method(model, name)
        return model, getattr(model, name)

    @contextlib.contextmanager
    def whole(self, model: Any) -> Iterator[None]:
        for unit in self.units(model):
            unit.unshard()
        yield
        for unit in self.units(model):
            unit.reshard()

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


class FSDP1(System):
    name = "FSDP1"

    def wrap(self, model: nn.Module, F: int | None = None) -> nn.Module:
        W = dist.get_world_size()
        more: dict[str, Any] = {}
        if F not in (None, W):
            more = {
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
                "device_mesh": init_device_mesh("cpu", (W // F, F), mesh_dim_names=("replicate", "shard")),
            }
        return self.sharded(model, **more)

    @staticmethod
    def sharded(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=CPU, **options)

    def offloaded(self, model: nn.Module) -> nn.Module:
        return self.sharded(model, cpu_offload=CPUOffload(offload_params=True))

    def summed(self, model: nn.Module) -> nn.Module:
        sharded = self.sharded(model)
        sharded.register_comm_hook(None, lambda _, whole, piece: dist.reduce_scatter_tensor(piece, whole))
        return sharded

    def whole(self, model: Any) -> AbstractContextManager[None]:
        return FullyShardedDataParallel.summon_full_params(model)

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            named = list(model.named_parameters())  # of a frozen one it makes zeros, only in here
            return {self.plain(n): p.grad.clone() if p.grad is not None and p.requires_grad else None for n, p in named}

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return {self.plain(n): p.detach().clone() for n, p in model.named_parameters()}


class DDP(System):
    name = "DDP"

    def wrap(self, model: nn.Module, F: int | None = None) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=self.unused)

    def summed(self, model: nn.Module) -> nn.Module:
        def added(_, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, which here are strings
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, added)
        return wrapped

    def with_method(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        wrapped: Any = self.wrap(model)
        return wrapped, getattr(wrapped.module, name)

    def whole(self, model: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


SYSTEMS: dict[str, System] = {s.name: s for s in (Fxshard(), FSDP2(), FSDP1(), DDP())}


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def local(value: Any) -> Tensor:
    """What this rank holds of it."""
    if isinstance(value, fxshard.ShardedParameter):
        return value.local
    return value.to_local() if hasattr(value, "to_local") else value
