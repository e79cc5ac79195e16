"""fxshard and what it is measured beside, each as its own documents say: the same units, dtypes and optimizer."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard.units import unit_modules

BF16 = torch.bfloat16
DTYPES = {"bf16": BF16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """What all systems are asked for. F: ranks that share a copy; `bf16`: compute in bfloat16, reduce and step in float32."""

    F: int
    bf16: bool = False

    def mesh(self) -> DeviceMesh:
        """(W,) where all ranks share one copy, else (replicate, shard)."""
        W = dist.get_world_size()
        if self.F == W:
            return init_device_mesh("cpu", (W,))
        return init_device_mesh("cpu", (W // self.F, self.F), mesh_dim_names=("replicate", "shard"))


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules that fxshard makes units of by default."""
    return [model.get_submodule(name) for name in unit_modules(model, "auto")]


def _fxshard(model: nn.Module, setting: Setting, *, reduce: str | None = None, **options: Any) -> nn.Module:
    wire = DTYPES[reduce or "fp32"] if reduce or setting.bf16 else None
    precision = fxshard.MixedPrecision(param=BF16 if setting.bf16 else None, reduce=wire)
    return fxshard.compile(model, setting.F, mixed_precision=precision, **options)


def _fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    policy = (
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32) if setting.bf16 else MixedPrecisionPolicy()
    )
    mesh = setting.mesh()
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _fsdp2_compiled(model: nn.Module, setting: Setting) -> nn.Module:
    for unit in _units(model):
        unit.compile()
    return _fsdp2(model, setting)


def _fsdp1(model: nn.Module, setting: Setting) -> nn.Module:
    W, units = dist.get_world_size(), set(_units(model))
    more: dict[str, Any] = {}
    if setting.F == 1:
        more["sharding_strategy"] = ShardingStrategy.NO_SHARD
    elif setting.F < W:
        more |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": setting.mesh()}
    if setting.bf16:
        more["mixed_precision"] = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)

    def wraps(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or module in units

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=wraps, use_orig_params=True, device_id=cpu, **more)


def _ddp(model: nn.Module, setting: Setting) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _plain(model: nn.Module, setting: Setting) -> nn.Module:
    return model


SYSTEMS: dict[str, Callable[..., nn.Module]] = {
    "fxshard": _fxshard,
    "fsdp2": _fsdp2,
    "fsdp2-compiled": _fsdp2_compiled,
    "fsdp1": _fsdp1,
    "ddp": _ddp,
    "plain": _plain,
}
"""`plain` communicates nothing: the model of one rank, every rank its own."""


def build(system: str, model: nn.Module, setting: Setting) -> nn.Module:
    """A model under a system. Raises ValueError for one that is unknown, or options that are not as `check` says."""
    name, options = check(system)
    return SYSTEMS[name](model, setting, **options)


def check(system: str) -> tuple[str, dict[str, Any]]:
    """Name and options: `fxshard:rate_limit=3+forward_prefetch=2` is fxshard with options of `fxshard.compile`, and
    `fxshard:reduce=bf16` with gradients in that dtype on the wire."""
    name, _, text = system.partition(":")
    if name not in SYSTEMS:
        raise ValueError(f"unknown {name} (allowed: {', '.join(SYSTEMS)})")
    options = {}
    for option in filter(None, text.split("+")):
        key, _, value = option.partition("=")
        if (name, key) == ("fxshard", "reduce") and value in DTYPES:
            options[key] = value
            continue
        if name != "fxshard" or key not in {field.name for field in dataclasses.fields(fxshard.Options)}:
            raise ValueError(f"{system}: {name} has no option {key}")
        options[key] = ast.literal_eval(value)
    return name, options


SHARDS = ("fxshard", "fsdp2", "fsdp2-compiled", "fsdp1")
"""Those that F means something to."""


class Trainer:
    """A model under a system, with AdamW: `step` is one training step on this rank's batch."""

    def __init__(self, system: str, make: Callable[[], nn.Module], inputs: dict[str, Tensor], setting: Setting):
        torch.manual_seed(0)
        self.name = check(system)[0]
        self.model: Any = build(system, make(), setting)
        self.inputs = inputs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        # Those that do not cast parameters compute in bf16 as autocast does.
        self.autocast = setting.bf16 and self.name not in SHARDS

    def step(self, mark: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> float:
        """The loss. Forward, backward and the optimizer run in what `mark` gives for their names."""
        with mark("forward"), torch.autocast("cpu", BF16) if self.autocast else contextlib.nullcontext():
            loss = self.model(**self.inputs)
        with mark("backward"):
            loss.backward()
        with mark("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())
